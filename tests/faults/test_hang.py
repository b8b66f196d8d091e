"""A rank that hangs is found by its heartbeat, its stacks are kept, and the run goes on; a slow one
is only named."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import stopping


@pytest.mark.shows("F27", "SIGSTOP to one rank; its state is read: stopped")
@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.fast_faults)])
def test_a_stopped_rank_is_found_its_stacks_are_saved_and_the_run_is_started_again(
    tmp_path, injected, goes_on
):
    launch = {"hang_floor_s": 4, "max_restarts": 10 if goes_on else 0}
    with stopping.launched(tmp_path, launch=launch) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        rank = child.ranks()[1]
        rank.send_signal(signal.SIGSTOP)
        injected()
        child.until("the verdict", lambda: "hangs: no sign of life for" in child.said())
        assert f"rank 1 (process {rank.pid}, stopped) hangs" in child.said()
        first = child.run.attempt(1)
        if goes_on:
            child.until(
                "a second attempt",
                lambda: len(child.run.attempts()) == 2 and child.section() == "step",
            )
            assert "restart 1 of 10 in 1 s, from step" in child.said()
            child.process.send_signal(signal.SIGTERM)
            assert child.wait() == 75, child.said()
        else:
            assert child.wait() == 7, child.said()
        for number in (0, 1):
            stacks = first.stacks_file(number).read_text()
            assert "most recent call first" in stacks
            assert "train_low_mem.py" in stacks
        assert child.left() == []


@pytest.mark.shows("F27", "SIGSTOP to all processes of a run, as Ctrl-Z or a paused container")
@pytest.mark.fast_faults
def test_a_run_that_is_stopped_as_a_whole_goes_on(tmp_path, injected):
    with stopping.launched(tmp_path, launch={"hang_floor_s": 4, "max_restarts": 0}) as child:
        child.until("a checkpoint", lambda: child.committed())
        everybody = [psutil.Process(child.process.pid), *child.ranks()]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        injected()
        time.sleep(12)  # three times the floor: what is tested is that time passes unseen
        for process in reversed(everybody):
            process.send_signal(signal.SIGCONT)
        begun = len(child.committed())
        child.until("more checkpoints", lambda: len(child.committed()) > begun)
        assert "hangs" not in child.said(), child.said()
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()


@pytest.mark.shows("F27", "SIGSTOP to the process that tokenises; its state is read: stopped")
def test_a_stopped_process_that_tokenises_is_found_and_started_again(tmp_path, injected):
    with stopping.launched(tmp_path, count=100_000, launch={"hang_floor_s": 3}) as child:
        child.until("tokenising", lambda: child.section() == "tokenise")
        beat = child.run.attempts()[-1].heartbeat_file(0).read_text()
        tokenising = psutil.Process(json.loads(beat)["pid"])
        tokenising.send_signal(signal.SIGSTOP)
        injected()
        child.until(
            "the verdict",
            lambda: f"rank 0 (process {tokenising.pid}, stopped) hangs" in child.said(),
        )
        child.until(
            "a second attempt", lambda: len(child.run.attempts()) == 2 and child.section() == "step"
        )
        assert "restart 1 of " in child.said()
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()
        assert child.left() == []


LOOP = "while True: pass"
LOCK = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"


@pytest.mark.shows("F27", "a collator that never returns, in the rank or in a worker; a mark")
@pytest.mark.parametrize("do", [LOOP, LOCK], ids=["loop", "deadlock"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_collator_that_never_returns_is_a_hang_whose_stacks_are_saved(
    tmp_path, workers, do, goes_on
):
    """A rank whose worker hangs waits for it; a rank that computes for ever gets longer."""
    fault = {
        **{"module": "training.data.batches", "attribute": "Collator.__call__", "do": do},
        **{"when": "call >= 8", "rank": 1, "times": 1 if goes_on else 100},
    }
    launch = {"hang_floor_s": 4, "max_restarts": 10 if goes_on else 0}
    training = {"dataloader_num_workers": workers, "eval_steps": 100_000}
    with stopping.launched(
        tmp_path, faults={"hung": fault}, launch=launch, training=training
    ) as child:
        child.until("the verdict", lambda: "hangs: no sign of life for" in child.said())
        assert stopping.fired(tmp_path, "hung")
        first = child.run.attempt(1)
        if goes_on:
            child.until(
                "a second attempt",
                lambda: len(child.run.attempts()) == 2 and child.section() == "step",
            )
            child.process.send_signal(signal.SIGTERM)
            assert child.wait() == 75, child.said()
        else:
            assert child.wait() == 7, child.said()
        stacks = first.stacks_file(1).read_text()
        assert ("dataloader.py" if workers else "sitecustomize.py") in stacks
        assert child.left() == []


@pytest.mark.shows(
    "F20", "F53", "6 s in each save of one rank and in each evaluation; marks counted"
)
def test_slow_saves_and_evaluations_are_no_hang(tmp_path):
    """Each takes longer than a step may."""
    sleep = "import time; time.sleep(6)"
    faults = {
        "save": {
            "module": "training.checkpoints.commit",
            "attribute": "describe",
            "do": sleep,
            "rank": 1,
        },
        "evaluation": {
            "module": "training.control.stop_callback",
            "attribute": "StopCallback.between_batches",
            "do": sleep,
            "times": 2,
        },
    }
    training = {"num_train_epochs": 2, "save_steps": 5}
    with stopping.launched(
        tmp_path, faults=faults, launch={"hang_floor_s": 4}, training=training
    ) as child:
        assert child.wait() == 0, child.said()
        assert stopping.fired(tmp_path, "save") == 3
        assert stopping.fired(tmp_path, "evaluation") == 2
        assert "hangs" not in child.said()
        assert len(child.run.attempts()) == 1


@pytest.fixture
def tenth_of_a_cpu():
    """The file into which a process's number is written to give it a tenth of a CPU."""
    group = Path("/sys/fs/cgroup/cpu") / f"lowmem-test-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("10000")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group / "cgroup.procs"
    for _ in range(50):
        try:
            group.rmdir()
            break
        except OSError:
            time.sleep(0.1)


