"""The end of a run: lines for a terminal and a log, and the HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.base.text import size
from launch.report import curves, page, peaks_svg, plan_lines, run_figures, shown_rows
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import Answers, HeldOut, Question, RunResult, StepEvent
from launch.schema.rows import ShownRows
from launch.schema.training_section import TENSORBOARD


def result_lines(
    recipe: Recipe, machine: Machine, plan: Plan, result: RunResult, chat: Sequence[str]
) -> list[str]:
    """The end of a run, with predicted figures beside measured ones."""
    if result.failure:
        return failure_lines(result)
    return list(_success_lines(recipe, machine, plan, result, chat))


def _badge(result: RunResult) -> str:
    """The end of a run in a few words."""
    if result.failure:
        return result.failure.cause
    return "stopped early" if result.summary.get("ended") == "stopped early" else "complete"


def _ended(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    """The reason for which a run that has not failed ended."""
    steps = f"{summary.get('step', 0):,}"
    if summary.get("ended") != "stopped early":
        return f"All {steps} steps are trained."
    patience = recipe.training.early_stopping_patience
    return (
        f"Stopped early at step {steps} of {summary['max_steps']:,}: the held-out loss did not fall"
        f" below its lowest in {patience} evaluation{'' if patience == 1 else 's'}"
        " (training.early_stopping_patience)."
    )


def failure_lines(result: RunResult) -> list[str]:
    """The cause of a failure, its proof, and its fix."""
    failure = result.failure
    assert failure is not None
    step = f"at step {result.last_step}" if result.last_step else "before a step of this start"
    return [
        f"error: {failure.cause}",
        *([f"  where  in {failure.section} {step}"] if failure.section else []),
        f"  proof  {failure.proof}",
        # a mistake in the recipe or the data says itself what to do
        *([f"  fix    {failure.fix}"] if failure.fix else []),
        *([f"  note   {result.note}"] if result.note else []),
        f"  run    {result.run_dir}",
    ]


def _success_lines(
    recipe: Recipe, machine: Machine, plan: Plan, result: RunResult, chat: Sequence[str]
) -> Iterator[str]:
    summary, estimate, peak = result.summary, plan.estimate, plan.estimate.peak
    in_all = [f"{result.seconds:.0f} s in all", *run_figures.beside_others(summary)]
    begun = summary.get("resumed_from")
    counted = f", those since {Path(begun).name}" if begun else ""
    yield (
        f"done: {summary['step']:,} steps{counted} in {summary['train_seconds']:.0f} s"
        f" ({', '.join(in_all)})"
    )
    of_step = summary.get("exported_step")
    lowest = f" (step {of_step:,}: lowest held-out loss)" if of_step else ""
    scores = {
        label: f"{label} {', '.join(filter(None, (before, f'{after} after')))}"
        for label, before, after in run_figures.scores(summary)
    }
    losses = {"on the last step": summary["loss"], "on the held-out rows": summary["eval_loss"]}
    if of_step:
        losses[f"on them at step {of_step:,}, whose weights these are"] = summary.get(
            "exported_eval_loss"
        )
    allocated = summary["vram_allocated_bytes"]
    vram = (
        f"VRAM peak {size(allocated)} allocated, {size(summary['vram_reserved_bytes'])} reserved"
        if allocated
        else ""
    )
    measured = [f"{value:.4f} {where}" for where, value in losses.items() if value is not None]
    for label, text in (
        ("end", _ended(recipe, summary) if summary.get("ended") == "stopped early" else ""),
        ("model", f"{summary['model_dir']}{lowest}"),
        ("checked", summary.get("export_check")),
        (
            "answers",
            f"{scores['exact match']}, on held-out rows" if "exact match" in scores else "",
        ),
        ("", scores.get("BLEU")),
        ("loss", ", ".join(measured)),  # another machine than number 0 has none
        ("predicted", f"model states {plan_lines.states_text(estimate)}"),
        ("", f"peak {size(peak.allocated_bytes)} per process in {peak.section}" if peak else ""),
        ("", f"host RAM {size(estimate.host_bytes)}" if estimate.host else ""),
        ("measured", f"model states {plan_lines.states_text(summary)}"),
        ("", vram),
        ("", f"host RAM peak {size(result.host_peak_bytes)} of {size(machine.host_limit_bytes)}"),
        ("note", result.note),
        ("note", plan_lines.NO_RATE if plan_lines.has_no_rate(recipe, plan) else ""),
    ):
        if text:
            yield f"  {label:<10} {text}"
    for number, line in enumerate(chat):
        yield f"  {'' if number else 'chat':<10} {line}"
    files = ["report.html", *(name for name in recipe.training.report_to if name == TENSORBOARD)]
    yield f"  run        {result.run_dir} ({', '.join(files)})"


# ---- the page
# ---------------------------------------------------------------------------


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
        badge=_badge(result),
        run_dir=result.run_dir,
        tiles=run_figures.tiles(machine, plan, result, events, evaluations, seconds),
        failure=run_figures.failure(result),
        ended=_ended(recipe, result.summary),
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
        candidates=peaks_svg.picture(plan.compared) if len(plan.compared) > 1 else "",
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
