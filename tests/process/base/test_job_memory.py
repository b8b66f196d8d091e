"""Host RAM of a job as its launcher and its ranks read it, of real processes that hold and map
memory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from launch.base import processes
from launch.base.processes import JobMemory
from tests import builders

MIB = 1 << 20
SLACK = 8 * MIB  # of an interpreter that does a little more
# Runs each line that it is told, and says so.
OBEDIENT = """
import mmap, os, signal, sys
from launch.base import processes
def read(path):
    with open(path, "rb") as file: pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    touch(pages)
    return pages
def touch(pages):
    for start in range(0, len(pages), 4096): pages[start]
def forked(work):
    reads, writes = os.pipe()
    if not os.fork():
        processes.die_with_launcher()
        kept = work()
        os.write(writes, b"x")
        signal.pause()
    os.close(writes)
    assert os.read(reads, 1)
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


class Process:
    """A process that does what it is told."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", OBEDIENT],
            cwd=builders.CODE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._child.pid

    def do(self, line: str) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "\n"

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


@contextmanager
def process() -> Iterator[Process]:
    started = Process()
    try:
        started.do("pass")
        yield started
    finally:
        started.end()


def file_of(folder: Path, name: str) -> Path:
    """A file of 64 MiB."""
    (folder / name).write_bytes(bytes(64 * MIB))
    return folder / name


def resident_bytes(pid: int) -> int:
    (kib,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kib) << 10


def test_its_own_memory_counts_and_the_pages_of_a_file_that_it_reads_do_not(tmp_path):
    with process() as child:
        job = JobMemory(child.pid)
        before, resident = job.read(False), resident_bytes(child.pid)
        assert MIB < before <= resident
        child.do(f"rows = read({str(file_of(tmp_path, 'rows'))!r})")
        assert resident_bytes(child.pid) - resident > 64 * MIB - SLACK
        assert job.read(False, is_exact=True) - before < SLACK
        child.do("held = bytearray(b'x') * (64 << 20)")
        assert abs(job.sample(False) - before - 64 * MIB) < SLACK, "without a walk of its pages"
        assert abs(job.peak_bytes - job.bytes) < SLACK


def test_a_page_of_shared_memory_counts_once_for_all_that_map_it():
    with process() as child:
        before = JobMemory(child.pid).read(False)
        child.do("pages = mmap.mmap(-1, 64 << 20)")
        child.do("pages.write(bytes(64 << 20))")
        child.do("held = bytearray(b'x') * (64 << 20)")
        child.do("for _ in range(2): forked(lambda: touch(pages))")
        after = JobMemory(child.pid).read(False)
    assert abs(after - before - 128 * MIB) < 3 * SLACK


def shared_bytes(pid: int) -> int:
    """The shared memory that a process has touched."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("RssShmem:"))
    return int(line.split()[1]) << 10


def test_shared_memory_that_processes_map_after_they_were_walked_counts_once():
    with process() as child:
        child.do("pages = mmap.mmap(-1, 64 << 20)")
        child.do("heard = lambda *_: (touch(pages), signal.pause())")
        child.do("for _ in range(2): forked(lambda: signal.signal(signal.SIGUSR1, heard))")
        job = JobMemory(child.pid)
        before, ranks = job.read(False), psutil.Process(child.pid).children()
        for rank in ranks:
            rank.send_signal(signal.SIGUSR1)
        while min(shared_bytes(rank.pid) for rank in ranks) < 64 * MIB:
            time.sleep(0.01)
        assert abs(job.sample(False) - before - 64 * MIB) < SLACK, "without a walk of their pages"


def test_weights_of_files_count_once_and_only_while_it_trains(tmp_path):
    with process() as child:
        job = JobMemory(child.pid)
        file = str(file_of(tmp_path, "model.safetensors"))
        before = job.read(False)
        child.do(f"for _ in range(2): forked(lambda: read({file!r}))")
        assert job.read(False) - before < 3 * SLACK
        assert abs(job.read(True, is_exact=True) - before - 64 * MIB) < 3 * SLACK


def test_a_peak_between_two_reads_is_seen_while_it_trains(tmp_path):
    with process() as child:
        job, file = JobMemory(child.pid), str(file_of(tmp_path, "model"))
        before = job.read(False)
        child.do(f"read({file!r})")  # loaded, and dropped
        child.do("processes.forget_peak()")
        job.read(True)
        assert job.peak_bytes - before < SLACK
        child.do("bytearray(b'x') * (64 << 20)")
        assert job.read(True) - before < SLACK
        assert abs(job.peak_bytes - before - 64 * MIB) < SLACK


def test_what_is_mapped_and_dropped_by_a_training_is_no_peak(tmp_path):
    with process() as child:
        child.do("processes.forget_peak()")
        job = JobMemory(child.pid)
        before = job.read(True)
        child.do(f"rows = read({str(file_of(tmp_path, 'rows'))!r})")
        job.sample(True)
        child.do("del rows")
        job.read(True)
        assert job.peak_bytes - before < SLACK


def test_of_a_process_that_is_gone_the_last_figure_stays():
    with process() as child:
        job = JobMemory(child.pid)
        before = job.read(False)
    assert before == job.read(False) == job.peak_bytes
    assert processes.pages().own_bytes > MIB
