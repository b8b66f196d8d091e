"""Uses of a run's time, of each attempt, from the records in its folder."""

import statistics
from collections.abc import Mapping, Sequence

from launch.run_folder.steps import STEADY_FROM, Stretch
from launch.schema.result import AttemptEnd, Outcome

TRAINING = "steps that count"
TOKENISING = "tokenising"
STARTING = "starting: processes, imports, loading the model"
FIRST_STEPS = f"the first {STEADY_FROM} steps of each attempt, beyond the others (compiling)"
WAITING = "waiting for data"
EVALUATING = "evaluations"
SAVING = "saving checkpoints"
AGAIN = "steps that were lost and trained again"
WITHOUT = "attempts that trained no step"
REST = "logs, export, closing down"
_LEAST_S = 0.05  # less is not shown
ORDER = (
    TRAINING,
    FIRST_STEPS,
    WAITING,
    EVALUATING,
    SAVING,
    STARTING,
    TOKENISING,
    AGAIN,
    WITHOUT,
    REST,
)


def spent(attempts: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """(use, seconds) of the uses of all attempts that took time, in a fixed order."""
    total = {use: sum(max(attempt.get(use, 0.0), 0.0) for attempt in attempts) for use in ORDER}
    return [(use, seconds) for use, seconds in total.items() if seconds >= _LEAST_S]


def of_attempt(
    end: AttemptEnd | None, outcome: Outcome | None, part: Stretch | None, tokenising_s: float = 0.0
) -> dict[str, float]:
    """Seconds of each use of an attempt's time; None: it has no such record, or trained no step."""
    if part is None:
        return {TOKENISING: tokenising_s, WITHOUT: end.seconds if end else 0.0}
    trained_s, began, until = part.trained_s, part.began, part.steady_since + part.wall_s
    counted_s = sum(step.seconds for step in part.counted)
    waited_s = sum(step.data_seconds or 0.0 for step in part.counted)
    first_s = _first_steps_s(part)
    evaluated_s = sum(evaluation.seconds for evaluation in part.evaluations)
    # a record of an older version does not say when it ended
    started_s = began - (end.ended_at - end.seconds) if end and end.ended_at else 0.0
    rest_s = (end.seconds - started_s if end else until - began) - trained_s - evaluated_s
    saved_s = min(outcome.save_seconds, max(rest_s, 0.0)) if outcome else 0.0
    return {
        TOKENISING: tokenising_s,
        STARTING: started_s,
        TRAINING: counted_s - waited_s - first_s,
        FIRST_STEPS: first_s,
        WAITING: waited_s,
        EVALUATING: evaluated_s,
        AGAIN: trained_s - counted_s,
        SAVING: saved_s,
        REST: rest_s - saved_s,
    }


def _first_steps_s(part: Stretch) -> float:
    """The time of the first steps beyond that of as many others."""
    if len(part.steady) < STEADY_FROM:
        return 0.0
    busy_s = [step.seconds - (step.data_seconds or 0.0) for step in part.counted]
    return max(0.0, sum(busy_s[:STEADY_FROM]) - STEADY_FROM * statistics.median(busy_s))
