"""Write ranks/<r>/heartbeat.json: a rank's section, step and pace, by which a reader tells slow
from stuck."""

import json
import math
import os
import time
from collections import defaultdict, deque
from pathlib import Path

from launch.base import processes

WRITE_INTERVAL_S = 0.5
_KEPT_INTERVALS = 200  # newest intervals of each section
# always as many, written in place: a full disk does not stop the write, and a reader sees a full
# record
FILE_BYTES = 256


class Heartbeat:
    """The heartbeat of a rank. A section lasts until the next beat, so a stuck section has a
    name."""

    def __init__(self, file: Path) -> None:
        if file.exists() and not file.is_file():  # a FIFO would wait for a reader
            file.unlink()
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        self._boot, self._rank = processes.boot_id(), int(file.parent.name)
        self._section = ""
        self._beat_at = self._written_at = 0.0
        self._intervals: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_KEPT_INTERVALS)  # section -> its newest intervals
        )
        self._steps = (0, 0)

    def beat(self, section: str = "", step: int | None = None, max_steps: int = 0) -> None:
        """Begin a section; without a name the current section goes on. Without `step` the step
        stays."""
        section = section or self._section
        if step is not None:
            self._steps = (step, max_steps)
        now_s = time.monotonic()
        if self._section:
            self._intervals[self._section].append(now_s - self._beat_at)
        is_same, self._section, self._beat_at = section == self._section, section, now_s
        if not is_same or now_s - self._written_at >= WRITE_INTERVAL_S:
            self._write()

    def _write(self) -> None:
        self._written_at = self._beat_at
        beat = {
            "rank": self._rank,
            "section": self._section,
            "step": self._steps[0],
            "max_steps": self._steps[1],
            "monotonic_s": self._beat_at,
            "p99_s": p99(self._intervals[self._section]),
            "pid": os.getpid(),
            "boot": self._boot,
        }
        os.pwrite(self._file, json.dumps(beat).ljust(FILE_BYTES).encode(), 0)

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, *error: object) -> None:
        """Write the exact step of a rank that ends or fails."""
        self._write()


def p99(values: deque[float] | tuple[float, ...]) -> float:
    """The value that 99 of 100 values do not exceed; of fewer than 100 values the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
