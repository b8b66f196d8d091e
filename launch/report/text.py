"""Texts of a plan before training and of the result after it, for terminals, logs and pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.base.text import size
from launch.report import plan_lines, run_figures
from launch.report.plan_lines import states_text
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import RunResult
from launch.schema.training_section import TENSORBOARD


def result_lines(
    recipe: Recipe, machine: Machine, plan: Plan, result: RunResult, chat: Sequence[str]
) -> list[str]:
    """The end of a run, with predicted figures beside measured ones."""
    if result.failure:
        return failure_lines(result)
    return list(_success_lines(recipe, machine, plan, result, chat))


def badge(result: RunResult) -> str:
    """The end of a run in a few words."""
    if result.failure:
        return result.failure.cause
    return "stopped early" if result.summary.get("ended") == "stopped early" else "complete"


def ended(recipe: Recipe, summary: Mapping[str, Any]) -> str:
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
    return [
        f"error: {failure.cause}",
        *([f"  where  in {failure.section} at step {result.last_step}"] if failure.section else []),
        f"  proof  {failure.proof}",
        # a mistake in the recipe or the data says itself what to do
        *([f"  fix    {failure.fix}"] if failure.fix else []),
        *([f"  note   {result.note}"] if result.note else []),
        f"  run    {result.run_dir}",
    ]


def _before_and_after(summary: Mapping[str, Any], score: str, unit: str = "") -> str:
    before = summary.get(f"{score}_before")  # None: continued from another run's checkpoint
    start = f"{100 * before:.1f}{unit} before, " if before is not None else ""
    return f"{start}{100 * summary[f'{score}_after']:.1f}{unit} after"


def _success_lines(
    recipe: Recipe, machine: Machine, plan: Plan, result: RunResult, chat: Sequence[str]
) -> Iterator[str]:
    summary = result.summary
    in_all = [f"{result.seconds:.0f} s in all", *run_figures.beside_others(summary)]
    yield (
        f"done: {summary['step']:,} steps in {summary['train_seconds']:.0f} s ({', '.join(in_all)})"
    )
    if summary.get("ended") == "stopped early":
        yield f"  end        {ended(recipe, summary)}"
    of_step = summary.get("exported_step")
    yield f"  model      {summary['model_dir']}" + (
        f" (step {of_step:,}: lowest held-out loss)" if of_step else ""
    )
    if checked := summary.get("export_check"):
        yield f"  checked    {checked}"
    if summary.get("exact_match_after") is not None:
        scores = _before_and_after(summary, "exact_match", " %")
        yield f"  answers    exact match {scores}, on held-out rows"
    if summary.get("bleu_after") is not None:
        yield f"             BLEU {_before_and_after(summary, 'bleu')}"
    losses = {"on the last step": summary["loss"], "on the held-out rows": summary["eval_loss"]}
    if of_step:
        losses[f"on them at step {of_step:,}, whose weights these are"] = summary.get(
            "exported_eval_loss"
        )
    measured = [f"{value:.4f} {where}" for where, value in losses.items() if value is not None]
    if measured:  # another machine than number 0 has none
        yield f"  loss       {', '.join(measured)}"
    peak = plan.estimate.peak
    yield f"  predicted  model states {states_text(plan.estimate)}"
    if peak:
        yield f"             peak {size(peak.allocated_bytes)} per process in {peak.section}"
    if plan.estimate.host:
        yield f"             host RAM {size(plan.estimate.host_bytes)}"
    yield f"  measured   model states {states_text(summary)}"
    if summary["vram_allocated_bytes"]:
        yield (
            f"             VRAM peak {size(summary['vram_allocated_bytes'])} allocated,"
            f" {size(summary['vram_reserved_bytes'])} reserved"
        )
    yield (
        f"             host RAM peak {size(result.host_peak_bytes)} of"
        f" {size(machine.host_limit_bytes)}"
    )
    notes = (result.note, plan_lines.NO_RATE if plan_lines.has_no_rate(recipe, plan) else "")
    yield from (f"  note       {note}" for note in notes if note)
    for number, line in enumerate(chat):
        yield f"  {'' if number else 'chat':<10} {line}"
    files = ["report.html", *(name for name in recipe.training.report_to if name == TENSORBOARD)]
    yield f"  run        {result.run_dir} ({', '.join(files)})"
