"""The folders of a start, before its ranks begin."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from datetime import datetime

from launch.base import locks
from launch.base.workspace import Workspace
from launch.commands.attempts import LaunchContext
from launch.run_folder.layout import RunDir
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals
from tests import builders


def test_a_new_run_is_in_use_until_another_goes_on(tmp_path):
    workspace = Workspace(tmp_path)
    facts = builders.facts_of(builders.recipe_of(), builders.machine())
    with ExitStack() as stack:
        screen = Screen(stream=io.StringIO())
        new_run = LaunchContext(workspace, facts, screen, StopSignals(), stack, None).new_run()
        run = new_run()
        assert locks.holder_pid(run.lock_file) == os.getpid()
        assert new_run() is run
    assert not run.root.exists()  # nothing was planned in it
    with ExitStack() as stack:
        start = LaunchContext(workspace, facts, screen, StopSignals(), stack, None)
        new_run = start.new_run()
        tokenised, earlier = new_run(), RunDir.create(workspace.runs, "wish", datetime(2026, 1, 1))
        tokenised.new_attempt().tokenising_file.touch()
        start.hold(earlier)
        start.hold(earlier)  # after a wait, for instance
        assert locks.holder_pid(earlier.lock_file) == os.getpid()
        assert RunDir.listed(workspace.runs) == []
        assert new_run().checkpoints.is_dir()  # the next plan may need it
    assert not tokenised.root.exists()
    assert locks.holder_pid(earlier.lock_file) is None
