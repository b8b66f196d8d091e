"""The HTML page of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from launch.report import answers_html, curves, page, peaks_svg, result_html, rows_html, time_spent
from launch.report.page import escaped
from launch.report.text import badge, plan_lines, result_lines
from launch.report.time_spent import Spent
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import Answers, HeldOut, Question, RunResult, StepEvent
from launch.schema.shown_rows import ShownRows


@dataclass(frozen=True)
class Records:
    """Records of a run, for its page."""

    events: Sequence[StepEvent] = ()  # that count
    evaluations: Sequence[HeldOut] = ()
    attempts: Sequence[tuple[str, str]] = ()  # (what it ran with, how it ended)
    spent: Sequence[Spent] = ()
    rows: ShownRows | None = None
    questions: Sequence[Question] = ()
    answers: Sequence[Answers] = ()  # by step
    repeat: Sequence[tuple[str, str]] = ()  # (what it does, command line)


def html(
    recipe: Recipe, machine: Machine, plan: Plan, result: RunResult, records: Records = Records()
) -> str:
    """The run as a self-contained page: result, end, changes, predictions, curves, time, data,
    how to repeat it, plan."""
    events, seconds = records.events, time_spent.seconds(records.spent) or result.seconds
    lines = plan_lines(recipe, machine, plan)
    if result.summary:
        lines += ["", *result_lines(recipe, machine, plan, result, ())]
    sections = (
        (
            "Result",
            result_html.tiles(machine, plan, result, events, records.evaluations, seconds),
        ),
        ("Why it ended", result_html.why_it_ended(recipe, result)),
        ("What was changed", result_html.what_was_changed(plan.changes, records.attempts)),
        (
            "Predicted beside measured",
            result_html.predicted_beside_measured(plan, result, events),
        ),
        ("Curves", _curves(events, records.evaluations)),
        ("Sample answers", answers_html.section(records.questions, records.answers)),
        ("Where the time went", result_html.time_lost(records.spent)),
        ("Data", rows_html.section(recipe, plan, records.rows)),
        ("How to repeat it", _repeat(records.repeat)),
    )
    is_bad = result.failure is not None
    body = (
        f"<h1>{escaped(recipe.name)}</h1>"
        f'<p><span class="end{" bad" if is_bad else ""}">{escaped(badge(result))}</span>'
        f" {escaped(result.run_dir)}</p>"
        + "".join(f"<h2>{title}</h2>{content}" for title, content in sections if content)
        + f"<details><summary>Plan</summary><pre>{escaped(chr(10).join(lines))}</pre>"
        + peaks_svg.figure("predicted memory of a device at the peak of each plan", plan.compared)
        + "</details>"
    )
    return page.page(recipe.name, body, result_html.STYLE + rows_html.STYLE + answers_html.STYLE)


def _curves(events: Sequence[StepEvent], evaluations: Sequence[HeldOut]) -> str:
    numbers = [event.step for event in events]
    losses = curves.Line(numbers, [event.loss for event in events], "training")
    if mean := curves.mean(losses):
        losses = replace(losses, color="#93b4f5", width=1.0)
        mean = replace(mean, name=f"{mean.name} steps")
    held_out = curves.Line(
        [score.step for score in evaluations],
        [score.loss for score in evaluations],
        *("held out", "#d55e00", 2.0),
    )
    lines = [line for line in (losses, mean, held_out) if line]
    drawn = curves.figure("loss", lines, "step", False)
    for title, field, scale, from_zero in (
        ("learning rate", "learning_rate", 1, True),
        ("gradient norm", "grad_norm", 1, False),
        ("seconds per step", "seconds", 1, True),
        ("VRAM allocated since the start, GiB", "vram_allocated_bytes", GIB, True),
        ("host RAM of the job, GiB", "host_pss_bytes", GIB, True),
    ):
        values = list(map(attrgetter(field), events))
        steps = numbers
        if None in values:  # a norm is there at the steps that are logged
            steps = [step for step, value in zip(numbers, values, strict=True) if value is not None]
            values = [value for value in values if value is not None]
        if any(values):
            scaled = values if scale == 1 else [value / scale for value in values]
            drawn += curves.figure(title, [curves.Line(steps, scaled)], "step", from_zero)
    return drawn


def _repeat(lines: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p>{escaped(text)}</p><pre>{escaped(line)}</pre>" for text, line in lines)
