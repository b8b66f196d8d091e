"""Processes of other PID namespaces: a /proc that does not show our own, and what a container says
of the locks, leases and jobs of another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.base import locks
from launch.base.errors import LockHeld
from launch.commands.submit import job
from launch.commands.submit.job import JobDir
from tests import builders, namespaces

NEW_PIDS = ("--pid", "--fork", "--mount-proc", "--kill-child")
LAUNCH = f"{sys.executable} -m launch"
# holds a job, and the lock of a file, until it is killed
HOLD = """
import sys, time
from pathlib import Path
from launch.base import locks
from launch.commands.submit.job import JobDir
with JobDir(Path(sys.argv[1])).hold(), locks.lock(Path(sys.argv[2]), "the run"):
    print("held", flush=True)
    time.sleep(600)  # the test kills it; one whose test died ends by itself
"""


@pytest.mark.parametrize(
    ("line", "flags", "found"),
    [
        ("mount -t tmpfs none /proc && ", ("--mount",), "is not mounted"),
        ("", ("--pid", "--fork", "--kill-child"), "shows another PID namespace"),
    ],
)
@pytest.mark.parametrize(
    "argv", [f"{LAUNCH} queue", f"{sys.executable} {builders.CODE}/train_low_mem.py train"]
)
def test_a_proc_that_does_not_show_our_processes_is_one_line(tmp_path, argv, line, flags, found):
    done = namespaces.bash(f"{line}exec {argv}", *flags, workspace=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"error: /proc {found}: " in done.stderr and "`mount -t proc proc /proc`" in done.stderr


@contextmanager
def container(job_dir: Path, lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds both as the first of its own PID namespace."""
    unshare = ["unshare", "--user", "--map-root-user", *NEW_PIDS]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        # a kernel without user namespaces; CI has them
        pytest.skip("this machine lets nobody make a PID namespace")
    argv = [*unshare, sys.executable, "-c", HOLD, str(job_dir), str(lock)]
    env = builders.environment(lock.parent)
    child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_lock_and_a_job_of_another_container_count_until_it_is_killed(tmp_path, monkeypatch):
    root, lock = tmp_path / "submitted" / "sft-1", tmp_path / "lock"
    root.mkdir(parents=True)
    (root / "job.json").write_text('{"name": "sft-1", "argv": [], "cwd": "/", "submitted_s": 1}')
    workspace = job.Workspace(tmp_path)
    with container(root, lock) as child:
        assert locks.holder_pid(lock) == 0  # its pid means nothing here
        with (
            pytest.raises(LockHeld, match="another machine or container, its process 1"),
            locks.lock(lock, "the run"),
        ):
            pass
        assert JobDir(root).runs and job.killed(workspace) == []
        assert job.of_process(tmp_path / "runs" / "sft" / "1", 1) is None
        child.kill()
        child.wait()
        for _ in range(100):  # the kernel ends the first process of that namespace
            if locks.holder_pid(lock) is None:
                break
            time.sleep(0.05)
        assert locks.holder_pid(lock) is None
        assert not JobDir(root).runs and job.killed(workspace) == [root / "job.sh"]
    with locks.lock(lock, "the run"):
        assert locks.holder_pid(lock) == os.getpid()


def test_the_list_names_no_process_of_another_container(tmp_path):
    code = """
import sys, time
from pathlib import Path
from launch.queue import leases
with leases.admission(Path(sys.argv[1])) as begin:
    needs = leases.Needs(host_bytes=1 << 30)
    lease = begin(leases.boot_record(state="granted", needs=needs, recipe="mine"))
    print("held", flush=True)
    time.sleep(600)  # the test kills it; one whose test died ends by itself
"""
    place = tmp_path / "leases"
    place.mkdir()
    env = builders.environment(tmp_path)
    argv = [sys.executable, "-c", code, str(place)]
    holder = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        done = namespaces.bash(
            f"{LAUNCH} queue; {LAUNCH} queue cancel 1", *NEW_PIDS, workspace=tmp_path
        )
        row = done.stdout.splitlines()[1].split()
        assert row[0] == "1" and row[2:4] == ["-", "runs"]
        assert "(mine, a process in another container): end it where it was" in done.stderr
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        done = namespaces.bash(f"{LAUNCH} queue", *NEW_PIDS, workspace=tmp_path)
        assert "no run has or waits for a lease" in done.stdout
    finally:
        holder.kill()
        holder.wait()
