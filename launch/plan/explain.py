"""Explanations of a plan: reasons, kernels, and every value that differs from the recipe's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launch.base.text import pace, size
from launch.plan import candidates, kernels
from launch.predict import target_counts
from launch.predict.estimate import Judged, card_figures, describe
from launch.predict.facts import Facts, Installed, Model
from launch.predict.history.calibration import Margin
from launch.predict.memory import pinned_memory
from launch.predict.oom_history import OomHistory
from launch.probe import architectures
from launch.recipe.strict_yaml import show
from launch.schema import levers
from launch.schema.levers import Levers
from launch.schema.machine import GIB, Link, Machine
from launch.schema.plan import Change, Compared, Strategy, Switch
from launch.schema.recipe import Recipe


def why(
    facts: Facts,
    chosen: Judged,
    judged: Sequence[tuple[Judged, str]] = (),
) -> tuple[str, ...]:
    """Explain the device, cards that stay idle, the link between the ranks, and missing
    predictions."""
    candidate = chosen.candidate
    return (
        *_where(facts, candidate),
        *facts.limits.notes,
        *_idle_why(facts.machine, chosen, judged),
        *_link_why(facts.recipe, facts.model, facts.installed.link, candidate),
        *_measured_why(facts.machine, facts.installed, facts.history.error_margin, candidate),
        *_trace_why(facts, chosen),
    )


def switches(facts: Facts, candidate: Strategy) -> tuple[Switch, ...]:
    """The switches that decide which kernels run."""
    gpus = facts.machine.gpus[: candidate.num_processes] if candidate.device == "cuda" else ()
    of_allocators = (
        Switch(
            "allocator",
            facts.allocator_settings(candidate),
            "rows differ in length or targets; another PYTORCH_ALLOC_CONF is taken instead",
        ),
        Switch(
            "pinned",
            pinned_memory.setting(candidate),
            "larger blocks are not rounded up to a power of two; beside settings of your own",
        ),
    )
    return (
        *kernels.switches(
            *(facts.recipe, facts.model.size, candidate, gpus),
            *(facts.installed, facts.history.began_with),
        ),
        _logits(facts, candidate),
        *_rows(facts, candidate),
        *(row for row in of_allocators if row.runs),
    )


def _logits(facts: Facts, candidate: Strategy) -> Switch:
    """The positions at which the output head computes logits, and the number of them for which
    memory is planned."""
    if not candidate.levers.logits_at_targets:
        reason = target_counts.no_logits_at_targets(facts.recipe, facts.model.size.family)
        is_open = facts.recipe.training.logits_at_targets is None
        return Switch("logits", "at all positions", reason if is_open and reason else "asked for")
    most, rows = facts.most_targets(candidate), candidate.per_device_train_batch_size
    positions = rows * most.length
    planned = (
        f"memory for all {positions:,} positions of a micro-batch until the rows are tokenised"
    )
    if most.is_known:
        planned = f"memory for {most.count(rows):,} of the {positions:,} positions of a micro-batch"
        planned += (
            f": the most in the run's order of rows (training.seed {facts.recipe.training.seed})"
            if rows in most.sizes
            else f": no {rows} row(s) have more targets"
        )
    return Switch("logits", "at targets", f"prompts and padding have no loss; {planned}")


def _rows(facts: Facts, candidate: Strategy) -> list[Switch]:
    """The tokens of a micro-batch for which memory is planned, where rows differ in length."""
    if facts.rows.counts is None or facts.traces is None or not facts.rows.is_ragged:
        return []
    rows = candidate.per_device_train_batch_size
    sizes = facts.most_targets(candidate).sizes.get(rows)
    if sizes is None:
        why = facts.no_order(candidate) or "the order of rows is not known"
        return [Switch("memory", f"{rows} of the longest rows", why)]
    most = max(batch.tokens for batch in sizes)
    if not candidate.levers.flattens:
        sides = 1 if facts.model.size.is_encoder_decoder else 2
        most = max(batch.rows * (batch.source + batch.target) for batch in sizes) // sides
    why = f"the most in the run's order of rows (training.seed {facts.recipe.training.seed})"
    return [Switch("memory", f"{most:,} tokens of a micro-batch", why)]


def changes(
    facts: Facts,
    candidate: Strategy,
    judged: Sequence[tuple[Judged, str]],
) -> list[Change]:
    """Each value that is not the recipe's, with the reason."""
    return [
        *_precision_changes(facts.recipe, facts.machine, candidate),
        *_batch_changes(facts.recipe, facts.history.tuned, candidate, judged),
        *_rate_changes(facts.recipe, candidate),
        *_compile_changes(facts.recipe, facts.installed, candidate),
        *_pin_changes(facts.history.oom, candidate),
    ]


