"""Figures of a run for its page: result, end, changes, predictions beside measurements, time,
answers."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launch.base.text import duration, size
from launch.report.plan_lines import STATES
from launch.run_folder.steps import STEADY_FROM, Stretch
from launch.schema.machine import Machine
from launch.schema.phases import DeviceMemory
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import (
    ALONE,
    Answers,
    AttemptEnd,
    HeldOut,
    Outcome,
    Question,
    RunResult,
    StepEvent,
)

# uses of a run's time
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
MOST_ANSWERS = 8  # answers shown to a question: the first, the last, and some between
# name, what stands at the right, and bars: (class, width in percent, text)
_Bars = tuple[str, str, list[tuple[str, float, str]]]
# name, predicted and measured figure; None: not predicted, not measured
_Pair = tuple[str, int | None, int | None]


def tiles(
    machine: Machine,
    plan: Plan,
    result: RunResult,
    events: Sequence[StepEvent],
    evaluations: Sequence[HeldOut],
    seconds: float,
) -> Iterator[tuple[str, str, str]]:
    """(label, value, note) of each figure of the result that there is; `seconds` are those of all
    attempts."""
    summary = result.summary
    for label, before, after in scores(summary):
        yield label, after, before or "of held-out answers"
    if evaluations:
        last, lowest = evaluations[-1], min(evaluations, key=lambda score: score.loss)
        exported = summary.get("exported_step")
        shown = next((score for score in evaluations if score.step == exported), last)
        note = f"at step {shown.step:,}"
        if lowest.loss < shown.loss:
            note += f"; lowest {lowest.loss:.4f} at step {lowest.step:,}"
        yield "held-out loss", f"{shown.loss:.4f}", note
    if events:
        last = events[-1]
        yield "training loss", f"{last.loss:.4f}", f"of step {last.step:,}"
        steady = events[STEADY_FROM:] or events
        busy = sum(step.seconds for step in steady)
        if busy:
            tokens = sum(step.tokens for step in steady)
            yield "tokens/s", f"{tokens / busy:,.0f}", f"{busy / len(steady):.3g} s a step"
        yield (
            "steps",
            f"{last.step:,}",
            f"of {last.max_steps:,}; {last.samples_seen:,}"
            f" {'packed sequences' if plan.packing else 'samples'}",
        )
    count = plan.strategy.num_processes
    device = (
        f"{seconds * count / 3600:.3g} GPU-hours on {count} x {machine.gpus[0].name}"
        if plan.strategy.device == "cuda"
        else f"on {machine.cpu_count} CPUs"
    )
    yield "time", duration(seconds), f"{seconds / 3600:.3g} h in all; {device}"


def scores(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(label, text on it before training, text after it) of each score of held-out rows."""
    for label, score, unit in (("exact match", "exact_match", " %"), ("BLEU", "bleu", "")):
        before, after = (summary.get(f"{score}_{when}") for when in ("before", "after"))
        if after is not None:
            # no score before: continued from another run's checkpoint
            earlier = "" if before is None else f"{100 * before:.1f}{unit} before"
            yield label, earlier, f"{100 * after:.1f}{unit}"


def failure(result: RunResult) -> list[tuple[str, str]]:
    """(label, text) of a failure; [] of a run that ended well."""
    failed = result.failure
    if failed is None:
        return []
    return [
        ("cause", failed.cause),
        ("where", f"in {failed.section} at step {result.last_step:,}" if failed.section else ""),
        ("proof", failed.proof),
        ("what to do", failed.fix),
        ("note", result.note),
    ]


def beside_others(summary: Mapping[str, Any]) -> Iterator[str]:
    """Words on the time of a run in which other programs had the cores, if it was slower for it."""
    share = summary.get("core_share", 1.0)
    if share < ALONE:
        yield f"other programs had the cores {1 - share:.0%} of the time"


def predicted_beside_measured(
    plan: Plan, result: RunResult, events: Sequence[StepEvent]
) -> Iterator[tuple[str, list[_Bars]]]:
    """Bars of memory by category, then by phase, and of the time of a step."""
    groups = [
        ("by category", list(_by_category(plan, result.summary))),
        ("by phase, a rank's device (reserved)", list(_by_device_phase(plan, result.summary))),
        ("by phase, host RAM of the job", list(_by_host_phase(plan, result, events))),
    ]
    yield from ((title, _bars(pairs, size)) for title, pairs in groups if pairs)
    steady = [step.seconds for step in events[STEADY_FROM:]]
    if steady or plan.seconds_per_step:
        predicted = None if plan.seconds_per_step is None else int(1e6 * plan.seconds_per_step)
        name = ", ".join(["a step", *beside_others(result.summary)])
        measured = int(1e6 * statistics.median(steady)) if steady else None
        yield (
            "seconds (median)",
            _bars([(name, predicted, measured)], lambda us: f"{us / 1e6:.3g} s"),
        )


