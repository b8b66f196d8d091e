"""The processes of a run, found by the tag in their environment: launchers put ranks into sessions
of their own."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import psutil

POLL_S = 0.2  # between two looks at a run
UNKILLABLE_S = 10.0  # after SIGKILL
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def adopt() -> None:
    """From now on orphans below this process become its children: none is lost from sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def tagged(tag: str) -> list[psutil.Process]:
    """Every process that carries the run's tag in its environment, wherever it stands in the
    process tree."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and is_tagged(process, tag)
    ]


def is_tagged(process: psutil.Process, tag: str) -> bool:
    try:
        return (
            process.environ().get("LOWMEM_RUN") == tag and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone meanwhile, or another user's


def end_tree(tag: str) -> list[psutil.Process]:
    """SIGKILL to every process of the run; those that not even that ends, after UNKILLABLE_S."""
    until = time.monotonic() + UNKILLABLE_S
    while left := tagged(tag):
        if time.monotonic() > until:
            return left
        for process in left:
            send(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    return []


def reap() -> None:
    """Take note of the ends of adopted orphans; no child whose end somebody waits for may be
    there."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # gone meanwhile


def cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def is_alive(pid: int) -> bool:
    return status(pid) not in ("gone", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


PR_SET_PDEATHSIG = 1  # prctl(2)

HIGHEST = re.compile(r"VmHWM:\s+(\d+) kB")


def die_with_launcher(number: int = signal.SIGKILL) -> None:
    """From now on the kernel sends this process a signal when its parent dies: no rank outlives its
    launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def settle_process() -> None:
    """From now on what this process and its children write is its user's alone, no crash writes
    memory to disk, and a character that a terminal's encoding lacks is written out."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="backslashreplace")


def boot_id() -> str:
    """This boot of this machine; another boot, or another machine, has another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def job_pss_bytes(root_pid: int) -> tuple[int, int]:
    """(PSS of a process and its descendants now, the most that it can have been), as if no other
    job ran here.

    Pages of a process's own count for it, those it shares once for the job: beside other jobs that
    map the same libraries their PSS would be less, by what those count. The second figure adds what
    each process had more at its highest (VmHWM) than it has now, so that no peak between two reads
    is lost: of several ranks that peak apart it is an upper bound. Processes that end meanwhile are
    left out.
    """
    import psutil  # 20 ms that planning need not pay

    own = shared = above = 0
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            memory = process.memory_full_info()
            highest = HIGHEST.search(
                Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            continue
        own += memory.uss
        shared = max(shared, memory.rss - memory.uss)
        above += max(int(highest[1]) * 1024 - memory.rss, 0) if highest else 0
    return own + shared, own + shared + above
