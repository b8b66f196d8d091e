"""Facts of a plan, told once: the first screen, the full text, the page of a run and `plan --json`
show these rows."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from launch.base.text import WHOLE, duration, pace, size, step_seconds
from launch.plan.kernels import COMPILE_S
from launch.plan.planner import Choice
from launch.predict import seconds_margins
from launch.predict.budgets import host_budget_bytes
from launch.schema.machine import Machine
from launch.schema.plan import (
    MULTIPLE,
    Change,
    MemoryEstimate,
    Padding,
    Peak,
    Plan,
    SecondsCorrection,
    Strategy,
)
from launch.schema.recipe import Recipe

_WORTH_A_WORD = 0.1  # least share of padding that grouping must save for a line on it
# Learning rate of QLoRA (arXiv:2305.14314, table 9: 7B and 13B) and LoRA (arXiv:2106.09685, GPT-3).
# "LoRA Without Regret" (Thinking Machines, 2025) finds ten times the rate of a full fine-tune.
LORA_RATE = 2e-4
_HOPELESS_S = 90 * 86400.0  # a longer training is called hopeless
NO_RATE = (
    "the only step is one of warm-up, whose learning rate is 0, so that nothing is learned;"
    " --training.warmup_steps=0 learns"
)
STATES = ("weights", "gradients", "optimizer")
_NAME_COLUMNS = 36  # width of a model's name on a terminal; a longer path shows its last part


@dataclass(frozen=True)
class Fact:
    """A row: a label, the value, and lines on why or on more of it."""

    label: str
    value: str
    why: tuple[str, ...] = ()
    group: str = ""  # heading that rows have in common


def facts(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    now: datetime | None = None,
    finished_steps: int = 0,
    columns: int = WHOLE,
) -> Iterator[Fact]:
    """Yield every setting with its reasons, and the alternatives. With `now`, local time, the
    training's end is among them."""
    data = plan.data_format
    yield Fact("model", _model(recipe, plan, columns))
    template = [f"chat template: {data.template}"] if data.template else []
    of_sources = [source.reason for source in data.of_sources or (data,)]
    of_length = [] if plan.rows_of is None else [_rows_of_line(plan)]
    names, file = recipe.data.train_names, str(recipe.data.train_file)
    path = [] if recipe.data.is_mixed or file == names else [file]
    yield Fact(
        "data", _data(recipe, plan), (*path, *of_length, *of_sources, *template, *data.notes)
    )
    if len(plan.sources) > 1:
        named = zip(recipe.data.source_names, plan.sources, strict=False)
        rows = ", ".join(f"{name} {source.rows:,}" for name, source in named)
        each = (f"{part.path}: weight {part.weight:g}, {part.rows:,} rows" for part in plan.sources)
        yield Fact("sources", f"rows an epoch: {rows}", tuple(each))
    marked = (change.reason.partition(", licence: ") for change in plan.changes)
    licences = [f"{licence} ({of.split()[1]})" for of, mark, licence in marked if mark]
    if licences:
        yield Fact("licence", "; ".join(licences))
    parts = [] if plan.target_share is None else [f"{plan.target_share:.0%} have a loss"]
    parts += [f"template {data.template}"] if data.template else []
    if parts:
        yield Fact("tokens", ", ".join(parts))
    yield from _batch(plan)
    yield Fact("mode", _mode(machine, plan), plan.why)
    yield from _memory(recipe, machine, plan)
    margin = _seconds_margin(machine, plan)
    yield Fact(
        "time",
        _time(recipe, machine, plan, now, finished_steps),
        (margin.reason,) if margin and plan.seconds_per_step else (),
    )
    yield Fact("schedule", _schedule(recipe, plan), tuple(_schedule_notes(recipe, plan)))
    yield from (Fact(each.name, each.runs, (each.why,), "kernels") for each in plan.switches)
    yield Fact("output", str(recipe.output_dir))
    yield from change_facts(plan.changes)
    yield from (Fact("rejected", line) for line in plan.rejected)
    table = plan.table if len(plan.table) > 2 else ()
    for label, paragraph in (("compared", table), ("saves", plan.savings)):
        if paragraph:
            yield Fact(label, paragraph[0], paragraph[1:])