def _device_notes(facts: Facts, candidate: Strategy) -> Iterator[str]:
    recipe, machine = facts.recipe, facts.machine
    if candidate.device == "cpu":
        is_asked = facts.wishes.force_cpu or recipe.launch.device == "cpu"
        yield f"device cpu: {'asked for' if is_asked else machine.gpus_reason}"
        if candidate.processes_per_machine > machine.cpu_count:
            yield (
                f"{candidate.processes_per_machine} processes share {machine.cpu_count} CPU(s):"
                " slower than one each"
            )
    if machine.assumed:
        yield f"assumed of {machine.name}: {machine.assumed}"
    if candidate.device == "cuda":
        cards = machine.gpus[: candidate.processes_per_machine]
        yield f"{candidate.num_processes} GPU(s): {machine.gpus_reason}"
        if len(cards) < len(machine.gpus):
            numbers = ", ".join(str(gpu.index) for gpu in cards)
            yield f"GPU {numbers}: the most free memory of {len(machine.gpus)} GPUs"
        if fullest := candidates.without_fullest(cards):
            yield fullest
        yield from (
            f"GPU {gpu.index} ({gpu.name}) is slower now: {gpu.slowdown}"
            for gpu in cards
            if gpu.slowdown
        )
        yield from architectures.attention_notes(
            machine.gpus[: candidate.num_processes], facts.few_shapes
        )


def _where(facts: Facts, candidate: Strategy) -> Iterator[str]:
    recipe, launch = facts.recipe, facts.recipe.launch
    yield from _device_notes(facts, candidate)
    notes = (
        (
            candidate.num_machines > 1 and launch.nodes > 1,
            f"{launch.nodes} machines, this one is number {launch.machine_rank}; they meet at"
            f" {launch.main_process_ip}:{launch.main_process_port}",
        ),
        (
            candidate.launch_mode.offloads,
            "optimizer states in host RAM, updated there by the same optimizer: slower, and no"
            " compiled op is needed",
        ),
        (
            launch.assume_fits,
            "launch.assume_fits: predicted memory was not checked against available memory",
        ),
        (
            facts.wishes.force_gloo,
            "ACCELERATE_USE_GLOO=1 has no effect on one process"
            if candidate.num_processes == 1
            else "backend gloo: ACCELERATE_USE_GLOO=1",
        ),
    )
    yield from (note for is_said, note in notes if is_said)
    if quantized := recipe.quantized(candidate.mixed_precision):
        double = ", their scales in 8" if quantized.bnb_4bit_use_double_quant else ""
        yield (
            f"quantization: linear weights in 4 bits ({quantized.bnb_4bit_quant_type}){double},"
            f" computed in {quantized.bnb_4bit_compute_dtype}; the rest keeps model.dtype"
            f" {recipe.model.dtype}"
        )
    yield from _worker_notes(facts, candidate)


def _worker_notes(facts: Facts, candidate: Strategy) -> Iterator[str]:
    machine = facts.machine
    num_workers = candidates.workers(
        facts, candidate.processes_per_machine, candidate.device == "cuda"
    )
    if candidate.dataloader_num_workers < num_workers:
        yield (
            f"data workers {candidate.dataloader_num_workers} instead of {num_workers}: host RAM"
            " has no room for more"
        )
    elif facts.recipe.training.dataloader_num_workers is None:
        cores = machine.cpu_count // candidate.processes_per_machine
        num_others = min(candidates.MOST_WORKERS, cores - 1)
        yield f"data workers {candidate.dataloader_num_workers}: " + (
            "the rows are mapped and padding them is cheap; workers would take cores from training"
            if candidate.device == "cpu"
            else f"{machine.cpu_count} CPUs over {candidate.num_processes} process(es)"
            f"{', a batch of the rows for each' if num_workers < num_others else ''}"
        )


