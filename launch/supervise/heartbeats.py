"""Heartbeats of the ranks: a rank that is silent for too long hangs; slow steps are reported."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.base import files, processes
from launch.run_folder.layout import AttemptDir
from launch.schema.result import RankError

PACE = 5  # times the longest pause that a rank usually makes in a section
FLOORS = {
    "step": 1,
    "evaluation": 5,
    "first step": 30,
    "load": 30,
    "tokenise": 30,
    "save": 30,
    "export": 30,
}
BEFORE_TRAINING = ("load", "tokenise")
MAPPING = (*BEFORE_TRAINING, "export")  # sections in which whole models are mapped and dropped
# times the limit, for ranks that still compute: a rank that gets a tenth of a CPU is slow, not
# stuck
SPARED = 2.5
IDLE = 0.02  # CPU seconds a second: below it a rank computes nothing
_SLOW_WINDOW_S = 10.0
_SLOW_FACTOR = 3.0


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank."""

    rank: int
    pid: int
    section: str
    step: int
    max_steps: int
    monotonic_s: float
    p99_s: float
    boot: str = ""  # boot of its machine, in which clocks and pids count

    def limit_s(self, floor_s: float) -> float:
        """Seconds that the rank may be silent; `floor_s` is launch.hang_floor_s, which is all that
        a stopped process gets."""
        floors = 1 if self.is_stopped() else FLOORS[self.section]
        return max(floors * floor_s, PACE * self.p99_s)

    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped its process."""
        return processes.status(self.pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def read(file: Path) -> Beat | None:
    """The beat in a file; None where there is none, where it is being written, and where it is
    another machine's."""
    beat = files.read_or_none(file, Beat)
    return beat if beat and beat.boot == processes.boot_id() else None


def read_all(attempt: AttemptDir) -> list[Beat]:
    """Beats of the ranks on this machine, by rank."""
    beats = [beat for file in attempt.root.glob("ranks/*/heartbeat.json") if (beat := read(file))]
    return sorted(beats, key=lambda beat: beat.rank)


def section_of_the_first(beats: Sequence[Beat], errors: Sequence[RankError]) -> str:
    """The section in which an attempt failed: of the rank that wrote its error first, else of the
    rank that was silent for longest.

    `errors` are the ranks', earliest first; "" where no rank of this machine had begun."""
    first_ranks = {error.rank for error in errors[:1]}
    candidates = [beat for beat in beats if beat.rank in first_ranks] or beats
    return min(candidates, key=lambda beat: beat.monotonic_s).section if candidates else ""


class Progress:
    """CPU time and steps of the ranks between two looks."""

    def __init__(self) -> None:
        # pid -> (time of its beat, CPU seconds when that beat was first seen)
        self._cpu: dict[int, tuple[float, float]] = {}
        # (since, step, CPU seconds by rank)
        self._window: tuple[float, int, dict[int, float]] | None = None
        self._paces: list[float] = []  # seconds a step, of past windows
        self._is_slow = False

    def silent(self, beats: list[Beat], now_s: float, floor_s: float) -> str | None:
        """A sentence on the rank that has been silent for longest, if it hangs.

        While a rank still computes and none is stopped, the limit is SPARED times as long."""
        for beat in beats:
            if self._cpu.get(beat.pid, (None,))[0] != beat.monotonic_s:
                self._cpu[beat.pid] = (beat.monotonic_s, processes.cpu_s(beat.pid))
        overdue = [beat for beat in beats if now_s - beat.monotonic_s > beat.limit_s(floor_s)]
        if not overdue:
            return None
        worst = max(overdue, key=lambda beat: now_s - beat.monotonic_s)
        age = now_s - worst.monotonic_s
        computes = any(
            processes.cpu_s(beat.pid) - self._cpu[beat.pid][1] > IDLE * (now_s - beat.monotonic_s)
            for beat in beats
        )
        stopped = [beat for beat in beats if beat.is_stopped()]
        if computes and not stopped and age < SPARED * worst.limit_s(floor_s):
            return None
        worst = stopped[0] if stopped else worst
        return (
            f"rank {worst.rank} (process {worst.pid}, {processes.status(worst.pid)}) hangs: no sign"
            f" of life for {now_s - worst.monotonic_s:.0f} s in {worst.section} after step"
            f" {worst.step}, allowed are {worst.limit_s(floor_s):.0f} s"
        )

    def slow(self, beats: list[Beat], now_s: float) -> str | None:
        """A line, once, when steps take several times as long as before; training goes on."""
        if not beats:
            self._window = None
            return None
        used = {beat.rank: processes.cpu_s(beat.pid) for beat in beats}
        window = now_s, beats[0].step, used
        self._window = since, step, before = self._window or window
        if now_s - since < _SLOW_WINDOW_S:
            return None
        self._window = window
        if any(beat.section != "step" for beat in beats):
            return None
        pace = (now_s - since) / max(beats[0].step - step, 1)
        median_pace = statistics.median(self._paces) if len(self._paces) >= 3 else pace
        was_slow, self._is_slow = self._is_slow, pace > _SLOW_FACTOR * median_pace
        if not self._is_slow:
            self._paces.append(pace)
        if was_slow or not self._is_slow:
            return None
        shares = ", ".join(
            f"rank {rank} {100 * (used[rank] - before.get(rank, 0)) / (now_s - since):.0f} %"
            for rank in used
        )
        return (
            f"slow: a step takes {pace:.2g} s, {median_pace:.2g} s before; CPU that the ranks get:"
            f" {shares}"
        )