def full_text(recipe: Recipe, machine: Machine, plan: Plan) -> list[str]:
    """The full plan as text."""
    return [f"plan for {recipe.name} on {machine.name}", *lines(facts(recipe, machine, plan))]


def planned_again(choice: Choice) -> Iterator[Fact]:
    """Yield batch, padding and memory of a plan that replaces another."""
    yield from _batch(choice.plan)
    yield from _memory(choice.recipe, choice.machine, choice.plan)


def lines(rows: Iterable[Fact]) -> Iterator[str]:
    """Yield the rows as lines of a text. Of a group, the first row has its heading."""
    group = ""
    for row in rows:
        if row.group:
            heading = "" if row.group == group else row.group
            yield f"  {heading:<10} {row.label:<10} {row.value}: {row.why[0]}"
        else:
            yield f"  {row.label:<10} {row.value}"
            yield from (f"  {'':<10} {reason}" for reason in row.why)
        group = row.group


def _model(recipe: Recipe, plan: Plan, columns: int) -> str:
    model = plan.shape
    kind = "LoRA, " if recipe.lora else ""
    bits = ", weights in 4 bits" if recipe.quantized(plan.strategy.mixed_precision) else ""
    is_shown = len(model.name) <= _NAME_COLUMNS or columns == WHOLE
    name = model.name if is_shown else Path(model.name).name
    return (
        f"{name}: {model.parameters:,} parameters, {kind}{model.trainable_parameters:,}"
        f" trained{bits}"
    )


def _data(recipe: Recipe, plan: Plan) -> str:
    rows = "rows are not counted" if plan.rows is None else f"{plan.rows:,} rows"
    if plan.rows_held_out:
        rows += f" and {plan.rows_held_out:,} held out"
    if plan.rows_left_out:
        rows += f" ({plan.rows_left_out:,} left out)"
    elif plan.counts_bad_rows(recipe):
        rows += " (bad rows included)"
    lengths = f"lengths are assumed: {_length_text(plan)} tokens each"
    if plan.rows_of is not None:
        lengths = f"all {plan.rows_of:,} tokens long, as --rows-of says"
    if plan.padding and plan.padding.rows:
        mean = plan.padding.tokens / plan.padding.rows
        inputs = "inputs of " if plan.shape.is_encoder_decoder else ""
        lengths = f"{inputs}{mean:,.0f} tokens on average, at most {_length_text(plan)}"
    count = len(recipe.data.sources)
    name = recipe.data.train_names if count == 1 else f"{count} sources"
    files = f" ({plan.data_format.num_files:,} files)" if plan.data_format.num_files > 1 else ""
    return f"{name}{files}: {rows}, {lengths}"


def _schedule(recipe: Recipe, plan: Plan) -> str:
    training, batch_size = recipe.training, plan.strategy.effective_batch_size
    num_samples, steps = plan.num_samples, plan.total_steps(recipe)
    length = (
        f"{training.max_steps} steps"
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epochs"
    )
    if num_samples is not None and training.max_steps < 0:
        length += f" of {-(-num_samples // batch_size):,} steps"
    rate = training.learning_rate_at(batch_size)
    warmup = f"{training.warmup_steps:g}"
    if 0 < training.warmup_steps < 1:
        warmup += f" of all steps{f': {_warmup_steps(recipe, steps)}' if steps else ''}"
    warms_up = training.lr_scheduler_type != "constant"
    return (
        f"{length}, learning rate {rate:g} {training.lr_scheduler_type},"
        f" {f'warm-up {warmup}' if warms_up else 'no warm-up'}, max_length {recipe.data.max_length}"
    )


