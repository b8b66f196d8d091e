"""Texts of a plan before training and of the result after it, for terminals, logs and pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launch.base.text import duration, pace, size
from launch.schema.machine import Machine
from launch.schema.plan import MULTIPLE, Change, MemoryEstimate, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.result import RunResult
from launch.schema.training_section import TENSORBOARD

WORTH_A_WORD = 0.1  # of what a step computes, saved
# Of QLoRA (arXiv:2305.14314, table 9: 7B and 13B) and LoRA (arXiv:2106.09685, GPT-3). "LoRA Without
# Regret" (Thinking Machines, 2025) finds ten times the rate of a full fine-tune.
LORA_RATE = 2e-4
HOPELESS_S = 90 * 86400.0  # of a training
STATES = ("weights", "gradients", "optimizer")


def plan_lines(recipe: Recipe, machine: Machine, plan: Plan) -> list[str]:
    """The full plan: every setting, its reason, and the alternatives."""
    return list(_plan_lines(recipe, machine, plan))


def _plan_lines(recipe: Recipe, machine: Machine, plan: Plan) -> Iterator[str]:
    strategy, model, training = plan.strategy, plan.shape, recipe.training
    yield f"plan for {recipe.name} on {machine.name}"
    trained = f"{model.trainable_parameters:,} trained"
    yield f"  model      {model.name}: {model.parameters:,} parameters, {trained}"
    held_out = f", {plan.rows_held_out:,} more are held out" if plan.rows_held_out else ""
    bad = ", bad rows included" if plan.counts_bad_rows(recipe) else ""
    rows = "" if plan.rows is None else f" ({plan.rows:,} rows{held_out}{bad})"
    file = recipe.data.train_names if recipe.data.is_mixed else recipe.data.train_file
    files = plan.data_format.num_files
    shards = f" ({files:,} files)" if files > 1 else ""
    yield f"  data       {file}{shards}{rows}"
    if plan.rows_of is not None:
        yield f"             {rows_of_line(plan)}"
    for source in plan.sources:
        yield f"             {source.path}: weight {source.weight:g}, {source.rows:,} rows an epoch"
    if plan.rows_left_out is not None and plan.target_share is not None:
        yield (
            f"             {plan.rows_left_out:,} rows left out; {plan.target_share:.0%} of the"
            " tokens have a loss"
        )
    described = plan.data_format
    template = [f"chat template: {described.template}"] if described.template else []
    of_sources = [source.reason for source in described.of_sources or (described,)]
    for line in (*of_sources, *template, *described.notes):
        yield f"             {line}"
    yield from _batch_lines(plan)
    num_samples, steps = plan.num_samples, plan.total_steps(recipe)
    length = (
        f"{training.max_steps} steps"
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epochs"
    )
    if num_samples is not None and training.max_steps < 0:
        length += f" of {-(-num_samples // strategy.effective_batch_size):,} steps"
    rate = training.learning_rate_at(strategy.effective_batch_size)
    warmup = f"{training.warmup_steps:g}"
    if 0 < training.warmup_steps < 1:  # a share, as transformers rounds it
        warmup += " of all steps"
        warmup += f": {math.ceil(training.warmup_steps * steps)}" if steps else ""
    warms_up = training.lr_scheduler_type != "constant"
    yield (
        f"  schedule   {length}, learning rate {rate:g} {training.lr_scheduler_type},"
        f" {f'warm-up {warmup}' if warms_up else 'no warm-up'}, max_length {recipe.data.max_length}"
    )
    for line in schedule_notes(recipe, plan):
        yield f"             {line}"
    yield f"  time       {time_text(recipe, plan)[0]}"
    yield from padding_lines(plan)
    backend = f", backend {strategy.backend}" if strategy.backend else ""
    yield f"  mode       {strategy.mode}{backend}"
    for line in plan.why:
        yield f"             {line}"
    for number, switch in enumerate(plan.switches):
        head = "" if number else "kernels"
        yield f"  {head:<10} {switch.name:<10} {switch.runs}: {switch.why}"
    yield from _memory_lines(plan)
    yield f"  output     {recipe.output_dir}"
    yield from change_lines(plan.changes)
    for line in plan.rejected:
        yield f"  rejected   {line}"
    for number, line in enumerate(plan.table if len(plan.table) > 2 else ()):
        yield f"  {'' if number else 'compared':<10} {line}"
    for number, line in enumerate(plan.savings):
        yield f"  {'' if number else 'saves':<10} {line}"


def time_text(recipe: Recipe, plan: Plan, finished_steps: int = 0) -> tuple[str, float | None]:
    """Seconds a step, steps and their time, as far as they are known before training; and the
    seconds, None where they are not."""
    steps = plan.total_steps(recipe)
    if plan.seconds_per_step is None:
        count = "" if steps is None else f"{steps:,} steps; "
        return f"{count}seconds a step are not known yet: no step of this kind was traced", None
    each = f"{pace(plan.seconds_per_step)} predicted"
    if steps is None:
        return f"{each}; steps and end are not known before the rows are counted", None
    steps_left = max(steps - finished_steps, 0)
    seconds = plan.seconds_per_step * steps_left
    count = f"{steps_left:,} of {steps:,} steps left" if finished_steps else f"{steps:,} steps"
    hopeless = "; hopeless on this machine" if seconds > HOPELESS_S else ""
    return f"{each} x {count} = {duration(seconds)}{hopeless}", seconds


def schedule_notes(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Sentences on a schedule that may surprise its author."""
    training, num_samples = recipe.training, plan.num_samples
    steps = plan.total_steps(recipe) or 0
    batch = plan.strategy.effective_batch_size
    rate = training.learning_rate_at(batch)
    if recipe.lora is not None and rate < LORA_RATE / 2:
        yield (
            f"training.learning_rate {rate:g} is low for LoRA, which usually takes about"
            f" {LORA_RATE:g}, ten times the rate of a full fine-tune"
        )
    if training.warmup_steps and training.lr_scheduler_type == "constant":
        yield (
            f"training.warmup_steps {training.warmup_steps:g} has no effect: constant has no"
            " warm-up, constant_with_warmup has"
        )
    elif 0 < steps <= training.warmup_steps:
        yield f"warm-up takes all of the {steps} steps: the rate never reaches {rate:g}"
    if training.early_stopping_patience and not training.load_best_model_at_end:
        yield (
            "training.early_stopping_patience: the model is that of the last step;"
            " --training.load_best_model_at_end=true exports that of the lowest held-out loss"
        )
    if num_samples is not None and num_samples < batch:
        kind = "packed sequences" if plan.packing else "rows"
        yield f"the effective batch holds all {num_samples:,} {kind}: one step an epoch"


