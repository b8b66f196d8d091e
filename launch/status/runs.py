"""The state of a run as its files tell it: for `watch` and `runs`. Nothing is locked or written."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from launch.base import files, locks, processes
from launch.base.errors import LaunchError
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import AttemptEnd, HeldOut, StepEvent
from launch.supervise import heartbeats

# lost: neither its launcher nor a word about its end is there
State = Literal[
    "waiting",  # for memory, or for another run
    "starting",
    "tokenising",
    "loading",
    "training",
    "evaluating",
    "saving",
    "exporting",
    "complete",
    "stopped",
    "failed",
    "lost",
]
_BY_SECTION: Mapping[str, State] = {
    "tokenise": "tokenising",
    "load": "loading",
    "first step": "training",
    "step": "training",
    "evaluation": "evaluating",
    "save": "saving",
    "export": "exporting",
}
_ENDED: tuple[State, ...] = ("complete", "stopped", "failed", "lost")
_STOPPED_CODES = (75, 130)
KEPT_STEPS = 240
_TAIL_BYTES = 1 << 16  # end of the file of steps that is read when a run is first looked at
STEP, EVALUATION = TypeAdapter(StepEvent), TypeAdapter(HeldOut)


@dataclass(frozen=True)
class RunState:
    """A run as its files show it now. Bytes are of the fullest rank, host bytes of the job."""

    run: str  # <recipe>/<time>
    folder: str
    state: State
    attempt: int = 0
    step: int = 0
    max_steps: int = 0
    seconds_left: float | None = None  # None: unknown, or ended
    loss: float | None = None
    eval_loss: float | None = None
    losses: tuple[float, ...] = ()  # losses of the last steps, oldest first
    seconds_per_step: float | None = None
    tokens_per_s: float | None = None
    vram_bytes: int = 0  # reserved
    vram_predicted_bytes: int = 0
    vram_total_bytes: int = 0
    host_bytes: int = 0
    host_predicted_bytes: int = 0
    host_limit_bytes: int = 0
    silent_s: float | None = None  # time since a rank's last sign; None: no rank
    verdict: str = ""  # cause of the last failure

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class RunFiles:
    """The files of a run, of which only what is new is read again."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._attempt: AttemptDir | None = None
        self._steps: deque[StepEvent] = deque(maxlen=KEPT_STEPS)
        self._read_bytes = 0
        self._planned: dict[str, Any] = {}

    def state(self) -> RunState:
        """Read what has changed. Damaged files count as missing."""
        attempts = self.run.attempts()
        attempt = attempts[-1] if attempts else None
        if attempt is None or self._attempt is None or attempt.root != self._attempt.root:
            self._begin(attempt)
        if attempt is not None:
            self._read_steps(attempt)
        beats = heartbeats.read_all(attempt) if attempt else []
        beat = beats[0] if beats else None
        end = files.read_or_none(attempt.supervisor_file, AttemptEnd) if attempt else None
        state = self._state(beat, end)
        last = self._steps[-1] if self._steps else None
        has_ended = state in _ENDED
        pace = self._pace()
        step = max(last.step if last else 0, beat.step if beat else 0)
        max_steps = max(last.max_steps if last else 0, beat.max_steps if beat else 0)
        return RunState(
            run=f"{self.run.root.parent.name}/{self.run.root.name}",
            folder=str(self.run.root),
            state=state,
            attempt=attempt.number if attempt else 0,
            step=step,
            max_steps=max_steps,
            seconds_left=None if has_ended or pace is None else (max_steps - step) * pace,
            loss=last.loss if last else None,
            eval_loss=self._eval_loss(attempt),
            losses=tuple(event.loss for event in self._steps),
            seconds_per_step=last.seconds if last else None,
            tokens_per_s=last.tokens / last.seconds if last and last.seconds > 0 else None,
            vram_bytes=last.vram_reserved_bytes if last else 0,
            vram_total_bytes=last.vram_total_bytes if last else 0,
            host_bytes=last.host_pss_bytes if last else 0,
            silent_s=self._silent_s(beat) if beat and not has_ended else None,
            verdict=self._verdict(attempts, state),
            **self._planned,
        )

    def _begin(self, attempt: AttemptDir | None) -> None:
        self._attempt, self._read_bytes = attempt, 0
        if self._steps and attempt is not None:  # the curve goes on; steps trained again count once
            self._steps.clear()
        self._planned = self._predicted(attempt)

    def _predicted(self, attempt: AttemptDir | None) -> dict[str, Any]:
        """Bytes that the attempt's plan predicts, and the limit."""
        try:
            plan = attempt.read_plan() if attempt else self.run.read_plan()
            machine = attempt.read_machine() if attempt else None
        except (LaunchError, OSError):
            return {}
        return {
            "vram_predicted_bytes": (
                plan.estimate.reserved_bytes if plan.strategy.device == "cuda" else 0
            ),
            "host_predicted_bytes": plan.estimate.host_bytes,
            "host_limit_bytes": machine.host_limit_bytes if machine else 0,
        }

    def _read_steps(self, attempt: AttemptDir) -> None:
        """The steps that were written since the last look; of a file that is new to us, the last
        ones."""
        try:
            with attempt.events_file.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= self._read_bytes:
                    return
                start = self._read_bytes or max(0, size - _TAIL_BYTES)
                file.seek(start)
                content = file.read(size - start)
        except OSError:  # not there yet, or its disk is gone
            return
        lines = content.split(b"\n")
        unfinished = lines.pop()
        if start and not self._read_bytes:
            lines = lines[1:]  # it begins inside of one
        for line in lines:
            try:
                self._steps.append(STEP.validate_json(line))
            except ValidationError:  # damaged
                continue
        self._read_bytes = size - len(unfinished)

    def _pace(self) -> float | None:
        """Seconds of a step with the evaluations and checkpoints between steps."""
        if len(self._steps) < 2:
            return None
        first, last = self._steps[0], self._steps[-1]
        steps = last.step - first.step
        return (last.time - first.time) / steps if steps > 0 else None

    def _eval_loss(self, attempt: AttemptDir | None) -> float | None:
        if attempt is None:
            return None
        try:
            lines = attempt.held_out_file.read_bytes().rstrip().splitlines()[-1:]
            return EVALUATION.validate_json(lines[0]).loss if lines else None
        except (OSError, ValidationError):
            return None

    def _state(self, beat: heartbeats.Beat | None, end: AttemptEnd | None) -> State:
        if locks.holder_pid(self.run.lock_file) is not None:
            return _BY_SECTION.get(beat.section, "training") if beat and end is None else "starting"
        if end is None:
            return "lost"
        if end.exit_code in _STOPPED_CODES:
            return "stopped"
        return "complete" if end.exit_code == 0 else "failed"

    def _silent_s(self, beat: heartbeats.Beat) -> float | None:
        if beat.boot != processes.boot_id():
            return None
        return max(0.0, time.monotonic() - beat.monotonic_s)

    def _verdict(self, attempts: list[AttemptDir], state: State) -> str:
        """The cause of the end of a run that has ended, or of the attempt before the one that runs
        now; "" if none failed. A stop is the user's own: it is no reason to say it again later."""
        newest = attempts[-1:] if state in _ENDED else attempts[-2:-1]
        for attempt in newest:
            end = files.read_or_none(attempt.supervisor_file, AttemptEnd)
            is_old_stop = state not in _ENDED and end and end.exit_code in _STOPPED_CODES
            if end and end.failure and not is_old_stop:
                return f"attempt {attempt.number}: {end.failure.cause} (exit code {end.exit_code})"
        return ""
