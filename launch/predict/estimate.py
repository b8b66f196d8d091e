"""The prediction for one candidate: bytes on the device and on the host, seconds per step. Values
in, values out.

The step's peak comes from its trace, what the allocator keeps on top of it from a replay, the rest
from constants with a source. A candidate whose step was not traced is judged by its model states
alone, and the plan says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch.base.text import size
from launch.predict import budgets, sharding
from launch.predict.facts import PlanContext
from launch.predict.memory import allocator as memory_allocator
from launch.predict.memory import context as memory_context
from launch.predict.memory import host_memory, load_order, malloc, onednn, traced_steps
from launch.predict.memory import phases as memory_phases
from launch.predict.optimizers import has_4_bits
from launch.predict.parameters import Shapes
from launch.predict.time import rates, timing
from launch.predict.time.padding import StepSplit
from launch.predict.time.timing import Affine, StepWork, TimeEstimate, WorkCost
from launch.predict.traces import Trace
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.machine import NOT_MEASURED, CardFigures
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.phases import DeviceMemory, DevicePhases, MemoryPhases
from launch.schema.plan import PAGED, MemoryEstimate, Peak, Strategy

# A communicator of two ranks, and of more: github.com/NVIDIA/nccl issue 964, A100.
NCCL_BYTES, NCCL_MORE_BYTES = 544 << 20, 688 << 20

WIDTH_NAMES = ("hidden_size", "n_embd", "d_model")  # of a config: features of a token
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers")
# For backward, without checkpointing: inputs of the norms, of attention's and of the MLP's products
KEPT_TENSORS_A_LAYER = 8
INSIDE_MLP = 2  # of them, that an MLP in parts does not keep

NO_PHASES = MemoryPhases()


@dataclass(frozen=True)
class Judged:
    """A candidate and its prediction; `misses` names the budget that it exceeds, with numbers."""

    candidate: Strategy
    memory: MemoryEstimate
    time: TimeEstimate | None
    budget_bytes: int
    misses: str | None
    excess: float = 0.0  # times the budget that it exceeds most
    phases: MemoryPhases = NO_PHASES  # of the exact prediction of a traced step

    @property
    def seconds(self) -> float:
        return self.time.step_s if self.time else 0.0


def hopeless(context: PlanContext, candidate: Strategy, with_step: bool = False) -> Judged | None:
    """The candidate judged by what no trace changes, where that alone exceeds a budget: model
    states on the device; on the host what processes import, build and save. `with_step`: with the
    least that a step holds of its rows as well."""
    memory = _states(context, candidate)
    if with_step:
        parts = {"states": memory.model_state_bytes}
        parts["activations"] = _least_activation_bytes(context, candidate)
        memory = replace(memory, peak=Peak("forward", "", parts))
    if context.traces is not None:
        fewest = candidate
        if context.recipe.training.dataloader_num_workers is None:
            fewest = replace(candidate, dataloader_num_workers=0)
        memory, _ = _with_host(context, fewest, memory, None, 0)
    judged = _judged(context, candidate, memory, None)
    return judged if judged.misses else None


def _least_activation_bytes(context: PlanContext, candidate: Strategy) -> int:
    """Bytes that the longest rows take at least: the input of each layer, which checkpointing keeps
    too, and the logits of one chunk."""
    config, (_, target) = context.model.config, context.question(candidate).lengths
    width, layers = (
        next((config[name] for name in names if config.get(name)), 0)
        for names in (WIDTH_NAMES, LAYER_NAMES)
    )
    share = candidate.checkpointed_share
    on_device = 0 if candidate.activation_offloading else share
    stored = KEPT_TENSORS_A_LAYER - (candidate.tiled_mlp_num_shards > 1) * INSIDE_MLP
    tensors = on_device + (1 - share) * stored
    element_bytes = sharding.computed_element_bytes(context.recipe.model, candidate)
    of_layers = int(tensors * layers * width * element_bytes)
    rows = candidate.per_device_train_batch_size
    most = context.most_targets(candidate)
    tokens = max(batch.rows for batch in most.batches(rows)) * target
    positions = int(tokens) // candidate.num_output_chunks
    if candidate.logits_at_targets:
        positions = most.of_part(rows)
    return int(tokens * of_layers) + positions * config["vocab_size"] * 4


def judge(context: PlanContext, candidate: Strategy, exact: bool = True) -> Judged:
    """Predict one candidate and compare it with both budgets; `exact` replays the allocator, and
    traces what else than the longest rows the highest peak may be of, which takes longer."""
    states = _states(context, candidate)
    trace = context.trace(candidate)
    rows = candidate.per_device_train_batch_size
    traces = [(trace, rows)]
    if exact:
        steps = traced_steps.of(context, candidate)
        context.fetch_steps(
            question for step in steps for question in (step.question, step.first) if question
        )
        traces = [(traced_steps.trace(context, step, candidate), step.rows) for step in steps]
    predictions = [
        _with_peak(context, candidate, states, step_trace, rows, exact)
        for step_trace, rows in traces
        if step_trace is not None
    ]
    if trace is None or len(predictions) < len(traces):
        return _judged(context, candidate, states, None)
    memory, of_highest = max(
        predictions, key=lambda each: (each[0].device_bytes, each[0].host_bytes)
    )
    fullest, _ = max(predictions, key=lambda each: each[0].host_bytes)
    pinned = max(memory.pinned_bytes for memory, _ in predictions)
    memory = replace(memory, host=fullest.host, host_phase=fullest.host_phase, pinned_bytes=pinned)
    judged = _judged(
        context, candidate, memory, _time(context, candidate, trace, context.mean_split(candidate))
    )
    on_device = memory_phases.highest([phases.device for _, phases in predictions])
    return replace(judged, phases=replace(of_highest, device=on_device))


def share_of_longest(context: PlanContext, candidate: Strategy) -> float:
    """Predicted seconds of a step over those of one whose rows are all as long as the longest; 1
    where not known."""
    trace, split = context.trace(candidate), context.mean_split(candidate)
    if trace is None or split is None:
        return 1.0
    return (
        _time(context, candidate, trace, split).step_s
        / _time(context, candidate, trace, None).step_s
    )


def at_least_s(
    context: PlanContext, candidate: Strategy, other: Strategy, least_share: float
) -> float:
    """Seconds of a step of a candidate that was not traced, at least, by the work of a traced one
    of the same engine, of which it has `least_share` or more."""
    trace = context.trace(other)
    assert trace is not None, f"{other} was traced"
    # targets are counted in the parts of the logits that were traced
    like = replace(candidate, num_output_chunks=other.num_output_chunks)
    time = _time(context, like, trace, context.mean_split(candidate))
    busy_s = time.compute_s + time.memory_s
    return time.step_s - time.launch_s - (1 - least_share) * busy_s


def _time(
    context: PlanContext, candidate: Strategy, trace: Trace, split: StepSplit | None
) -> TimeEstimate:
    work = StepWork(trace.work, _update(context.full_copy))
    speed = rates.of(context.machine, candidate)
    return timing.estimate(
        work,
        candidate,
        context.model,
        context.full_copy,
        speed,
        context.link,
        split,
        card_figures(context, candidate),
        _mean_targets(context, candidate, trace, split),
    )


def _mean_targets(
    context: PlanContext, candidate: Strategy, trace: Trace, split: StepSplit | None
) -> float:
    """Targets of a part of the logits, of a mean micro-batch; without a split, and unless rows are
    packed, of the longest rows."""
    rows, steps = split or StepSplit(
        candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
    )
    mean = context.mean_targets(candidate, steps)
    if mean is None:
        mean = rows * trace.targets.length
    elif split is None and not context.recipe.data.packing:
        mean = trace.targets.of(candidate.per_device_train_batch_size)
    return mean / candidate.num_output_chunks


def card_figures(context: PlanContext, candidate: Strategy) -> CardFigures:
    """The measurements of the cards that a candidate uses, if all of them are of the measured
    kind; else none."""
    measured = context.import_memory.card
    cards = context.machine.gpus[: candidate.processes_per_machine]
    is_same = candidate.device == "cuda" and {gpu.name for gpu in cards} == {measured.name}
    return measured if is_same else NOT_MEASURED


def _judged(
    context: PlanContext, candidate: Strategy, memory: MemoryEstimate, time: TimeEstimate | None
) -> Judged:
    budget = budgets.budget_bytes(context, candidate)
    of_host = budgets.host_bytes(candidate, memory) / max(
        budgets.host_budget_bytes(context.recipe, context.machine), 1
    )
    of_device = memory.device_bytes / max(budget, 1) if candidate.device == "cuda" else 0.0
    excess = max(of_device, of_host)
    return Judged(
        candidate, memory, time, budget, budgets.misses(context, candidate, memory, budget), excess
    )


def _states(context: PlanContext, candidate: Strategy) -> MemoryEstimate:
    return sharding.per_rank(
        context.full_copy, context.parameters, context.recipe, candidate, context.model.family
    )


def _with_peak(
    context: PlanContext,
    candidate: Strategy,
    states: MemoryEstimate,
    trace: Trace,
    num_samples: int,
    exact: bool,
) -> tuple[MemoryEstimate, MemoryPhases]:
    """The memory of the run, and, if it is `exact`, of each part."""
    counts = num_samples, _eval_samples(context, candidate)
    memory = replace(
        states,
        peak=trace.peak(*counts),
        step_allocated_bytes=trace.peak(num_samples, None).allocated_bytes,
    )
    parts: memory_phases.Parts = []
    if exact:
        order = load_order.of(
            context.recipe,
            candidate,
            context.parameters,
            context.model.family,
            states.weights_bytes,
            budgets.budget_bytes(context, candidate),
            context.stored,
        )
        parts = trace.run(*counts, order)
    memory, by_phase = _with_host(context, candidate, memory, trace, num_samples, parts)
    on_host = memory_phases.on_host(by_phase if exact else {})
    if candidate.device == "cpu":
        on_device = _on_cpu(candidate, parts, by_phase["load"]) if exact else DevicePhases()
        return memory, MemoryPhases(on_device, on_host)
    outside, of_context = memory_context.context_bytes(
        context.machine.gpus[0], context.import_memory.card
    )
    outside_source = f"context {size(outside)}, {of_context}"
    if candidate.backend == "nccl":
        outside += NCCL_BYTES if candidate.num_processes == 2 else NCCL_MORE_BYTES
    reserved, of_step = memory.allocated_bytes, memory.step_allocated_bytes
    on_device = DevicePhases()
    if exact:
        available_bytes = budgets.budget_bytes(context, candidate) - outside
        assert memory.peak is not None
        paged = memory.peak.parts.get(PAGED, 0)
        expands = context.allocator.expandable_segments or bool(
            context.allocator_settings(candidate)
        )
        config = replace(context.allocator, expandable_segments=expands)
        replays = memory_phases.replays(parts, config, available_bytes - paged)
        until_step = replays[: [phase for phase, _ in parts].index("step") + 1]
        memory = _in_blocks(memory, replays, until_step, paged)
        memory = replace(memory, gives_cache_back=any(replay.retries for replay in replays))
        reserved = max(replay.peak_reserved_bytes for replay in replays) + paged
        of_step = max(replay.peak_reserved_bytes for replay in until_step)
        on_device = memory_phases.on_device(parts, replays, outside + paged)
    memory = replace(
        memory,
        fragmentation_bytes=max(reserved - memory.allocated_bytes, 0),
        outside_bytes=outside,
        outside_source=outside_source,
    )
    memory = replace(memory, step_reserved_bytes=max(of_step, memory.step_allocated_bytes))
    free = min(gpu.free_bytes for gpu in context.machine.gpus[: candidate.processes_per_machine])
    # the error bar is part of what planning leaves free
    margin_left_free = int(free * (1 - context.recipe.launch.vram_fraction))
    margin = max(
        int(context.error_margin.fraction * memory.reserved_bytes) - margin_left_free,
        int(context.oom_history.device * memory.reserved_bytes),
        0,
    )
    return replace(memory, margin_bytes=margin), MemoryPhases(on_device, on_host)


def _in_blocks(
    memory: MemoryEstimate,
    replays: Sequence[memory_allocator.Replay],
    until_step: Sequence[memory_allocator.Replay],
    paged: int,
) -> MemoryEstimate:
    """Count whole blocks of the allocator, as torch.cuda.max_memory_allocated does, where the peak
    has the bytes that were asked for. `paged`: bytes of states outside the allocator."""
    assert memory.peak is not None
    allocated = max(replay.peak_allocated_bytes for replay in replays) + paged
    rounding = {"rest of blocks": max(allocated - memory.peak.allocated_bytes, 0)}
    return replace(
        memory,
        peak=replace(memory.peak, parts={**memory.peak.parts, **rounding}),
        step_allocated_bytes=max(replay.peak_allocated_bytes for replay in until_step),
    )


def _on_cpu(
    candidate: Strategy, parts: memory_phases.Parts, load: Mapping[str, int]
) -> DevicePhases:
    """The bytes of tensors of a rank on a CPU; while it loads, of what it builds too."""
    built = sum(load.get(cause, 0) for cause in ("weights", "while building"))
    built //= candidate.processes_per_machine
    return replace(memory_phases.on_cpu(parts), load=DeviceMemory(built, built, built))


def _eval_samples(context: PlanContext, candidate: Strategy) -> int | None:
    """Samples of an evaluation's batch; None where nothing is evaluated."""
    return context.evaluated_samples(candidate) if context.recipe.evaluates else None


