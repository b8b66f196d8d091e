"""Trackers of a run: which ranks have them, and where their files are."""

from __future__ import annotations

import os
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from launch.run_folder.layout import RunDir
from training.loop import trackers

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("report_to", "rank", "count"),
    [(("tensorboard", "wandb"), 0, 1), (("tensorboard", "wandb"), 1, 0), (("tensorboard",), 0, 0)],
)
def test_rank_0_alone_has_trackers_whose_files_are_the_runs_unless_the_user_says_where(
    tmp_path, monkeypatch, report_to, rank, count
):
    run = RunDir.create(tmp_path, "wish", datetime(2026, 1, 1))
    for variable in trackers.settings(run, tmp_path):
        monkeypatch.setenv(variable, "")  # so that the end of the test removes it
        monkeypatch.delenv(variable)
    monkeypatch.setenv("SWANLAB_LOG_DIR", "/mine")
    args: Any = SimpleNamespace(process_index=rank, run_name=None)
    assert len(trackers.callbacks(report_to, run, tmp_path, args)) == count
    assert os.environ["SWANLAB_LOG_DIR"] == "/mine"
    set_here = {name: os.environ.get(name) for name in ("WANDB_DIR", "WANDB_RUN_ID")}
    if count:
        assert set_here == {"WANDB_DIR": str(run.root), "WANDB_RUN_ID": run.run_id}
        assert args.run_name == run.run_id
    else:
        assert set_here == {"WANDB_DIR": None, "WANDB_RUN_ID": None}
        assert args.run_name is None
