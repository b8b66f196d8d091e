"""The HTML page of a run."""

from collections.abc import Sequence
from dataclasses import replace

from launch.report import curves, page, peaks_svg, plan_lines, run_figures, shown_rows
from launch.report.text import badge, ended, result_lines
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import Answers, HeldOut, Question, RunResult, StepEvent
from launch.schema.rows import ShownRows


def html(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    result: RunResult,
    events: Sequence[StepEvent] = (),  # steps that count
    evaluations: Sequence[HeldOut] = (),
    attempts: Sequence[tuple[str, str]] = (),  # (what it ran with, how it ended)
    spent: Sequence[tuple[str, float]] = (),  # (use, seconds)
    summary: ShownRows | None = None,
    questions: Sequence[Question] = (),
    answers: Sequence[Answers] = (),  # answers of each step
    repeat: Sequence[tuple[str, str]] = (),  # (what it does, command line)
) -> str:
    """The run as a self-contained page: result, end, changes, predictions, curves, time, data,
    how to repeat it, plan."""
    seconds = sum(part_s for _, part_s in spent) or result.seconds
    measured = result_lines(recipe, machine, plan, result, ()) if result.summary else ()
    trained, max_length = recipe.data.train_names, recipe.data.max_length
    lengths = shown_rows.length_steps(summary.lengths) if summary else []
    rows = summary.rows if summary else []
    return page.render(
        "run.html",
        title=recipe.name,
        badge=badge(result),
        run_dir=result.run_dir,
        tiles=run_figures.tiles(machine, plan, result, events, evaluations, seconds),
        failure=run_figures.failure(result),
        ended=ended(recipe, result.summary),
        changes=plan_lines.by_reason(plan.changes),
        attempts=attempts,
        compared=list(run_figures.predicted_beside_measured(plan, result, events)),
        curves=_curves(events, evaluations),
        answers=run_figures.shown_answers(questions, answers),
        spent=run_figures.time_lost(spent),
        data=[
            ("trained", trained if plan.rows is None else f"{trained}: {plan.rows:,} rows"),
            ("held out", run_figures.rows_held_out(recipe, plan)),
            ("columns", plan.data_format.reason),
            *(shown_rows.facts(plan.data_format, summary, max_length) if summary else ()),
        ],
        lengths=lengths,
        most_rows=max((count for _, _, count in lengths), default=0),
        rows=[(shown_rows.heading(row, max_length), row) for row in rows],
        escapes=shown_rows.ESCAPES if any(row.has_escapes for row in rows) else "",
        repeat=repeat,
        plan=plan_lines.facts(recipe, machine, plan),
        measured="\n".join(measured),
        candidates=peaks_svg.figure(
            "predicted memory of a device at the peak of each plan", plan.compared
        ),
    )


def _curves(events: Sequence[StepEvent], evaluations: Sequence[HeldOut]) -> str:
    losses = curves.Line([(event.step, event.loss) for event in events], "training")
    if mean := curves.mean(losses):
        losses = replace(losses, color="#93b4f5", width=1.0)
        mean = replace(mean, name=f"{mean.name} steps")
    held_out = curves.Line(
        [(score.step, score.loss) for score in evaluations], "held out", "#d55e00", 2.0
    )
    drawn = curves.figure("loss", [*filter(None, (losses, mean, held_out))], "step", False)
    for title, field, scale, from_zero in (
        ("learning rate", "learning_rate", 1, True),
        ("gradient norm", "grad_norm", 1, False),
        ("seconds per step", "seconds", 1, True),
        ("VRAM allocated since the start, GiB", "vram_allocated_bytes", GIB, True),
        ("host RAM of the job, GiB", "host_pss_bytes", GIB, True),
    ):
        values = ((event.step, getattr(event, field)) for event in events)
        # a norm is there at the steps that are logged
        points = [(step, value / scale) for step, value in values if value is not None]
        if any(value for _, value in points):
            drawn += curves.figure(title, [curves.Line(points)], "step", from_zero)
    return drawn