def _with_host(
    context: PlanContext,
    candidate: Strategy,
    memory: MemoryEstimate,
    trace: Trace | None,
    num_samples: int,
    parts: memory_phases.Parts = (),
) -> tuple[MemoryEstimate, Mapping[str, Mapping[str, int]]]:
    """Add the job's host RAM, and return that of each part of the run; without a trace, all but the
    memory of a step on CPUs. `parts`: the events of an exact prediction."""
    counts = num_samples, _eval_samples(context, candidate)
    first = next(iter(context.parameters.values()))
    live, holes, by_gloo = _of_a_cpu(context, candidate, trace, counts, parts)
    trained = trainable_shapes(
        context.parameters,
        context.recipe.model.freeze,
        context.recipe.lora,
        context.model.family,
    )
    job = host_memory.Job(
        recipe=context.recipe,
        strategy=candidate,
        model=context.model,
        states=memory,
        embedding_bytes=math.prod(first) * DTYPE_BYTES[context.recipe.model.dtype],
        copied_by_gloo_bytes=by_gloo,
        offloaded_activations=[
            math.ceil(size.total(num_samples)) for size in (trace.work.offloaded if trace else ())
        ],
        tensor_bytes=live,
        holes_bytes=holes,
        trained_elements=list(map(math.prod, trained.values())),
        kernels=_kernels(context, candidate, trained),
        rows=context.rows,
        stored=context.stored,
        quantised_elements=max(
            (
                math.prod(sides)
                for name, sides in context.parameters.items()
                if has_4_bits(name, context.model.family)
            ),
            default=0,
        ),
        counts_mappings=bool(context.machine.mappings_count),
    )
    predicted = host_memory.estimate(job, context.import_memory)
    memory = replace(
        memory,
        host=predicted.by_cause,
        host_phase=predicted.phase,
        pinned_bytes=host_memory.pinned_bytes(job),
    )
    return memory, predicted.by_phase


