"""The state of a run as its files tell it: for `watch` and `runs`. Nothing is locked or written."""

import shlex
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from launch.base import files, locks
from launch.base.errors import EXIT_CODES, LaunchError
from launch.base.text import from_here
from launch.queue import leases
from launch.run_folder import steps
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import AttemptEnd, StepEvent
from launch.supervise import failures, heartbeats
from launch.supervise.screen import Tail

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
    fix: str = ""  # what to do about an end that is not complete
    again: str = ""  # the line that goes on then

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


def waiting_folders() -> set[str]:
    """Folders of this user's runs that wait for memory, or for another run."""
    return {
        lease.record.run
        for lease in leases.of_this_machine()
        if lease.is_own and lease.record.state != "granted"
    }


def newest_of_recipes(roots: Iterable[Path]) -> set[Path]:
    """The newest run of each recipe, with which the same line goes on."""
    return set({root.parent: root for root in sorted(roots, key=lambda root: root.name)}.values())


class RunFiles:
    """The files of a run, of which only what is new is read again."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._root: Path | None = None  # folder of its newest attempt
        self._steps: deque[StepEvent] = deque(maxlen=KEPT_STEPS)
        self._lines: Tail | None = None  # lines of its steps
        self._earlier: list[StepEvent] = []  # last steps of the attempts before it
        self._planned: dict[str, Any] = {}

    def is_in_use(self, waiting: Collection[str]) -> bool:
        """True if a start of the run lives, or waits. `waiting`: folders of the runs that wait."""
        return str(self.run.root) in waiting or locks.holder_pid(self.run.lock_file) is not None

    def state(self, waiting: Collection[str] = (), is_newest: bool = True) -> RunState:
        """Read what has changed. Damaged files count as missing. Only the newest run of a recipe
        says what to do about its end."""
        attempts = self.run.attempts()
        attempt = attempts[-1] if attempts else None
        if attempt is None or attempt.root != self._root:
            self._begin(attempt, attempts[-2::-1])
        if self._lines:
            self._steps.extend(_new_steps(self._lines))
        beats = heartbeats.read_all(attempt) if attempt else []
        beat = beats[0] if beats else None
        if attempt and beat and beat.section == "tokenise" and attempt.tokenised_file.exists():
            beat = None  # the tokeniser has ended, and no rank has begun
        end = files.read_or_none(attempt.supervisor_file, AttemptEnd) if attempt else None
        state = "waiting" if str(self.run.root) in waiting else self._state(beat, end)
        has_ended = state in _ENDED
        # its last attempts may have ended without a step
        past = attempts[::-1] if has_ended else attempts[-1:]
        trained = self._earlier if has_ended and not self._steps else self._steps
        last, pace = trained[-1] if trained else None, self._pace()
        fix = _fix(end) if is_newest and has_ended and state != "complete" else ""
        scored = next(filter(None, map(steps.evaluations, past)), [])
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
            eval_loss=scored[-1].loss if scored else None,
            losses=tuple(event.loss for event in trained),
            seconds_per_step=last.seconds if last else None,
            tokens_per_s=last.tokens / last.seconds if last and last.seconds > 0 else None,
            vram_bytes=last.vram_reserved_bytes if last else 0,
            vram_total_bytes=last.vram_total_bytes if last else 0,
            host_bytes=last.host_pss_bytes if last else 0,
            silent_s=max(0.0, time.monotonic() - beat.monotonic_s)
            if beat and not has_ended
            else None,
            verdict=self._verdict(attempts, state),
            fix=fix,
            again=_again(self.run) if fix else "",
            **self._planned,
        )

    def _begin(self, attempt: AttemptDir | None, before: list[AttemptDir]) -> None:
        """Look at another attempt; those `before` it are the newest first."""
        if attempt is not None:  # the curve goes on; steps trained again count once
            self._steps.clear()
            self._root, self._lines = attempt.root, Tail(attempt.events_file, _TAIL_BYTES)
            past = (Tail(earlier.events_file, _TAIL_BYTES) for earlier in before)
            self._earlier = next(filter(None, map(_new_steps, past)), [])
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

    def _pace(self) -> float | None:
        """Seconds of a step with the evaluations and checkpoints between steps."""
        if len(self._steps) < 2:
            return None
        first, last = self._steps[0], self._steps[-1]
        num_steps = last.step - first.step
        return (last.time - first.time) / num_steps if num_steps > 0 else None

    def _state(self, beat: heartbeats.Beat | None, end: AttemptEnd | None) -> State:
        if locks.holder_pid(self.run.lock_file) is not None:
            return _BY_SECTION.get(beat.section, "training") if beat and end is None else "starting"
        if end is None:
            return "lost"
        if end.exit_code in _STOPPED_CODES:
            return "stopped"
        return "complete" if end.exit_code == 0 else "failed"

    def _verdict(self, attempts: list[AttemptDir], state: State) -> str:
        """The cause of the end of a run that has ended, or of the attempt before the one that runs
        now; "" if none failed. A stop is the user's own: it is no reason to say it again later."""
        for attempt in attempts[-1:] if state in _ENDED else attempts[-2:-1]:
            end = files.read_or_none(attempt.supervisor_file, AttemptEnd)
            is_old_stop = state not in _ENDED and end and end.exit_code in _STOPPED_CODES
            if end and end.failure and not is_old_stop:
                return (
                    f"attempt {attempt.number}: {end.failure.cause} (exit code {end.exit_code}:"
                    f" {EXIT_CODES.get(end.exit_code, 'unknown')})"
                )
        return ""


def _new_steps(lines: Tail) -> list[StepEvent]:
    """The steps that were written since the last look. Damaged ones are left out, and so is all of
    a disk that is gone."""
    events = []
    with suppress(OSError):
        for line in lines.new_lines():
            with suppress(ValidationError):
                events.append(files.adapter(StepEvent).validate_json(line))
    return events


def _again(run: RunDir) -> str:
    if not run.recipe_yaml.exists():
        return ""
    return f"python -m launch run {shlex.quote(from_here(run.recipe_yaml))}"


def _fix(end: AttemptEnd | None) -> str:
    if end is None or end.failure is None:
        return f"killed, or the machine went down; {failures.CONTINUE}"
    return end.failure.fix or f"mend that; {failures.CONTINUE}"