def _idle_why(
    machine: Machine, chosen: Judged, judged: Sequence[tuple[Judged, str]]
) -> Iterator[str]:
    """Explain why cards stay idle that the recipe leaves to the plan."""
    ranks, cards = chosen.candidate.num_processes, machine.gpus
    more = [(other, verdict) for other, verdict in judged if other.candidate.num_processes > ranks]
    if chosen.candidate.device == "cpu" or not more:
        return
    numbers = ", ".join(str(gpu.index) for gpu in cards[ranks:])
    label = f"GPU {numbers} stays idle" if len(cards) == ranks + 1 else f"GPUs {numbers} stay idle"
    fitting = [other for other, _ in more if not other.misses]
    if fitting:
        best = min(fitting, key=lambda other: other.seconds)
        ratio = f", {best.seconds / chosen.seconds:.2f} x as long" if chosen.time else ""
        yield f"{label}: {describe(best.candidate)} would take {pace(best.seconds)}{ratio}"
    else:
        nearest, _ = min(more, key=lambda pair: pair[0].excess)
        yield f"{label}: more processes do not fit: {describe(nearest.candidate)}: {nearest.misses}"


def _link_why(
    recipe: Recipe, model: Model, link: Link | None, candidate: Strategy
) -> Iterator[str]:
    """Explain the link between the ranks, and its cost if every sample has max_length tokens."""
    if candidate.device == "cpu" or candidate.num_processes == 1:
        return
    if link is None:
        yield "link: not tested; `python -m launch doctor` or the first run does"
        return
    yield f"link: {link.reason}"

    counted, tokens = model.size, candidate.effective_batch_size * recipe.data.max_length
    # activations' gradients, weights' gradients
    backward = counted.parameters + counted.trainable_parameters
    again = counted.parameters * candidate.levers.checkpointed_share
    step_flops = 2.0 * tokens * (counted.parameters + backward + again)
    cost = cost_line(link, model.full_copy.gradients_bytes, step_flops, candidate.num_processes)
    yield from [cost] if cost else []


def _measured_why(
    machine: Machine, installed: Installed, margin: Margin, candidate: Strategy
) -> Iterator[str]:
    """The figures of the plan that were measured on this machine, each with its source."""
    card, link = card_figures(machine, installed, candidate), installed.link
    copied = card.host_device_bytes_per_s
    sent = link.bytes_per_s or 0.0 if link and candidate.processes_per_machine > 1 else 0.0
    figures = (
        (card.context_bytes, f"context {size(card.context_bytes)} ({card.context_source})"),
        (card.flops_per_s, f"products {card.flops_per_s / 1e12:.3g} TFLOP/s (selfcheck)"),
        (copied, f"copies between host and card {copied / 1e9:.1f} GB/s (selfcheck)"),
        (sent, f"link {sent / 1e9:.2f} GB/s (link test)"),
        (
            not margin.is_assumed,
            f"error of reserved memory {margin.fraction:+.1%} ({margin.reason})",
        ),
    )
    if measured := [text for is_measured, text in figures if is_measured]:
        yield f"measured here: {', '.join(measured)}"


def _trace_why(facts: Facts, chosen: Judged) -> Iterator[str]:
    if facts.traces is not None and facts.traces.failure:
        yield f"activations are not predicted: {facts.traces.failure}"
    trace = facts.trace(chosen.candidate)
    if trace is not None and trace.why_whole:
        yield f"this step was traced for itself: {trace.why_whole}"
    if chosen.time:
        yield f"time: {pace(chosen.time.step_s)} predicted ({chosen.time.reason})"


def _precision_changes(recipe: Recipe, machine: Machine, candidate: Strategy) -> Iterator[Change]:
    if recipe.training.bf16 and candidate.mixed_precision == "fp16":
        yield Change(
            "training.bf16",
            "bf16",
            "fp16 with a loss scaler",
            architectures.without_bf16(machine.gpus[: candidate.num_processes]),
        )


