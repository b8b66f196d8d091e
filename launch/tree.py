"""The processes of a run, found by the tag in their environment: launchers put ranks into sessions of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import psutil

POLL_S = 0.2  # between two looks at a run
UNKILLABLE_S = 10.0  # after SIGKILL
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def adopt() -> None:
    """From now on orphans below this process become its children: none is lost from sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def tagged(tag: str) -> list[psutil.Process]:
    """Every process that carries the run's tag in its environment, wherever it stands in the process tree."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and is_tagged(process, tag)]


def is_tagged(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get("LOWMEM_RUN") == tag and process.status() != psutil.STATUS_ZOMBIE
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
    """Take note of the ends of adopted orphans; no child whose end somebody waits for may be there."""
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
