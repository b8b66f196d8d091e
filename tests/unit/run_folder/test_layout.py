"""The folders of runs."""

from __future__ import annotations

from datetime import datetime

import pytest

from launch.run_folder.layout import RunDir, show_events
from tests.builders import recipe_of

pytestmark = pytest.mark.unit


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path):
    runs = [RunDir.create(tmp_path, "wish", datetime(2026, 1, 2, 3, 4, 5)) for _ in range(3)]
    names = ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]
    assert [run.root.name for run in runs] == names
    assert all(run.checkpoints.is_dir() for run in runs)


def test_a_folder_of_logs_is_made_and_leads_to_the_events_of_each_run(tmp_path):
    run = RunDir.create(tmp_path, "wish", datetime(2026, 1, 2, 3, 4, 5))
    logs = tmp_path / "results" / "logs"
    for _ in range(2):  # a run that is continued
        show_events(run, recipe_of(log_dir=str(logs)))
    assert [path.readlink() for path in logs.iterdir()] == [run.tensorboard]
