"""Texts of a plan before training and of the result after it, for terminals, logs and pages."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.base.text import size
from launch.report import plan_lines, run_figures
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


def _score(summary: Mapping[str, Any], score: str, unit: str = "") -> str:
    """A score of the held-out rows before training and after it; "" where there is none."""
    before, after = (summary.get(f"{score}_{when}") for when in ("before", "after"))
    if after is None:
        return ""
    # no score before: continued from another run's checkpoint
    start = f"{100 * before:.1f}{unit} before, " if before is not None else ""
    return f"{start}{100 * after:.1f}{unit} after"


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
    exact_match, bleu = _score(summary, "exact_match", " %"), _score(summary, "bleu")
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
        ("end", ended(recipe, summary) if summary.get("ended") == "stopped early" else ""),
        ("model", f"{summary['model_dir']}{lowest}"),
        ("checked", summary.get("export_check")),
        ("answers", f"exact match {exact_match}, on held-out rows" if exact_match else ""),
        ("", f"BLEU {bleu}" if bleu else ""),
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