def _reduced(context: PlanContext, candidate: Strategy) -> tuple[dict[int, int], int]:
    """DeepSpeed's bucket, which is as large as asked for, with the bytes that are written of it: as
    far as there are gradients. And those of the copy that Gloo makes of it."""
    if candidate.launch_mode.engine != "deepspeed":
        return {}, 0
    element_bytes = sharding.computed_element_bytes(context.recipe.model, candidate)
    filled = min(context.model.trainable_parameters, sharding.BUCKET_ELEMENTS) * element_bytes
    copied = filled if candidate.backend == "gloo" and candidate.launch_mode.zero_stage == 3 else 0
    return {sharding.BUCKET_ELEMENTS * element_bytes: filled}, copied


def _of_a_cpu(
    context: PlanContext,
    candidate: Strategy,
    trace: Trace | None,
    counts: tuple[int, int | None],
    parts: memory_phases.Parts,
) -> tuple[dict[str, int], dict[str, int], int]:
    """By phase, the bytes of a rank's tensors, and those that malloc keeps of freed ones; and what
    Gloo's threads keep of a copy."""
    written, copied = _reduced(context, candidate)
    in_threads = 0
    if copied < malloc.MMAP_THRESHOLD_BYTES:  # in the arenas of two threads
        copied, in_threads = 0, 2 * copied
    if trace is None or candidate.device != "cpu":
        return {}, {}, in_threads + copied
    untouched = sum(size - touched for size, touched in written.items())
    of_step = {name: peak.allocated_bytes for name, peak in trace.peaks(*counts).items()}
    live = {"evaluation": of_step.pop("evaluation", 0), "step": max(of_step.values())}
    live |= {"first_step": live["step"]} | memory_phases.allocated_bytes(parts)
    resident = malloc.resident_bytes(parts, written, candidate.backend == "gloo")
    live = {part: max(size - untouched, 0) for part, size in live.items()}
    holes = {part: max(size - live[part], 0) for part, size in resident.items()}
    beside = max(of_step.get("backward", 0) + copied - max(of_step.values()), 0)
    return live | {part: live[part] + beside for part in ("first_step", "step")}, holes, in_threads


