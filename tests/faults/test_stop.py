"""However a run is ended from outside, no process outlives it and the last whole checkpoint is there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import tree
from tests import builders


def start(tmp_path: Path, ranks: int) -> tuple[subprocess.Popen[str], Path, Path]:
    """A run that has written its first checkpoint: (supervisor, run folder, recipe)."""
    training = {"num_train_epochs": 2000, "save_steps": 5, "per_device_train_batch_size": 8 // ranks}
    recipe = builders.recipe(tmp_path, training=training, launch={"num_processes": ranks})
    child = subprocess.Popen(
        [sys.executable, "-m", "launch", "run", str(recipe)],
        env=builders.environment(tmp_path / "house"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "house").glob("runs/tiny/*/checkpoints/checkpoint-*")):
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return child, builders.only_run(tmp_path / "house"), recipe


def survivors(run: Path, within_s: float) -> list[psutil.Process]:
    """Processes with the run's tag that are still there after so long."""
    deadline = time.monotonic() + within_s
    while found := tree.tagged(f"{run.parent.name}-{run.name}"):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.05)
    return []


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_minus_nine_of_the_supervisor_takes_the_ranks_with_it(tmp_path, ranks):
    child, run, _ = start(tmp_path, ranks)
    child.kill()
    child.wait()
    assert survivors(run, within_s=5) == []


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_stop_signal_ends_the_run_with_its_code_and_the_same_line_continues(tmp_path, number, exit_code):
    child, run, recipe = start(tmp_path, 2)
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == exit_code, said
    assert f"stopped by {number.name}" in said
    assert "run the same line again" in said
    assert survivors(run, within_s=5) == []
    again = builders.launch(tmp_path / "house", "run", str(recipe), "--dry-run")
    assert "continuing tiny-" in again.stdout


def test_kill_minus_nine_of_a_rank_ends_the_other_and_is_not_called_out_of_memory(tmp_path):
    child, run, _ = start(tmp_path, 2)
    words = {process: process.cmdline() for process in tree.tagged(f"tiny-{run.name}")}
    ranks = [process for process in words if "--run-dir" in words[process] and "-P" not in words[process]]
    assert len(ranks) == 2
    ranks[0].kill()
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 1, said
    assert "killed a process of the run with SIGKILL" in said
    assert survivors(run, within_s=5) == []


def test_a_second_start_is_refused_while_the_first_runs(tmp_path):
    child, _, recipe = start(tmp_path, 1)
    began = time.monotonic()
    second = builders.launch(tmp_path / "house", "run", str(recipe))
    took = time.monotonic() - began
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert second.returncode == 9
    assert f"process {child.pid}" in second.stderr
    assert took < 2


def test_a_real_kernel_oom_kill_is_named_with_the_limit(tmp_path):
    """A cgroup of its own, too small for the run: the kernel kills a rank."""
    group = Path("/sys/fs/cgroup/memory") / f"lowmem-test-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(450 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        recipe = builders.recipe(tmp_path, training={"max_steps": 3}, launch={"host_reserve_gib": 0.0})
        prepared = builders.launch(tmp_path / "house", "run", str(recipe))
        assert prepared.returncode == 0, prepared.stderr
        line = f'echo $$ > "{group}/cgroup.procs"; exec "{sys.executable}" -m launch run "{recipe}" --resume never'
        done = subprocess.run(
            ["bash", "-c", line],
            env=builders.environment(tmp_path / "house"),
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "the kernel killed a process of the run: host RAM limit 0.44 GiB" in done.stdout
    assert "oom_kill counter grew by" in done.stdout
