"""The orphan checker finds what real programs leave behind, and accuses nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from tests import cost, orphans

RUN = "wish-20260101-000000"
SLEEP = "import time; time.sleep(600)"
LISTEN = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""
# what a launcher does that dies before its rank: the child is nobody's any more, in a session of
# its own
LEAK = """
import subprocess, sys
argv, pipe, null = [sys.executable, "-c", sys.argv[1]], subprocess.PIPE, subprocess.DEVNULL
child = subprocess.Popen(argv, start_new_session=True, stdout=pipe, stderr=null, text=True)
print(child.pid, child.stdout.readline() if sys.argv[2:] else "")
"""


def run(code: str, *words: str, tag: str = RUN) -> str:
    """A program of the run, to its end; what it printed."""
    argv = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "LOWMEM_RUN": tag}
    return subprocess.run(
        argv, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(
        [process for process in psutil.process_iter() if process.pid == pid], timeout=60
    )


def test_a_clean_run_leaves_nothing_and_is_not_waited_for():
    before = orphans.snapshot()
    run("print('done')")
    assert cost.count_calls(lambda: orphans.left(before, RUN, within_s=60), of=time.sleep) == 0
    assert orphans.left(before, RUN) == []


def test_a_child_that_outlives_its_launcher_is_found_by_the_tag():
    before = orphans.snapshot()
    pid = int(run(LEAK, SLEEP).split()[0])
    try:
        assert psutil.Process(pid).ppid() != os.getpid()
        (found,) = orphans.left(before, RUN, within_s=0.2)
        assert found.pid == pid
        assert SLEEP in found.what
        assert orphans.left(before, "another-run", within_s=0.2) == []
    finally:
        kill(pid)
    assert orphans.left(before, RUN) == []


def test_a_port_that_is_still_listened_on_is_found():
    before = orphans.snapshot()
    pid, port = map(int, run(LEAK, LISTEN, "listens").split())
    try:
        found = orphans.left(before, RUN, within_s=0.2)
        assert orphans.Orphan(pid, f"listens on 127.0.0.1:{port}") in found
        assert {orphan.pid for orphan in found} == {pid}
    finally:
        kill(pid)
    assert orphans.left(before, RUN) == []


def test_an_untagged_child_of_ours_is_found_too():
    before = orphans.snapshot()
    environment = {key: value for key, value in os.environ.items() if key != "LOWMEM_RUN"}
    child = subprocess.Popen([sys.executable, "-c", SLEEP], env=environment)
    try:
        assert [found.pid for found in orphans.left(before, RUN, within_s=0.2)] == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_what_was_there_before_and_what_is_dying_is_not_accused():
    old = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, "LOWMEM_RUN": RUN})
    try:
        before = orphans.snapshot()
        dying = subprocess.Popen(["sleep", "0.5"], env={**os.environ, "LOWMEM_RUN": RUN})
        assert orphans.left(before, RUN, within_s=10) == []
        dying.wait()
    finally:
        old.kill()
        old.wait()
