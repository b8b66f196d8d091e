"""ranks/<r>/heartbeat.json: the section a rank is in, its step, its pace: so that others can tell
slow from stuck."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from pathlib import Path

from launch.base import processes

WRITE_INTERVAL_S = 0.5
KEPT_INTERVALS = 200  # of each section
# written in place and as many each time: neither a full disk nor a reader is in the way
FILE_BYTES = 256


class Heartbeat:
    """One rank's. A section's name holds until the next beat: what takes long is known by what it
    began with."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        self._boot, self._rank = processes.boot_id(), int(file.parent.name)
        self._section = ""
        self._beat_at = self._written_at = 0.0
        self._intervals: dict[str, deque[float]] = {}
        self._steps = (0, 0)

    def beat(self, section: str, step: int | None = None, max_steps: int = 0) -> None:
        """Here I am; `step` stays what it was where it is not given."""
        if step is not None:
            self._steps = (step, max_steps)
        now = time.monotonic()
        if self._section:
            past = self._intervals.setdefault(self._section, deque(maxlen=KEPT_INTERVALS))
            past.append(now - self._beat_at)
        is_same, self._section, self._beat_at = section == self._section, section, now
        if not is_same or now - self._written_at >= WRITE_INTERVAL_S:
            self._write()

    def _write(self) -> None:
        self._written_at = self._beat_at
        beat = {
            "rank": self._rank,
            "section": self._section,
            "step": self._steps[0],
            "max_steps": self._steps[1],
            "monotonic_s": self._beat_at,
            "p99_s": p99(self._intervals.get(self._section, ())),
            "pid": os.getpid(),
            "boot": self._boot,
        }
        os.pwrite(self._file, json.dumps(beat).ljust(FILE_BYTES).encode(), 0)

    def again(self) -> None:
        """Still in the same section."""
        self.beat(self._section)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *error: object) -> None:
        """Where a rank fails, its last step is known exactly."""
        self._write()


def p99(values: deque[float] | tuple[float, ...]) -> float:
    """The value that 99 of 100 do not exceed; of fewer than 100 the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