def _kernels(context: PlanContext, candidate: Strategy, trained: Shapes) -> int:
    """The kernels that oneDNN compiles for a CPU's products; while rows are not counted, those of
    one length."""
    counts, data, training = context.counts, context.recipe.data, context.recipe.training
    lengths = 1.0
    if counts is not None and not data.packing:
        rows = candidate.per_device_train_batch_size
        micro_batches = counts["rows"] * training.num_train_epochs / rows / candidate.num_processes
        if training.max_steps > 0:
            micro_batches = training.max_steps * candidate.gradient_accumulation_steps
        lengths = onednn.padded_lengths(
            [source for source, _ in counts["lengths"]],
            1 if data.group_by_length or data.batch_by_tokens else rows,
            micro_batches,
        )
    return onednn.kernels(context.parameters, trained, lengths, context.recipe.evaluates)


def _update(full_copy: MemoryEstimate) -> WorkCost:
    """The optimizer step: norm, clipping and update read and write gradients, weights and states in
    a few kernels."""
    trained = full_copy.gradients_bytes
    moved = 2 * full_copy.optimizer_bytes + 2 * trained + 4 * trained
    return WorkCost(matmul_flops={}, bytes_moved=Affine(float(moved)), num_kernels=Affine(20.0))


def missing_bytes(context: PlanContext, judged: Judged) -> int:
    """The bytes by which a prediction exceeds the memory that its rows are in; what else it
    exceeds counts as infinitely many."""
    candidate, memory = judged.candidate, judged.memory
    if candidate.device == "cpu":
        budget = budgets.host_budget_bytes(context.recipe, context.machine)
        return (budgets.host_bytes(candidate, memory) - budget) // candidate.processes_per_machine
    if budgets.misses_host(context, candidate, memory):
        return sys.maxsize
    return memory.device_bytes - judged.budget_bytes


def describe(candidate: Strategy) -> str:
    """A candidate in a few words: mode, ranks, batch, checkpointing."""
    checkpointing = ", checkpointing" if candidate.activation_checkpointing else ""
    if checkpointing and candidate.every_n_layers > 1:
        checkpointing += f" 1 layer in {candidate.every_n_layers}"
    if checkpointing and candidate.activation_offloading:
        checkpointing += " on the host"
    chunks = candidate.num_output_chunks
    shards = candidate.tiled_mlp_num_shards
    return (
        f"{candidate.mode} x{candidate.num_processes}, batch"
        f" {candidate.per_device_train_batch_size} x {candidate.gradient_accumulation_steps}"
        f"{checkpointing}{f', loss in {chunks} chunks' if chunks > 1 else ''}"
        f"{f', MLPs in {shards} parts' if shards > 1 else ''}"
    )