@pytest.mark.shows("F28", "a cgroup of a tenth of a CPU for one rank; the pace of its steps drops")
def test_a_rank_with_a_tenth_of_a_cpu_is_named_and_not_ended(tmp_path, tenth_of_a_cpu):
    with stopping.launched(
        tmp_path,
        launch={"hang_floor_s": 8},
        training={"save_steps": 100_000, "eval_steps": 100_000},
    ) as child:
        child.until("steps", lambda: child.section() == "step")
        time.sleep(45)  # to know its pace
        tenth_of_a_cpu.write_text(str(child.ranks()[1].pid))
        child.until("a warning", lambda: "slow: a step takes" in child.said(), within_s=60)
        time.sleep(10)
        assert child.process.poll() is None
        assert "hangs" not in child.said()
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()
        assert child.left() == []


@pytest.fixture
def frozen(tmp_path):
    """(folder, freeze): a file system whose writers no signal ends once it is frozen."""
    image, folder = tmp_path / "image", tmp_path / "mount"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if os.system(f"mkfs.ext4 -q {image} && mount -o loop {image} {folder}") != 0:
        pytest.skip("no file system can be mounted here")
    yield folder, lambda: os.system(f"fsfreeze -f {folder}")
    os.system(f"fsfreeze -u {folder}; umount -l {folder}")


@pytest.mark.shows(
    "F29", "a write into a frozen ext4; a mark, and SIGKILL leaves the process there"
)
def test_a_process_that_nothing_can_end_is_named_and_the_supervisor_ends(tmp_path, frozen):
    folder, freeze = frozen
    write = f"open({str(folder / 'file')!r}, 'w').write('x' * 9999)"
    fault = stopping.at_step(
        "args[2].global_step if os.path.exists(os.environ['PYTHON_FAULT_MARKS'] + '/go') else -1",
        write,
    )
    launch = {"hang_floor_s": 4, "max_restarts": 3}
    with stopping.launched(tmp_path, faults={"stuck": fault}, launch=launch) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        rank = child.ranks()[1]
        assert freeze() == 0
        (tmp_path / "marks" / "go").touch()
        child.until("it is stuck", lambda: stopping.fired(tmp_path, "stuck"))
        assert child.wait(within_s=90) == 7, child.said()
        assert f"not even SIGKILL ended process {rank.pid}" in child.said()
        # beside a process that still holds the run's memory none is started
        assert len(child.run.attempts()) == 1