def _warmup_steps(recipe: Recipe, steps: int) -> int:
    """The steps of warm-up; a share of all steps as transformers rounds it."""
    warmup = recipe.training.warmup_steps
    return math.ceil(warmup * steps if warmup < 1 else warmup)


def has_no_rate(recipe: Recipe, plan: Plan) -> bool:
    """True if the only step is one of warm-up."""
    warms_up = recipe.training.lr_scheduler_type != "constant"
    return warms_up and plan.total_steps(recipe) == 1 == _warmup_steps(recipe, 1)


def _schedule_notes(recipe: Recipe, plan: Plan) -> Iterator[str]:
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
    elif has_no_rate(recipe, plan):
        yield NO_RATE
    elif 0 < steps <= _warmup_steps(recipe, steps):
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
    yield from _schedule_notes(recipe, plan)
    yield from plan.data_format.notes


def change_facts(changes: Sequence[Change]) -> Iterator[Fact]:
    """Yield the settings that run otherwise than they were requested, by reason."""
    for reason, alike in by_reason(changes):
        changed = [
            f"{change.key}: asked {change.requested}, runs {change.effective}"
            for change in alike
            if change.requested != change.effective
        ]
        yield Fact("changed", reason, tuple(changed))


def by_reason(changes: Sequence[Change]) -> list[tuple[str, list[Change]]]:
    """The changes of each reason."""
    return [
        (reason, [change for change in changes if change.reason == reason])
        for reason in dict.fromkeys(change.reason for change in changes)
    ]


def _rows_of_line(plan: Plan) -> str:
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


def _batch(plan: Plan) -> Iterator[Fact]:
    why = list(_by_tokens(plan)) if plan.strategy.levers.batch_by_tokens else []
    if plan.packing:
        count = plan.strategy.effective_batch_size
        content = f"of at most {_length_text(plan)} tokens"
        if plan.padding:
            share = count / plan.padding.samples
            content = (
                f"with about {plan.padding.rows * share:,.0f} rows and"
                f" {plan.padding.tokens * share:,.0f} tokens"
            )
        why.append(f"a step covers {count} packed sequences {content}, instead of {count} rows")
    kind = " packed sequences" if plan.packing else ""
    yield Fact("batch", batch(plan.strategy) + kind, tuple(why))
    if plan.padding is not None:
        yield Fact("padding", padding(plan, plan.padding))


def batch(strategy: Strategy) -> str:
    """The factors of the effective batch."""
    ending = "" if strategy.num_processes == 1 else "es"
    return (
        f"{strategy.per_device_train_batch_size} per device x"
        f" {strategy.gradient_accumulation_steps} accumulation x {strategy.num_processes}"
        f" process{ending} = {strategy.effective_batch_size} effective"
    )


def _by_tokens(plan: Plan) -> Iterator[str]:
    """Micro-batches under data.batch_by_tokens: their rows vary, their tokens are limited."""
    strategy = plan.strategy
    if strategy.gradient_accumulation_steps == 1:
        yield "data.batch_by_tokens changes nothing: all rows of a step are one micro-batch"
        return
    source, target = (f"{tokens:,} tokens" for tokens in plan.micro_batch_tokens)
    most = f"{source} of source and {target} of target" if plan.shape.is_encoder_decoder else source
    yield (
        f"by tokens: a micro-batch has at most {most}, padding included, as"
        f" {strategy.per_device_train_batch_size} of the longest rows ({_length_text(plan)}) have"
    )
    if plan.padding and plan.padding.micro_steps:
        micro_steps = plan.padding.micro_steps
        each = strategy.effective_batch_size / strategy.num_processes / micro_steps
        yield (
            f"{micro_steps:.1f} micro-steps a step on average, of {each:.1f} rows"
            f" each, instead of {strategy.gradient_accumulation_steps}"
        )