def _rate_changes(recipe: Recipe, candidate: Strategy) -> Iterator[Change]:
    """A learning rate that follows the effective batch, as the recipe asks."""
    training, batch = recipe.training, candidate.effective_batch_size
    rate = training.learning_rate_at(batch)
    if rate != training.learning_rate:
        scaling = {"linear": "in proportion to", "sqrt": "with the square root of"}
        yield Change(
            "training.learning_rate",
            f"{training.learning_rate:g}",
            f"{rate:g}",
            f"{scaling[training.learning_rate_scaling]} the effective batch, {batch} instead of"
            f" {training.learning_rate_batch_size}, as asked for",
        )


def _compile_changes(recipe: Recipe, installed: Installed, candidate: Strategy) -> Iterator[Change]:
    if recipe.training.compiles and not candidate.levers.torch_compile:
        yield Change(
            "training.torch_compile",
            "true",
            "false",
            f"torch.compile cannot work here: {installed.no_compiler}",
        )


def _pin_changes(oom_history: OomHistory, candidate: Strategy) -> Iterator[Change]:
    if not candidate.pin_memory:
        pinned_bytes = [
            event.predicted_bytes for event in oom_history.ran_out if event.of == "pinned"
        ]
        least = (
            f"{size(min(pinned_bytes))} of RAM" if all(pinned_bytes) else "its RAM"
        )  # 0: not predicted
        yield Change(
            "pin_memory",
            "true",
            "false",
            f"the host did not lock {least} in an earlier attempt; copies of what is offloaded are"
            " slower without: a thread copies it once more",
        )


def _missed(candidate: Strategy, count: int, judged: Sequence[tuple[Judged, str]]) -> str:
    """The reason why the asked number of samples at once does not fit: in the chosen mode, or in
    another one, which is named, since it may miss another budget."""
    losers = [
        loser
        for loser, _ in judged
        if loser.misses and loser.candidate.per_device_train_batch_size == count
    ]
    if not losers:
        return "the fastest by prediction"
    chosen_mode = candidate.mode, candidate.num_processes
    nearest = min(
        losers,
        key=lambda loser: (loser.candidate.mode, loser.candidate.num_processes) != chosen_mode,
    )
    mode, ranks = nearest.candidate.mode, nearest.candidate.num_processes
    where = "" if (mode, ranks) == chosen_mode else f" with {mode} x{ranks}"
    return (
        f"{count} sample{'s' if count > 1 else ''} at once need{'' if count > 1 else 's'}"
        f" {nearest.misses}{where}"
    )


def _batch_changes(
    recipe: Recipe,
    tuned: Strategy | None,
    candidate: Strategy,
    judged: Sequence[tuple[Judged, str]],
) -> Iterator[Change]:
    """Each setting of the batch that differs from the recipe's; the effective batch is the same."""
    training = recipe.training
    micro_batch, runs = training.per_device_train_batch_size, candidate.per_device_train_batch_size
    steps, runs_steps = training.gradient_accumulation_steps, candidate.gradient_accumulation_steps
    asked_eval, runs_eval = (
        training.per_device_eval_batch_size,
        candidate.per_device_eval_batch_size,
    )
    stays = f"the effective batch stays {candidate.effective_batch_size}"
    missed = _missed(candidate, micro_batch, judged)
    if tuned and tuned == replace(
        candidate,
        dataloader_num_workers=tuned.dataloader_num_workers,
        per_device_eval_batch_size=tuned.per_device_eval_batch_size,
        pin_memory=tuned.pin_memory,
    ):
        missed = "tuned: the fastest of real trials on this machine"
    split = (
        f"{missed}; {stays}"
        if micro_batch != runs
        else f"{candidate.num_processes} process instead of"
        f" {candidate.num_processes * runs_steps // steps}: {stays}"
    )
    rows = (
        (micro_batch != runs, "per_device_train_batch_size", micro_batch, runs, split),
        (steps != runs_steps, "gradient_accumulation_steps", steps, runs_steps, split),
        (
            asked_eval not in (None, runs_eval),
            "per_device_eval_batch_size",
            asked_eval,
            runs_eval,
            f"evaluating {asked_eval} samples at once does not fit; the result is the same",
        ),
    )
    yield from (
        Change(f"training.{key}", str(requested), str(effective), reason)
        for differs, key, requested, effective, reason in rows
        if differs
    )
    yield from _lever_changes(recipe, candidate.levers, missed)


