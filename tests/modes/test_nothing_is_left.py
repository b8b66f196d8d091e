"""However a run ends, 5 s later nothing of it runs or listens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.base import processes
from launch.run_folder.layout import RunDir
from launch.schema.modes import LAUNCH_MODES
from tests import builders, orphans, stopping

ON_CPUS = [mode for mode, row in LAUNCH_MODES.items() if row.device != "cuda"]
ENDINGS = ("success", "a rank is killed", "SIGINT", "SIGTERM", "SIGKILL")
CODES = {
    "success": 0,
    "a rank is killed": 1,
    "SIGINT": 130,
    "SIGTERM": 75,
    "SIGKILL": -signal.SIGKILL,
}


def wait_for(what: str, found, child: subprocess.Popen[bytes]):
    """What `found` returns, once it is something; the run must be alive meanwhile."""
    deadline = time.monotonic() + 90
    while not (value := found()):
        assert child.poll() is None, f"ended with {child.returncode} before {what}"
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.1)
    return value


def ranks(run: RunDir) -> list[int]:
    """The processes of the run that train, not their launcher."""
    programs = ("train_low_mem.py", "fsdp_on_cpu.py")
    found = []
    for process in processes.tagged(run.tag):
        words = process.cmdline()
        if not stopping.is_launcher(words) and any(word.endswith(programs) for word in words):
            found.append(process.pid)
    return found


def quickly(mode: str, ending: str) -> bool:
    """True if a case is in the quick set: the hardest ending of each engine. make test-faults-fast
    sends every signal to multi_cpu, and asks the same."""
    if mode == "multi_cpu":
        return ending == "a rank is killed"
    return ending == "SIGKILL" and mode in ("cpu", "deepspeed_zero2_offload", "fsdp2")


@pytest.mark.shows(
    "F4",
    "F5",
    "F6",
    "F9",
    "every CPU mode: a rank killed, SIGINT, SIGTERM, SIGKILL; what is left is counted",
)
@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        pytest.param(mode, ending, marks=() if quickly(mode, ending) else pytest.mark.campaign)
        for mode in ON_CPUS
        for ending in ENDINGS
    ],
)
def test_nothing_is_left(tmp_path, mode, ending):
    epochs = 2 if ending == "success" else 100_000
    batch = 8 if mode == "cpu" else 4
    training = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch,
        "save_steps": 1000,
    }
    recipe = builders.recipe(tmp_path, training=training, launch={"max_restarts": 0})
    before = orphans.snapshot()
    argv = [sys.executable, "-m", "tests.modes.launch_one", mode, str(recipe)]
    child = subprocess.Popen(
        argv, env=builders.environment(tmp_path / "h"), cwd=builders.CODE, stdout=subprocess.DEVNULL
    )
    folder: Path = wait_for(
        "began", lambda: list((tmp_path / "h/runs/tiny").glob("*/plan.json")), child
    )[0].parent
    run = RunDir(folder)
    if ending != "success":
        events = run.attempt(1).events_file
        wait_for("trained", lambda: events.exists() and events.stat().st_size, child)
        number = signal.SIGKILL if ending == "a rank is killed" else getattr(signal, ending)
        os.kill(ranks(run)[-1] if ending == "a rank is killed" else child.pid, number)
    code = child.wait(timeout=90)
    left = orphans.left(before, run.tag, within_s=5)
    for orphan in left:
        os.kill(orphan.pid, signal.SIGKILL)
    assert left == []
    assert code == CODES[ending]