def padding(plan: Plan, padding: Padding) -> str:
    """The share of padding in a step, and settings with less."""
    line = f"{padding.share:.0%} of the tokens that a step computes"
    if padding.order == "packed":
        line += f"; {padding.at_random:.0%} if rows were not packed"
    elif plan.strategy.levers.batch_by_tokens:
        line += f"; {padding.at_random:.0%} if rows came at random"
    elif padding.order == "by_length":
        line += f"; {padding.at_random:.0%} if rows were not grouped by length"
    elif padding.share - padding.by_length > _WORTH_A_WORD:
        line += (
            f"; --data.group_by_length=true leaves {padding.by_length:.0%}, in steps of one length"
        )
    return line


def _mode(machine: Machine, plan: Plan) -> str:
    strategy = plan.strategy
    precision = {"no": "float32"}.get(strategy.mixed_precision, strategy.mixed_precision)
    device = f"{machine.cpu_count} CPU cores"
    if plan.seconds_correction.slowdown > 1:
        device += (
            f", {machine.cores_taken:.1f} taken by others: steps take"
            f" {plan.seconds_correction.slowdown:.1f} times as long"
        )
    if strategy.device == "cuda":
        counts = Counter(gpu.name for gpu in machine.gpus[: strategy.processes_per_machine])
        device = " + ".join(
            f"{count} x {name}" if count > 1 else name for name, count in counts.items()
        )
    if strategy.num_machines > 1:
        rank = f"machine_rank {plan.rendezvous.machine_rank} of " if plan.rendezvous else ""
        device += f" ({rank}{strategy.num_machines} machines)"
    backend = f"backend {strategy.backend}, " if strategy.backend else ""
    return f"{strategy.mode}, {backend}{precision}, {device}"


def _memory(recipe: Recipe, machine: Machine, plan: Plan) -> Iterator[Fact]:
    estimate, budget = plan.estimate, size(host_budget_bytes(recipe, machine))
    of_budget, why = f"of {size(plan.budget_bytes)} per process", []
    if estimate.peak is None:
        value = (
            f"model states {size(estimate.model_state_bytes)} {of_budget}; activations are not"
            " predicted"
        )
        why += [_states(asdict(estimate)), "a batch that is too large fails when it runs"]
    else:
        value = (
            f"{size(estimate.device_bytes)} predicted {of_budget}, most in {estimate.peak.section}"
        )
        why += _peak(plan, estimate.peak)
    if estimate.offloaded_bytes:
        why.append(f"{size(estimate.offloaded_bytes)} of states in host RAM")
    yield Fact("memory", value, tuple(why))
    if not estimate.host:
        yield Fact("host RAM", f"not predicted; {budget} available")
        return
    value = f"{size(estimate.host_bytes)} predicted of {budget}, most in {estimate.host_phase}"
    yield Fact("host RAM", value, (_parts(estimate.host),))


def _peak(plan: Plan, peak: Peak) -> Iterator[str]:
    """Yield what a rank holds at its highest, and beside it."""
    estimate, strategy = plan.estimate, plan.strategy
    varies = strategy.levers.batch_by_tokens and strategy.gradient_accumulation_steps > 1
    content = (
        f"{plan.micro_batch_tokens[0]:,} tokens at once"
        if varies
        else f"rows of {_length_text(plan)} tokens"
    )
    yield f"peak {size(peak.allocated_bytes)} in {peak.section} ({peak.op}), {content}"
    yield _parts(peak.parts)
    above = {
        "reserved above it": estimate.fragmentation_bytes,
        "context and communicators": estimate.outside_bytes,
        "for errors of past predictions": estimate.margin_bytes,
    }
    if any(above.values()):
        yield f"+ {', '.join(f'{size(count)} {name}' for name, count in above.items() if count)}"
    if estimate.gives_cache_back:
        yield "the allocator gives cached blocks back to stay within it"
    if estimate.outside_source:
        yield estimate.outside_source


