"""The children of one try of the link test: start a rank each, wait within limits, leave nothing
behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.base import processes

# a rank's line when torch and its device are there (training/children/link.py)
READY = "link test: ready"
POLL_S = 0.02
LAST_WORDS_S = 0.5  # the other ranks' time to say why, after the first has failed
KILL_S = 5.0  # a process that SIGKILL has not ended by then is stuck in a driver


@dataclass(frozen=True)
class Limits:
    """How long the link test may take, in seconds."""

    total_s: float = 56.0
    # of one try, until all ranks are ready: a first import of torch from a slow disk
    start_s: float = 25.0
    try_s: float = 10.0  # of one try, from then on


@dataclass(frozen=True)
class Ended:
    """What came of a try."""

    how: Literal["done", "failed", "hang", "not_started", "stuck"]  # done: every rank ended with 0
    output: str  # of all ranks, stdout and stderr
    start_s: float  # until all ranks were ready, or the try ended


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    world_size: int,
    limits: Limits,
    deadline: float,
    shm: Path,
) -> Ended:
    """Run argv once per rank, until all have ended, one has failed, or time is up. `deadline` is of
    time.monotonic().

    Afterwards no rank runs, and what NCCL left in `shm` is removed: the next try may need the room.
    """
    before = _segments(shm)
    with tempfile.TemporaryDirectory(prefix="lowmem-link-") as name:
        folder = Path(name)
        ranks: list[subprocess.Popen[bytes]] = []
        stuck: list[int] = []
        try:
            for rank in range(world_size):
                words = [*argv, "--rank", str(rank), "--world-size", str(world_size)]
                words += ["--store", str(folder / "store"), "--timeout-s", f"{limits.try_s:g}"]
                ranks.append(_start(words, environment, folder / f"{rank}.txt"))
            how, start_s = _wait(ranks, folder, limits, deadline)
            signals = [_signal_line(rank, child.returncode) for rank, child in enumerate(ranks)]
        finally:
            stuck = _kill(ranks)
            remove_unmapped(_segments(shm) - before)
        output = "\n".join(
            [_read(folder, rank) for rank in range(world_size)] + [line for line in signals if line]
        )
    return Ended("stuck" if stuck else how, output, start_s)


def _start(
    words: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            words,
            env=dict(environment),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C on the terminal is for us, and killpg reaches what a rank starts
            start_new_session=True,
            preexec_fn=processes.die_with_launcher,
        )


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, limits: Limits, deadline: float
) -> tuple[Literal["done", "failed", "hang", "not_started"], float]:
    """(how it ended, seconds until all ranks were ready)."""
    began = time.monotonic()
    limit, start_s, ready, failed = min(began + limits.start_s, deadline), 0.0, False, False
    while True:
        codes = [child.poll() for child in ranks]
        now = time.monotonic()
        if all(code == 0 for code in codes):
            return "done", start_s
        if any(codes) and not failed:
            limit, failed = min(limit, now + LAST_WORDS_S), True
        if now > limit or (failed and None not in codes):
            return "failed" if failed else "hang" if ready else "not_started", start_s
        if not ready:
            start_s = now - began
            if all(READY in _read(folder, rank) for rank in range(len(ranks))):
                ready = True
                limit = limit if failed else min(now + limits.try_s, deadline)
        time.sleep(POLL_S)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """SIGKILL to every rank that still runs and to what it started; the pids that survive it."""
    for child in ranks:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    stuck = []
    for child in ranks:
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.append(child.pid)
    return stuck


def _signal_line(rank: int, returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return ""
    return (
        f"rank {rank} failed: killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    )


def _read(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")


# ---- what a killed rank leaves in /dev/shm
# ---------------------------------------------------------------------------


def _segments(shm: Path) -> set[Path]:
    return {path for path in shm.glob("nccl-*") if path.is_file()}


def remove_unmapped(new: set[Path]) -> None:
    """Unlink the segments that are this user's and that no process has mapped: those of a run
    beside this one stay."""
    new = {path for path in new if _owner(path) == os.getuid()}
    if not new:
        return
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            mapped += maps.read_text(errors="replace")
    for path in new:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:
        return None