def _lever_changes(recipe: Recipe, runs: Levers, missed: str) -> Iterator[Change]:
    """Each lever that a plan turned on, by the keys that would ask for it."""
    requested_levers = levers.requested(recipe)
    other_kwargs = recipe.training.activation_checkpointing_kwargs.model_dump(
        exclude_defaults=True, exclude_none=True
    )
    before, after = levers.typed(requested_levers), levers.typed(runs)
    before[levers.KWARGS] = other_kwargs
    after[levers.KWARGS] = {**other_kwargs, **after[levers.KWARGS]}
    for row in levers.TRIED:
        if row.read(requested_levers) == row.read(runs) or row.requested(recipe) is not None:
            continue
        is_for_speed = row.saved(row.read(runs)) == row.saved(row.plain)
        reason = f"{'faster' if is_for_speed else missed}; {row.same(row.read(runs))}"
        for key in row.typed(runs):
            if key in before and (requested := before.pop(key)) != after[key]:
                yield Change(
                    key, show(None if is_for_speed else requested), show(after[key]), reason
                )


def table(judged: Sequence[tuple[Judged, str]]) -> list[str]:
    """Render a line for each candidate: its peak, its time, why it lost or won."""
    rows = [("candidate", "live peak", "s/step", "")]
    for each, verdict in judged:
        seconds = f"{each.time.step_s:.3g}" if each.time else "?"
        peak = size(each.memory.allocated_bytes)
        if each.time is None or each.by == "price":  # a lower bound
            peak = f">= {peak}" if each.memory.allocated_bytes else "?"
        rows.append((describe(each.candidate), peak, seconds, verdict))
    first, second, third = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:3])
    return [
        f"{name:<{first}}  {peak:>{second}}  {seconds:>{third}}  {verdict}".rstrip()
        for name, peak, seconds, verdict in rows
    ]


def compared(judged: tuple[Judged, str]) -> Compared:
    """A line of the table with the uses of its bytes."""
    each, verdict = judged
    return Compared(
        name=describe(each.candidate),
        device_parts=each.memory.device_parts,
        budget_bytes=each.budget_bytes,
        seconds_per_step=each.time.step_s if each.time else None,
        verdict=verdict,
    )


def all_reduce_s(link: Link, gradient_bytes: int, num_processes: int) -> float:
    """Seconds of one all-reduce of the gradients over a link that works.

    bytes_per_s is bus bandwidth: bytes x 2(N-1)/N / seconds. It hardly depends on N, so N may
    differ from the test's.
    """
    assert link.bytes_per_s
    return gradient_bytes * 2 * (num_processes - 1) / num_processes / link.bytes_per_s


def cost_line(link: Link, gradient_bytes: int, step_flops: float, num_processes: int) -> str | None:
    """Cost of the all-reduce in an optimizer step, and whether a single card would be faster; None
    without a link.

    `step_flops` are those of the whole effective batch. Compute is taken at the card's matmul
    speed, which a real step does not reach, and nothing of the all-reduce as hidden behind the
    backward pass: the verdict is against several cards where it is close.
    """
    if link.backend is None or not link.bytes_per_s or num_processes < 2:
        return None
    reduce_s = all_reduce_s(link, gradient_bytes, num_processes)
    cost = (
        f"all-reduce of {gradient_bytes / GIB:.2f} GiB at {link.bytes_per_s / 1e9:.2f} GB/s"
        f" costs {_seconds(reduce_s)} per optimizer step"
    )
    alone_s = step_flops / link.flops_per_s if link.flops_per_s else 0.0
    together_s = reduce_s + alone_s / num_processes
    if not alone_s or together_s <= alone_s:
        return cost
    return (
        f"{cost}; at matmul speed {num_processes} cards then need {_seconds(together_s)} per step"
        f" and one card {_seconds(alone_s)}: one is faster (--launch.num_processes=1), or a larger"
        " effective batch"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
