"""The memory of a launch's ranks, read from outside while it runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import recording

SAMPLING_S = 0.02
PSS_SAMPLING_S = 0.5  # reading smaps_rollup costs milliseconds a GiB
Samples = list[tuple[float, float]]  # (unix time, RssAnon in MB) of one rank


def watched(
    argv: Sequence[str], env: Mapping[str, str], log: Path
) -> list[list[tuple[float, float]]]:
    """Run a child to its end; (unix time, RssAnon in MB) of each of its 2 ranks, every
    SAMPLING_S."""
    ranks: dict[int, list[tuple[float, float]]] = {}
    with log.open("wb") as file:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        while child.poll() is None:
            if len(ranks) < 2:
                ranks |= {
                    process.pid: [] for process in _ranks(child.pid) if process.pid not in ranks
                }
            for pid, samples in ranks.items():
                samples.extend(_rss_anon(pid))
            time.sleep(SAMPLING_S)
    assert child.returncode == 0, recording.said(log)
    assert len(ranks) == 2, ranks
    return list(ranks.values())


class Seen(NamedTuple):
    """A launch at one moment."""

    time: float  # unix time
    # resident so far at the most, of the process with the highest peak, its rank: exact, not
    # sampled
    peak_bytes: int
    job_bytes: int  # PSS of all its processes now; between two readings the last one


def tree(argv: Sequence[str], env: Mapping[str, str], log: Path) -> list[Seen]:
    """Run a child of one rank to its end, which has to be a good one."""
    seen: list[Seen] = []
    job_bytes, read_at, pids = 0, 0.0, [0]
    with log.open("wb") as file:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        while child.poll() is None:
            if (now := time.monotonic()) - read_at >= PSS_SAMPLING_S:
                pids = [
                    child.pid,
                    *(one.pid for one in psutil.Process(child.pid).children(recursive=True)),
                ]
                job_bytes, read_at = sum(_bytes(pid, "smaps_rollup", "Pss:") for pid in pids), now
            seen.append(
                Seen(time.time(), max(_bytes(pid, "status", "VmHWM:") for pid in pids), job_bytes)
            )
            time.sleep(SAMPLING_S)
    assert child.returncode == 0, recording.said(log)
    return seen


def _bytes(pid: int, file: str, key: str) -> int:
    """A figure in kB of /proc/<pid>/; 0 of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _ranks(root_pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(root_pid).children(recursive=True):
        try:
            if "RANK" in process.environ():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or between fork and exec
    return found


def _rss_anon(pid: int) -> list[tuple[float, float]]:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [
        (time.time(), int(line.split()[1]) * 1.024e-3)
        for line in status.splitlines()
        if line.startswith("RssAnon")
    ]