def _bars(pairs: Sequence[_Pair], text: Callable[[int], str]) -> list[_Bars]:
    most = max(value or 0 for _, *values in pairs for value in values)
    rows = []
    for name, predicted, measured in pairs:
        error = "not measured" if measured is None else "not predicted"
        if measured and predicted:
            error = f"{measured / predicted - 1:+.1%}"
        drawn = [
            (kind, 100 * value / (most or 1), f"{text(value)} {kind}")
            for kind, value in (("predicted", predicted), ("measured", measured))
            if value is not None
        ]
        rows.append((name, error, drawn))
    return rows


def _by_category(plan: Plan, summary: Mapping[str, Any]) -> Iterator[_Pair]:
    estimate = plan.estimate
    for name in (*STATES, "offloaded"):
        predicted, measured = getattr(estimate, f"{name}_bytes"), summary.get(f"{name}_bytes")
        if measured or predicted:
            yield f"{name} of a rank", predicted, measured
    if summary.get("vram_allocated_bytes"):
        for kind in ("allocated", "reserved"):
            predicted = getattr(estimate, f"{kind}_bytes") if estimate.peak else None
            yield f"VRAM peak, {kind}", predicted, summary[f"vram_{kind}_bytes"]


def _by_device_phase(plan: Plan, summary: Mapping[str, Any]) -> Iterator[_Pair]:
    if plan.strategy.device != "cuda":
        return
    measured = summary.get("phases") or {}
    for phase in (*vars(plan.phases), "generation"):
        memory: DeviceMemory | None = getattr(plan.phases, phase, None)
        peak = measured.get(phase)
        if memory or peak:
            yield (
                phase.replace("_", " "),
                memory.reserved_bytes if memory else None,
                peak["reserved_bytes"] if peak else None,
            )


def _by_host_phase(plan: Plan, result: RunResult, events: Sequence[StepEvent]) -> Iterator[_Pair]:
    """Of the parts of a run, host RAM is measured in steps, and over all parts at its peak."""
    of_steps = max((step.host_pss_bytes for step in events), default=0) or None
    for phase, memory in vars(plan.host).items():
        if memory:
            yield phase.replace("_", " "), memory.bytes, of_steps if phase == "step" else None
    peak_bytes = max(result.host_peak_bytes, of_steps or 0)  # ranks read theirs more often
    if plan.estimate.host_bytes or peak_bytes:
        yield "peak of all", plan.estimate.host_bytes or None, peak_bytes or None


def spent(attempts: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """(use, seconds) of the uses of all attempts that took time, in a fixed order."""
    total = {use: sum(max(attempt.get(use, 0.0), 0.0) for attempt in attempts) for use in ORDER}
    return [(use, seconds) for use, seconds in total.items() if seconds >= _LEAST_S]


def uses_of_attempt(
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


def time_lost(uses: Sequence[tuple[str, float]]) -> list[_Bars]:
    """A bar for each use of the attempts' time; those that are not training in another colour."""
    seconds = [part_s for _, part_s in uses]
    return [
        (
            use,
            f"{part_s / sum(seconds):.1%}",
            [("" if use == TRAINING else "lost", 100 * part_s / max(seconds), duration(part_s))],
        )
        for use, part_s in uses
    ]


def rows_held_out(recipe: Recipe, plan: Plan) -> str:
    if recipe.data.validation_file:
        return recipe.data.validation_file
    held_out = plan.rows_held_out
    return f"{held_out:,} rows of the same (data.validation_size)" if held_out else "none"


def shown_answers(
    questions: Sequence[Question], answers: Sequence[Answers]
) -> list[tuple[Question, list[tuple[int, str]]]]:
    """Each question with its answers, by step: of a few evaluations at about equal distances."""
    last = len(answers) - 1
    if len(answers) > MOST_ANSWERS:
        steps = (round(number * last / (MOST_ANSWERS - 1)) for number in range(MOST_ANSWERS))
        answers = [answers[number] for number in steps]
    return [
        (
            question,
            [
                (record.step, record.texts[number].strip())
                for record in answers
                if number < len(record.texts)
            ],
        )
        for number, question in enumerate(questions)
        if answers
    ]
