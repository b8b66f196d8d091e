"""The private memory of a launch's ranks, read from outside while it runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import recording

SAMPLING_S = 0.02
Samples = list[tuple[float, float]]  # (unix time, RssAnon in MB) of one rank


def watched(argv: Sequence[str], env: Mapping[str, str], log: Path) -> list[list[tuple[float, float]]]:
    """Run a child to its end; (unix time, RssAnon in MB) of each of its 2 ranks, every SAMPLING_S."""
    ranks: dict[int, list[tuple[float, float]]] = {}
    with log.open("wb") as file:
        child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        while child.poll() is None:
            if len(ranks) < 2:
                ranks |= {process.pid: [] for process in _ranks(child.pid) if process.pid not in ranks}
            for pid, samples in ranks.items():
                samples.extend(_rss_anon(pid))
            time.sleep(SAMPLING_S)
    assert child.returncode == 0, recording.said(log)
    assert len(ranks) == 2, ranks
    return list(ranks.values())


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
        (time.time(), int(line.split()[1]) * 1.024e-3) for line in status.splitlines() if line.startswith("RssAnon")
    ]