def _time(
    recipe: Recipe, machine: Machine, plan: Plan, now: datetime | None, finished_steps: int
) -> str:
    """Seconds a step, steps, hours and the end, as far as they are known before training."""
    text, seconds = _time_text(recipe, machine, plan, finished_steps)
    if now is None or seconds is None or seconds > _HOPELESS_S:
        return text
    # minutes are rounded up: a start at 10:00 that takes 10 s ends at 10:01
    end = (now + timedelta(seconds=seconds + 59)).replace(second=0)
    day = "" if end.date() == now.date() else f"{end:%Y-%m-%d} "
    return f"{text}: ends about {day}{end:%H:%M}"


def _time_text(
    recipe: Recipe, machine: Machine, plan: Plan, finished_steps: int
) -> tuple[str, float | None]:
    """Seconds a step, steps and their time, as far as they are known before training; and the
    seconds, None where they are not."""
    steps = plan.total_steps(recipe)
    if plan.seconds_per_step is None:
        count = "" if steps is None else f"{steps:,} steps; "
        return f"{count}seconds a step are not known yet: no step of this kind was traced", None
    each = _pace(machine, plan, plan.seconds_per_step)
    if steps is None:
        return f"{each}; steps and end are not known before the rows are counted", None
    steps_left = max(steps - finished_steps, 0)
    seconds = plan.seconds_per_step * steps_left
    count = f"{steps_left:,} of {steps:,} steps left" if finished_steps else f"{steps:,} steps"
    if plan.strategy.levers.torch_compile:
        seconds += COMPILE_S
        count += " + compiling"
    if plan.seconds_per_evaluation:
        epoch_steps = -(-(plan.num_samples or steps) // plan.strategy.effective_batch_size)
        every = recipe.training.eval_steps or epoch_steps
        seconds += (steps // every - finished_steps // every) * plan.seconds_per_evaluation
        count += " + evaluating"
    hopeless = "; hopeless on this machine" if seconds > _HOPELESS_S else ""
    return f"{each} x {count} = {duration(seconds)}{hopeless}", seconds


def _pace(machine: Machine, plan: Plan, step_s: float) -> str:
    """Seconds a step with their margin, by this machine's own runs or by those on such cards."""
    margin = _seconds_margin(machine, plan)
    if margin is None:
        if plan.strategy.device == "cpu":
            return f"{pace(step_s)} predicted"
        return f"{step_seconds(step_s)} (no evidence for this card)"
    least, most = margin.least * step_s, margin.most * step_s
    text = "{:.3g}".format if most < 100 else step_seconds
    return f"{step_seconds(step_s)} ({text(least)} to {text(most)}) predicted"


def _seconds_margin(
    machine: Machine, plan: Plan
) -> seconds_margins.SecondsMargin | SecondsCorrection | None:
    if plan.seconds_correction.runs:
        return plan.seconds_correction
    if plan.strategy.device == "cpu":
        return None
    gpus = machine.gpus[: plan.strategy.processes_per_machine]
    return seconds_margins.of_cards(gpus, plan.strategy.levers.torch_compile)


def _length_text(plan: Plan) -> str:
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


def states_text(estimate: MemoryEstimate | Mapping[str, Any]) -> str:
    """The text of a process's predicted or measured states."""
    sizes = asdict(estimate) if isinstance(estimate, MemoryEstimate) else estimate
    total = sum(sizes[f"{name}_bytes"] or 0 for name in STATES)
    offloaded = sizes["offloaded_bytes"]
    beside = f" + {size(offloaded)} in host RAM" if offloaded else ""
    return f"{size(total)} ({_states(sizes)}){beside}"


def _states(sizes: Mapping[str, Any]) -> str:
    counts = {name: sizes[f"{name}_bytes"] for name in STATES}
    return ", ".join(
        f"{name} {'not measured' if count is None else size(count)}"
        for name, count in counts.items()
    )
