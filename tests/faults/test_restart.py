"""A failure that may pass is followed by another attempt from the last checkpoint; one that comes
again is not."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from launch.base import processes
from tests import builders, stopping

KILL = "os.kill(os.getpid(), 9)"
BOOM = "raise RuntimeError('boom')"


@pytest.mark.fast_faults
@pytest.mark.shows("F4", "kill -9 of one rank at step 10, by itself; it left a mark")
def test_kill_minus_nine_of_a_rank_restarts_and_the_end_is_that_of_an_uninterrupted_run(tmp_path):
    training = {"num_train_epochs": 5, "save_steps": 4}
    with stopping.launched(
        tmp_path,
        workspace="whole",
        words=(f"--output_dir={tmp_path / 'whole_model'}",),
        training=training,
    ) as child:
        assert child.wait() == 0, child.said()
    fault = stopping.at_step("10", KILL, times=1)
    with stopping.launched(
        tmp_path, workspace="killed", faults={"kill": fault}, training=training
    ) as child:
        assert child.wait() == 0, child.said()
        said = child.said()
        assert stopping.fired(tmp_path, "kill") == 1
        assert (
            said.count("restart 1 of 10 in 1 s, from step 8: a process of the run was killed") == 1
        )
        assert "resuming from checkpoint-000008" in said
        assert len(child.run.attempts()) == 2
        assert child.left() == []
    expected, found = (
        builders.weights(tmp_path / "whole_model"),
        builders.weights(tmp_path / "model"),
    )
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_rank_that_exits_without_an_error_is_named_and_no_temporary_file_is_left(tmp_path):
    fault = stopping.at_step("7", "os._exit(0)", rank=1)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = {"launch": {"max_restarts": 0}, "extra": {"TMPDIR": str(temporary)}}
    training = {"dataloader_num_workers": 1}
    with stopping.launched(tmp_path, faults={"exit": fault}, training=training, **options) as child:
        assert child.wait() == 1, child.said()
        assert stopping.fired(tmp_path, "exit") == 1, child.said()
        assert "rank 1 ended without an error, and the other ranks lost it" in child.said()
        assert child.left() == []
        made = {path.name for path in temporary.glob("lowmem-*/*")}
        assert made <= {"inductor", "triton", "extensions"}


@pytest.mark.shows(
    "F5", "kill -9 of accelerate, whose one rank saves and ends; it was alive before"
)
def test_kill_minus_nine_of_the_launcher_of_one_rank_is_no_stop(tmp_path):
    training = {"num_train_epochs": 200, "save_steps": 50}
    with stopping.launched(tmp_path, ranks=1, training=training) as child:
        child.until("a checkpoint", child.committed)
        processes.send(child.launcher().pid, signal.SIGKILL)
        assert child.wait() == 0, child.said()
        assert child.said().count("restart 1 of 10") == 1
        assert len(child.run.attempts()) == 2
        assert child.left() == []


@pytest.mark.shows("F51", "an exception at step 7 of each attempt; marks counted, one an attempt")
def test_a_step_that_always_crashes_stops_the_run_with_its_cause(tmp_path):
    fault = stopping.at_step("7", BOOM)
    with stopping.launched(tmp_path, faults={"boom": fault}) as child:
        assert child.wait() == 1, child.said()
        assert "step 7 ended in the same failure before (crash): no further restart" in child.said()
        assert "rank 1 failed: RuntimeError: boom" in child.said()
        assert stopping.fired(tmp_path, "boom") == len(child.run.attempts()) == 2
        assert child.committed() == [5]
        assert child.left() == []


@pytest.mark.shows("F51", "kill -9 of a rank at another step in each attempt; attempts counted")
def test_three_restarts_without_a_new_checkpoint_are_the_last(tmp_path):
    """Killed at another step each time, so that no step is to blame."""
    fault = stopping.at_step("6 + done", KILL)
    training = {"save_steps": 1000}
    with stopping.launched(tmp_path, faults={"kill": fault}, training=training) as child:
        assert child.wait(within_s=200) == 1, child.said()
        assert "3 restarts in a row committed no new step: no further restart" in child.said()
        assert len(child.run.attempts()) == 4
        assert child.left() == []


@pytest.mark.shows("F51", "an exception while the model is built; marks counted")
def test_a_crash_before_the_first_step_is_not_tried_again(tmp_path):
    fault = {"module": "training.model.build", "attribute": "build", "rank": 0, "do": BOOM}
    with stopping.launched(tmp_path, faults={"boom": fault}) as child:
        assert child.wait() == 1, child.said()
        assert len(child.run.attempts()) == stopping.fired(tmp_path, "boom") == 1
        assert "restart" not in child.said()


def test_max_restarts_0_means_never_and_a_stop_ends_the_wait_for_a_restart(tmp_path):
    fault = stopping.at_step("7", KILL)
    with stopping.launched(
        tmp_path / "never", faults={"kill": fault}, launch={"max_restarts": 0}
    ) as child:
        assert child.wait() == 1, child.said()
        assert len(child.run.attempts()) == 1
    with stopping.launched(
        tmp_path / "stopped", faults={"kill": fault}, training={"save_steps": 1000}
    ) as child:
        child.until("a restart", lambda: "restart 1 of 10 in 1 s" in child.said())
        child.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        # of the failure, or of the next attempt that is stopped
        assert child.wait() in (1, 75), child.said()
        assert time.monotonic() - began < 30
        assert child.left() == []


# As a rank waits in a collective of NCCL: inside a library, where no signal's handler of Python
# ever runs.
DEAF = """
import ctypes
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)
"""


@pytest.mark.shows(
    "F4",
    "kill -9 of one rank while the other waits inside a library; it was alive before, and left a"
    " mark",
)
def test_kill_minus_nine_of_a_rank_is_named_where_the_other_takes_no_signal_and_the_run_goes_on(
    tmp_path, injected
):
    training = {"num_train_epochs": 5, "save_steps": 4}
    deaf = stopping.at_step("6", DEAF, rank=0, times=1)
    with stopping.launched(tmp_path, faults={"deaf": deaf}, training=training) as child:
        child.until("rank 0 waits", lambda: stopping.fired(tmp_path, "deaf"))
        waits, killed = child.ranks()
        killed.kill()
        injected()
        assert child.wait(240) == 0, child.said()
        said, first, second = child.said(), *child.run.attempts()
        assert f"ending rank 0 (process {waits.pid}, step) with SIGKILL: another rank ended" in said
        assert (
            said.count("restart 1 of 10 in 1 s, from step 4: a process of the run was killed") == 1
        )
        failure = json.loads(first.supervisor_file.read_text())["failure"]
        assert failure["kind"] == "killed"
        assert failure["proof"] == f"the launcher reports SIGKILL for rank 1 (process {killed.pid})"
        assert json.loads(second.outcome_file.read_text())["complete"]
        assert child.left() == []
