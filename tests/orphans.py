"""What a run left behind: processes that carry its tag or descend from the test, and the TCP ports
they hold.

before = orphans.snapshot()
...the run, to its end...
assert orphans.left(before, tag, within_s=5) == []
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

import psutil

from launch.base import processes as base_processes

POLL_S = 0.05


@dataclass(frozen=True)
class Snapshot:
    """What was there before: processes as (pid, start time), and listening ports as (address, port,
    pid)."""

    processes: frozenset[tuple[int, float]]
    ports: frozenset[tuple[str, int, int]]


@dataclass(frozen=True)
class Orphan:
    """A process that is still there, or a port that it listens on."""

    pid: int
    what: str  # its command line, or "listens on address:port"


def snapshot() -> Snapshot:
    """Everything that runs and listens now."""
    return Snapshot(frozenset(_processes()), frozenset(_ports()))


def left(before: Snapshot, tag: str, within_s: float = 5.0) -> list[Orphan]:
    """What of the run is still there after so long; returns at once when there is nothing.

    Of the run are: processes tagged with LOWMEM_RUN=tag, and new descendants of this process; of
    the ports, those that these listen on. Another program that starts meanwhile is not accused.
    """
    deadline = time.monotonic() + within_s
    while (found := _left(before, tag)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def listening(child: subprocess.Popen[str]) -> set[tuple[str, int]]:
    """(address, port) of everything on which a process and its descendants listen until it ends."""
    seen: set[tuple[str, int]] = set()
    while child.poll() is None:
        ours = {child.pid, *(one.pid for one in psutil.Process(child.pid).children(recursive=True))}
        seen |= {(address, port) for address, port, pid in _ports() if pid in ours}
        time.sleep(POLL_S)
    return seen


def _left(before: Snapshot, tag: str) -> list[Orphan]:
    ours = {
        process.pid
        for process in [*base_processes.tagged(tag), *psutil.Process().children(recursive=True)]
    }
    found = [
        Orphan(pid, words)
        for (pid, born), words in _processes().items()
        if pid in ours and (pid, born) not in before.processes
    ]
    pids = {orphan.pid for orphan in found}
    new = [
        (pid, f"listens on {address}:{port}")
        for address, port, pid in _ports() - before.ports
        if pid in pids
    ]
    return sorted(
        [*found, *(Orphan(*pair) for pair in new)], key=lambda orphan: (orphan.pid, orphan.what)
    )


def _processes() -> dict[tuple[int, float], str]:
    """The command line of every process that is no zombie, by pid and start time: a pid may be used
    again."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid, process.create_time()] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue  # gone meanwhile
    return found


def _ports() -> set[tuple[str, int, int]]:
    """Every TCP port that a process of this machine listens on, in this process's network
    namespace."""
    return {
        (found.laddr.ip, found.laddr.port, found.pid)
        for found in psutil.net_connections(kind="tcp")
        if found.status == psutil.CONN_LISTEN and found.pid is not None
    }
