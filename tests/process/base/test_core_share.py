"""The share of its time in which a process had a core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.base import processes
from tests.builders import CODE

BUSY = """
import sys, time
from launch.base import processes
before = processes.scheduled()
end = time.thread_time() + 0.3
while time.thread_time() < end:
    pass
print(processes.core_share(before))
"""


@pytest.mark.skipif(not processes.scheduled(), reason="the kernel does not count it")
def test_two_processes_on_one_core_have_half_of_it_each():
    core = {min(os.sched_getaffinity(0))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY],
            cwd=CODE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
        for _ in range(2)
    ]
    shares = [float(process.communicate()[0]) for process in started]
    assert 0 < min(shares) < 0.8


def test_threads_that_have_ended_or_begun_count_since_they_are_there(monkeypatch):
    monkeypatch.setattr(processes, "scheduled", lambda: {"1": (70, 30), "3": (20, 0)})
    assert processes.core_share({"1": (10, 10), "2": (500, 500)}) == 80 / 100
    monkeypatch.setattr(processes, "scheduled", dict)
    assert processes.core_share({"1": (10, 10)}) == 1.0


TAKEN = """
import sys, time
from launch.base import processes
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 0.6:
    if sys.argv[1] == "waits":
        time.sleep(0.05)
own = (time.process_time() - used) / (time.monotonic() - began)
print(processes.taken_cores(), own)
"""


@pytest.mark.parametrize("way", ["waits", "computes"])
def test_taken_cores_are_those_of_others_on_cores_that_this_process_may_use(way):
    core = {min(os.sched_getaffinity(0))}

    def on_core() -> None:
        os.sched_setaffinity(0, core)

    with subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=on_core) as busy:
        argv = [sys.executable, "-c", TAKEN, way]
        done = subprocess.run(
            argv, cwd=CODE, preexec_fn=on_core, capture_output=True, text=True, check=True
        )
        busy.kill()
    taken, own = map(float, done.stdout.split())
    assert taken == pytest.approx(1 - own, abs=0.15)  # the core is never idle