def notes(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Sentences that a reader of the short plan should not miss, the most important first."""
    if recipe.launch.assume_fits:
        yield "launch.assume_fits: predicted memory was not checked against available memory"
    yield from schedule_notes(recipe, plan)
    yield from plan.data_format.notes


def change_lines(changes: Sequence[Change]) -> Iterator[str]:
    """Settings that run otherwise than they were requested, by reason."""
    for reason in dict.fromkeys(change.reason for change in changes):
        yield f"  changed    {reason}"
        for change in changes:
            if change.reason == reason and change.requested != change.effective:
                yield (
                    f"             {change.key}: asked {change.requested}, runs {change.effective}"
                )


def rows_of_line(plan: Plan) -> str:
    """A sentence on rows that --rows-of makes equally long."""
    computed = max(plan.lengths)
    padding = (
        "none is padded"
        if computed == plan.rows_of
        else f"each is padded to {computed:,} ({plan.strategy.device} pads to a multiple of"
        f" {MULTIPLE[plan.strategy.device]})"
    )
    sides = " of source and of target" if plan.shape.is_encoder_decoder else ""
    return (
        f"planned for rows of {plan.rows_of:,} tokens{sides} each, as --rows-of says, not for the"
        f" rows of the file; {padding}"
    )


def planned_lines(plan: Plan) -> Iterator[str]:
    """Batch, padding and memory of a plan that replaces another."""
    yield from _batch_lines(plan)
    yield from padding_lines(plan)
    yield from _memory_lines(plan)


def _batch_lines(plan: Plan) -> Iterator[str]:
    strategy = plan.strategy
    yield f"  batch      {batch(strategy)}"
    if plan.by_tokens:
        yield from _by_tokens_lines(plan)
    if plan.packing:
        count = strategy.effective_batch_size
        content = f"of at most {length_text(plan)} tokens"
        if plan.padding:
            share = count / plan.padding.samples
            content = (
                f"with about {plan.padding.rows * share:,.0f} rows and"
                f" {plan.padding.tokens * share:,.0f} tokens"
            )
        yield (
            f"             a step covers {count} packed sequences {content}, instead of"
            f" {count} rows"
        )


def batch(strategy: Strategy) -> str:
    """The factors of the effective batch."""
    ending = "" if strategy.num_processes == 1 else "es"
    return (
        f"{strategy.per_device_train_batch_size} per device x"
        f" {strategy.gradient_accumulation_steps} accumulation x {strategy.num_processes}"
        f" process{ending} = {strategy.effective_batch_size} effective"
    )


def _by_tokens_lines(plan: Plan) -> Iterator[str]:
    """Micro-batches under data.batch_by_tokens: their rows vary, their tokens are limited."""
    strategy = plan.strategy
    if strategy.gradient_accumulation_steps == 1:
        yield (
            "             data.batch_by_tokens changes nothing: all rows of a step are one"
            " micro-batch"
        )
        return
    source, target = (f"{tokens:,} tokens" for tokens in plan.micro_batch_tokens)
    most = f"{source} of source and {target} of target" if plan.shape.is_encoder_decoder else source
    rows = strategy.per_device_train_batch_size
    yield (
        f"             by tokens: a micro-batch has at most {most}, padding included, as {rows} of"
        f" the longest rows ({length_text(plan)}) have"
    )
    if plan.padding and plan.padding.micro_steps:
        micro_steps = plan.padding.micro_steps
        each = strategy.effective_batch_size / strategy.num_processes / micro_steps
        yield (
            f"             {micro_steps:.1f} micro-steps a step on average, of {each:.1f} rows"
            f" each, instead of {strategy.gradient_accumulation_steps}"
        )


def padding_lines(plan: Plan) -> Iterator[str]:
    """The share of padding in a step, once the rows are tokenised, and settings with less."""
    padding = plan.padding
    if padding is None:
        return
    line = f"  padding    {padding.share:.0%} of the tokens that a step computes"
    if padding.order == "packed":
        line += f"; {padding.at_random:.0%} if rows were not packed"
    elif plan.by_tokens:
        line += f"; {padding.at_random:.0%} if rows came at random"
        if padding.in_quarters is not None and padding.share - padding.in_quarters > WORTH_A_WORD:
            rows = plan.strategy.per_device_train_batch_size // 4
            finer = f"{rows} x {plan.strategy.gradient_accumulation_steps * 4}"
            line += (
                f"; {padding.in_quarters:.0%} if micro-batches were {finer}, the same step in"
                " smaller pieces"
            )
    elif padding.order == "by_length":
        line += f"; {padding.at_random:.0%} if rows were not grouped by length"
    elif padding.by_tokens is not None and padding.share - padding.by_tokens > WORTH_A_WORD:
        line += (
            f"; --data.batch_by_tokens=true leaves {padding.by_tokens:.0%}, and trains the same"
            " steps"
        )
        if padding.by_tokens - padding.by_length > WORTH_A_WORD:
            line += (
                f"; with steps of one length, --data.group_by_length=true, {padding.by_length:.0%}"
            )
    elif padding.share - padding.by_length > WORTH_A_WORD:
        line += (
            f"; --data.group_by_length=true leaves {padding.by_length:.0%}, in steps of one length"
        )
    yield line


def _memory_lines(plan: Plan) -> Iterator[str]:
    estimate, peak = plan.estimate, plan.estimate.peak
    if peak is None:
        yield (
            f"  memory     model states {_states(estimate)} per process, budget"
            f" {size(plan.budget_bytes)}"
        )
        yield (
            "             activations are not predicted: a batch that is too large fails when it"
            " runs"
        )
    else:
        varies = plan.by_tokens and plan.strategy.gradient_accumulation_steps > 1
        content = (
            f"{plan.micro_batch_tokens[0]:,} tokens at once"
            if varies
            else f"rows of {length_text(plan)} tokens"
        )
        yield (
            f"  memory     {size(estimate.device_bytes)} per process of {size(plan.budget_bytes)}:"
            f" peak {size(peak.allocated_bytes)} in {peak.section} ({peak.op}), {content}"
        )
        yield f"             {_parts(peak.parts)}"
        above = {
            "reserved above it": estimate.fragmentation_bytes,
            "context and communicators": estimate.outside_bytes,
            "for errors of past predictions": estimate.margin_bytes,
        }
        if any(above.values()):
            parts = [f"{size(count)} {name}" for name, count in above.items() if count]
            yield f"             + {', '.join(parts)}"
        if estimate.gives_cache_back:
            yield "             the allocator gives cached blocks back to stay within it"
        if estimate.outside_source:
            yield f"             {estimate.outside_source}"
    if estimate.offloaded_bytes:
        yield f"             {size(estimate.offloaded_bytes)} of states in host RAM"
    if estimate.host:
        yield (
            f"  host RAM   {size(estimate.host_bytes)} in {estimate.host_phase}:"
            f" {_parts(estimate.host)}"
        )


def length_text(plan: Plan) -> str:
    source, target = plan.lengths
    return (
        f"{source:,}"
        if source == target or not plan.shape.is_encoder_decoder
        else f"{source:,} and {target:,}"
    )


def _parts(parts: Mapping[str, int]) -> str:
    """The parts by size; those below a hundredth of the sum are left out."""
    least = max(sum(parts.values()) / 100, 1)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size(count)}" for name, count in ordered if count >= least)


def _states(estimate: MemoryEstimate | Mapping[str, Any]) -> str:
    """The text of a process's predicted or measured states."""
    sizes = asdict(estimate) if isinstance(estimate, MemoryEstimate) else estimate
    states = {name: sizes[f"{name}_bytes"] for name in STATES}
    total = sum(count or 0 for count in states.values())
    parts = ", ".join(
        f"{name} {'not measured' if count is None else size(count)}"
        for name, count in states.items()
    )
    offloaded = sizes["offloaded_bytes"]
    return f"{size(total)} ({parts})" + (f" + {size(offloaded)} in host RAM" if offloaded else "")


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
    yield (
        f"done: {summary['step']:,} steps in {summary['train_seconds']:.0f} s ({result.seconds:.0f}"
        " s in all)"
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
    yield f"  predicted  model states {_states(plan.estimate)}"
    if peak:
        yield f"             peak {size(peak.allocated_bytes)} per process in {peak.section}"
    if plan.estimate.host:
        yield f"             host RAM {size(plan.estimate.host_bytes)}"
    yield f"  measured   model states {_states(summary)}"
    if summary["vram_allocated_bytes"]:
        yield (
            f"             VRAM peak {size(summary['vram_allocated_bytes'])} allocated,"
            f" {size(summary['vram_reserved_bytes'])} reserved"
        )
    yield (
        f"             host RAM peak {size(result.host_peak_bytes)} of"
        f" {size(machine.host_limit_bytes)}"
    )
    if result.note:
        yield f"  note       {result.note}"
    for number, line in enumerate(chat):
        yield f"  {'' if number else 'chat':<10} {line}"
    files = ["report.html", *(name for name in recipe.training.report_to if name == TENSORBOARD)]
    yield f"  run        {result.run_dir} ({', '.join(files)})"
