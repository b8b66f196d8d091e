"""The child processes of a try of the link test: they are started for each rank, waited for within
limits, and cleaned up."""

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

# the line that a rank prints when torch and its device are ready (training/children/link.py)
READY = "link test: ready"
POLL_S = 0.02
_LAST_WORDS_S = 0.5  # time for messages of the other ranks after the first has failed
_KILL_S = 5.0  # a process that still exists this long after SIGKILL is stuck in a driver


@dataclass(frozen=True)
class Limits:
    """Time limits of the link test in seconds."""

    total_s: float = 56.0
    # time of a try until all ranks are ready, with a first import of torch from a slow disk
    start_s: float = 25.0
    try_s: float = 10.0  # time of a try after that


@dataclass(frozen=True)
class Ended:
    """The end of a try."""

    how: Literal["done", "failed", "hang", "not_started", "stuck"]  # done: every rank ended with 0
    output: str  # stdout and stderr of all ranks
    start_s: float  # time until all ranks were ready, or the try ended


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    world_size: int,
    limits: Limits,
    deadline: float,
    shm: Path,
) -> Ended:
    """Run argv once per rank until all ranks have ended, a rank has failed, or time is up.
    `deadline` is a time of time.monotonic().

    Afterwards no rank runs, and files that NCCL left in `shm` are removed, because the next try may
    need the space.
    """
    before = _segments(shm)
    with tempfile.TemporaryDirectory(prefix="lowmem-link-") as name:
        folder = Path(name)
        ranks: list[subprocess.Popen[bytes]] = []
        common = ["--world-size", str(world_size), "--store", str(folder / "store")]
        common += ["--timeout-s", f"{limits.try_s:g}"]
        try:
            for rank in range(world_size):
                rank_argv = [*argv, "--rank", str(rank), *common]
                ranks.append(_start(rank_argv, environment, folder / f"{rank}.txt"))
            how, start_s = _wait(ranks, folder, limits, deadline)
            signals = [
                f"rank {rank} failed: killed by signal {-code} ({signal.Signals(-code).name})"
                for rank, child in enumerate(ranks)
                if (code := child.returncode) is not None and code < 0
            ]
        finally:
            is_stuck = _kill(ranks)
            remove_unmapped(_segments(shm) - before)
        output = "\n".join([*(_read(folder, rank) for rank in range(world_size)), *signals])
    return Ended("stuck" if is_stuck else how, output, start_s)


def _start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            argv,
            env=dict(environment),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to this process only, and killpg reaches children of the rank
            start_new_session=True,
            preexec_fn=processes.die_with_launcher,
        )


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, limits: Limits, deadline: float
) -> tuple[Literal["done", "failed", "hang", "not_started"], float]:
    """Wait for the ranks; return (their end, seconds until all ranks were ready)."""
    began = time.monotonic()
    limit, start_s, ready, failed = min(began + limits.start_s, deadline), 0.0, False, False
    while True:
        codes = [child.poll() for child in ranks]
        now = time.monotonic()
        if all(code == 0 for code in codes):
            return "done", start_s
        if any(codes) and not failed:
            limit, failed = min(limit, now + _LAST_WORDS_S), True
        if now > limit or (failed and None not in codes):
            return "failed" if failed else "hang" if ready else "not_started", start_s
        if not ready:
            start_s = now - began
            if all(READY in _read(folder, rank) for rank in range(len(ranks))):
                ready = True
                limit = limit if failed else min(now + limits.try_s, deadline)
        time.sleep(POLL_S)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Send SIGKILL to every rank that still runs and to its children; return True if a rank
    survives."""
    for child in ranks:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_S
    for child in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
    return any(child.returncode is None for child in ranks)


def _read(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")


# ---- files of killed ranks in /dev/shm
# ---------------------------------------------------------------------------


def _segments(shm: Path) -> set[Path]:
    return {path for path in shm.glob("nccl-*") if path.is_file()}


def remove_unmapped(new: set[Path]) -> None:
    """Unlink the segments that belong to this user and that no process has mapped. Segments of
    another run stay."""
    if not new:
        return
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            mapped += maps.read_text(errors="replace")
    for path in new:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid() and str(path) not in mapped:
                path.unlink()
