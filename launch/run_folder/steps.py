"""The steps and evaluations of a run, as rank 0 wrote them, and the speed of its steps."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base import files
from launch.run_folder import manifest
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import Answers, HeldOut, StepEvent

STEADY_FROM = 2  # steps of an attempt that are slower than the rest
_MOST_DIGITS = 20
# Shorter lines of steps are read without a Python object for each value: beside the names of its
# fields, no number in one has more digits than a float holds.
PLAIN_BYTES = 500
Say = Callable[[str], None]


def events(attempt: AttemptDir, say: Say = lambda line: None) -> list[StepEvent]:
    """The steps that an attempt wrote. Damaged lines are left out, and `say` gets a line that
    counts them."""
    return list(_records(attempt.events_file, StepEvent, say))


def has_any(attempt: AttemptDir) -> bool:
    """True if an attempt wrote a step; no more than its first lines are read."""
    return next(_records(attempt.events_file, StepEvent, lambda line: None), None) is not None


def evaluations(attempt: AttemptDir, say: Say = lambda line: None) -> list[HeldOut]:
    """The evaluations that an attempt wrote; damaged lines as in events()."""
    return list(_records(attempt.held_out_file, HeldOut, say))


def answers(run: RunDir, say: Say = lambda line: None) -> list[Answers]:
    """The answers that a run wrote, by step; of a step that was trained again, the later ones."""
    by_step = {
        record.step: record
        for attempt in run.attempts()
        for record in _records(attempt.answers_file, Answers, say)
    }
    return [by_step[step] for step in sorted(by_step)]


def _records(file: Path, noun: type[files.Noun], say: Say) -> Iterator[files.Noun]:
    """The records of a file of JSON lines. A last line that is being written, or that a kill has
    cut, is left out."""
    damaged, number, reader = [], 0, files.adapter(noun)
    most_plain = PLAIN_BYTES if noun == StepEvent else 0
    try:
        for number, line in enumerate(files.complete_lines(file), 1):
            try:
                is_plain = len(line) <= most_plain and b'": "' not in line
                yield reader.validate_json(line) if is_plain else _unusual(line, noun)
            except (ValueError, AttributeError, RecursionError):
                # no UTF-8, no JSON, no object, another type, too deep
                damaged.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        some = "its records are" if not number else f"its records from line {number + 1} on are"
        say(f"{file}: cannot be read ({error.strerror}); {some} missing from the report")
    if damaged:
        say(
            f"{file}: {len(damaged)} damaged line(s), the first is line {damaged[0]}; missing from"
            " the report"
        )


def _unusual(line: bytes, noun: type[files.Noun]) -> files.Noun:
    """The record of a line with texts instead of numbers, or with long numbers."""
    # JSON has no such numbers
    texts: dict[Any, Any] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    fields = json.loads(line, parse_int=_int)
    return files.adapter(noun).validate_python(
        {
            key: texts.get(value, value) if isinstance(value, str) else value
            for key, value in fields.items()
        }
    )


def _int(digits: str) -> int:
    """A number of a record; none has more digits than 64 bits hold."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


@dataclass(frozen=True)
class Stretch:
    """The steps that one attempt added to its run. Of steps that a later attempt trained again, the
    later ones count."""

    attempt: AttemptDir
    counted: tuple[StepEvent, ...]
    steady: tuple[StepEvent, ...]  # counted steps without the attempt's first STEADY_FROM
    evaluations: tuple[HeldOut, ...]
    steady_since: float  # unix time
    wall_s: float  # seconds from then to its last step or evaluation; with steps that do not count
    began: float  # unix time at which its first step began
    trained_s: float  # seconds of all its steps, also of those that do not count


def stretches(
    run: RunDir,
    last_step: float = math.inf,
    say: Say = lambda line: None,
    with_continued: bool = True,
) -> list[Stretch]:
    """The attempts of a run in their order, as far as they count; first those of the run that it
    continues, if `with_continued`."""
    newest_first: list[Stretch] = []
    limit = last_step
    for attempt in reversed(run.attempts()):
        trained = events(attempt, say)
        if not trained:
            continue
        scored = [event for event in evaluations(attempt, say) if event.step <= limit]
        since = trained[min(STEADY_FROM, len(trained)) - 1].time
        until = max(event.time for event in [*trained, *scored])
        newest_first.append(
            Stretch(
                attempt,
                counted=tuple(step for step in trained if step.step <= limit),
                steady=tuple(step for step in trained[STEADY_FROM:] if step.step <= limit),
                evaluations=tuple(scored),
                steady_since=since,
                wall_s=until - since,
                began=trained[0].time - trained[0].seconds,
                trained_s=sum(step.seconds for step in trained),
            )
        )
        limit = min(limit, trained[0].step - 1)
    if with_continued and (
        continues := run.read_continues()
    ):  # its steps are counted by its own batch
        checkpoint = continues.checkpoint
        newest_first += reversed(
            stretches(RunDir(checkpoint.parent.parent), manifest.step_of(checkpoint), say)
        )
    return newest_first[::-1]


@dataclass(frozen=True)
class Speed:
    """The speed of steady steps. The wait for data is in a step's seconds; logs, evaluations and
    saves are not."""

    steps: int
    tokens_per_s: float  # tokens that are not padding
    padding: float | None  # share of the tokens computed; None: not recorded
    step_s: float  # median
    # shares of the wall time, which give 1; None: not recorded, or the clock was set back meanwhile
    busy: float | None  # steps that count, less the wait
    waiting: float | None  # wait for data
    evaluating: float | None
    rest: float | None  # saves, logs, and steps that were lost and trained again


def speed(parts: Sequence[Stretch]) -> Speed | None:
    """The speed of the steady steps; None if no attempt reached one."""
    steady = [step for part in parts for step in part.steady]
    seconds = sum(step.seconds for step in steady)
    if not seconds:
        return None
    tokens = sum(step.tokens for step in steady)
    computed = [step.computed_tokens for step in steady if step.computed_tokens is not None]
    waits = [step.data_seconds for step in steady if step.data_seconds is not None]
    waited_s = sum(waits) if len(waits) == len(steady) else None
    scored = [
        evaluation
        for part in parts
        if part.steady
        for evaluation in part.evaluations
        if evaluation.time > part.steady_since
    ]
    evaluating_s = sum(evaluation.seconds for evaluation in scored)
    wall_s = sum(part.wall_s for part in parts if part.steady)

    def share(part_s: float | None) -> float | None:
        return None if part_s is None or wall_s < seconds else part_s / wall_s

    return Speed(
        steps=len(steady),
        tokens_per_s=tokens / seconds,
        padding=1 - tokens / sum(computed) if len(computed) == len(steady) else None,
        step_s=statistics.median(step.seconds for step in steady),
        busy=share(None if waited_s is None else seconds - waited_s),
        waiting=share(waited_s),
        evaluating=share(evaluating_s),
        rest=share(wall_s - seconds - evaluating_s),
    )
