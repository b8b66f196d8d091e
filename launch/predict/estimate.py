"""What one candidate would take: bytes on the device and on the host, seconds per step. Values in,
values out.

The step's peak comes from its trace, what the allocator keeps on top of it from a replay, the rest
from constants with a source. A candidate whose step was not traced is judged by its model states
alone, and the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from launch.base.text import size
from launch.data.token_cache import TokenCache
from launch.predict import parameters as predict_parameters
from launch.predict import sharding
from launch.predict.memory import allocator as memory_allocator
from launch.predict.memory import host_memory, malloc
from launch.predict.oom_history import NO_OOM_HISTORY, OomHistory
from launch.predict.time import padding as time_padding
from launch.predict.time import rates, timing
from launch.predict.time.padding import Cut
from launch.predict.time.timing import Affine, StepWork, TimeEstimate, WorkCost
from launch.predict.traces import Question, Trace, Traces
from launch.probe import architectures
from launch.probe.import_memory import ASSUMED, Imports
from launch.schema.machine import GIB, Link, Machine
from launch.schema.plan import (
    MULTIPLE,
    Change,
    DataFormat,
    MemoryEstimate,
    ModelSize,
    Padding,
    Peak,
    Strategy,
)
from launch.schema.recipe import DTYPE_BYTES, Recipe

USUAL_DOCUMENT = 128  # tokens, assumed while none have been counted
# Outside the allocator. A context after one kernel, with lazy loading (CUDA 11.7 and later):
# assumed, unmeasured here.
CONTEXT_BYTES = {"nvidia": 512 << 20, "amd": 768 << 20}
# A communicator of two ranks, and of more: github.com/NVIDIA/nccl issue 964, A100.
NCCL_BYTES, NCCL_MORE_BYTES = 544 << 20, 688 << 20


WIDTH_NAMES = ("hidden_size", "n_embd", "d_model")  # of a config: features of a token
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers")
# For backward, without checkpointing: inputs of the norms, of attention's and of the MLP's products
KEPT_TENSORS_A_LAYER = 8

LEAST_LENGTH = 8  # tokens of a row that is worth a trace


@dataclass(frozen=True)
class PlanContext:
    """What all candidates of one recipe on one machine have in common."""

    recipe: Recipe
    machine: Machine
    shape: ModelSize
    parameters: predict_parameters.Shapes
    whole: MemoryEstimate  # states of a full copy
    data_format: DataFormat
    lora_targets: tuple[str, ...] = ()
    lengths: tuple[int, int] = (0, 0)  # of the longest source and target; (0, 0): max_length
    is_ragged: bool = True  # some row is shorter than the longest, so that a batch may be padded
    link: Link | None = None
    traces: Traces | None = None  # None: states only
    allocator: memory_allocator.AllocatorConfig = memory_allocator.TORCH_DEFAULTS
    imports: Imports = ASSUMED  # what the job's processes hold before there is a model
    base_fingerprint: str | None = None  # of the weights that an adapter is trained for
    changes: tuple[Change, ...] = ()  # values that the recipe replaced before planning
    rows: int | None = None  # of the training file
    tokens: TokenCache | None = None  # where the tokenised rows are, or will be
    cache_bytes: int | None = None  # of the tokenised rows; None: not there yet
    # of the tokenised training file, as tokenising wrote them
    counts: Mapping[str, Any] | None = None
    error_margin: float = 0.0  # share by which past predictions were exceeded, at the level wanted
    oom_history: OomHistory = NO_OOM_HISTORY  # and that of this very run
    assume_fits: bool = False  # budgets do not count, only what ran out
    # the fastest strategy in real trials of a recipe on this machine
    recall: Callable[[ModelSize, Recipe], Strategy | None] = lambda shape, recipe: None

    def question(self, candidate: Strategy) -> Question:
        multiple = MULTIPLE[candidate.device]
        longest = self.recipe.data.max_length
        source, target = (-(-(length or longest) // multiple) * multiple for length in self.lengths)
        rounds_up = self.lengths[0] != source  # to the multiple, or nothing is known of the rows
        is_padded = rounds_up or (self.is_ragged and candidate.per_device_train_batch_size > 1)
        is_padded |= self.recipe.data.packing  # masks keep documents apart
        if candidate.device == "cpu":
            return Question(candidate, (source, target), is_padded)
        card = self.machine.gpus[0]
        is_fused = architectures.of(card).attention != "math"
        return Question(
            candidate,
            (source, target),
            is_padded,
            card.architecture,
            is_fused,
            self._documents(candidate, source),
        )

    def _documents(self, candidate: Strategy, length: int) -> int:
        """Of a row that flash_attn gets, to the next power of two."""
        if candidate.attn_implementation != "flash_attention_2":
            return 0
        if not self.recipe.data.packing:
            return 1
        mean = (
            self.counts["documents"] / self.counts["rows"]
            if self.counts
            else length / USUAL_DOCUMENT
        )
        return 1 << max(math.ceil(mean) - 1, 0).bit_length()

    def shapes(self, candidate: Strategy) -> list[tuple[Question, int]]:
        """(step, rows of its micro-batch) of all that the highest peak may be of: the longest rows.
        By tokens also the most rows that such a budget can hold, which are a whole step's.

        Between the two no part of a peak is higher than at one of them: at so many padded tokens
        what grows with them is the same, attention's squares fall with the length, what a row takes
        by itself grows with the rows."""
        asked, rows = self.question(candidate), candidate.per_device_train_batch_size
        parts = candidate.gradient_accumulation_steps
        if not self.recipe.data.batch_by_tokens or parts == 1:
            return [(asked, rows)]
        multiple = MULTIPLE[candidate.device]
        shorter = tuple(
            max(length // parts // multiple * multiple, LEAST_LENGTH) for length in asked.lengths
        )
        most = min(
            rows * length // short for length, short in zip(asked.lengths, shorter, strict=True)
        )
        most = max(min(most, rows * parts), 1)
        short = replace(asked, lengths=shorter, is_padded=True)
        return [
            (asked, rows),
            (replace(short, strategy=replace(candidate, per_device_train_batch_size=most)), most),
        ]

    def fetch(self, candidates: Iterable[Strategy]) -> None:
        """Have the steps of these candidates traced, of the longest rows, as far as they are not
        known."""
        self.fetch_steps(self.question(candidate) for candidate in candidates)

    def fetch_steps(self, questions: Iterable[Question]) -> None:
        if self.traces is not None:
            self.traces.fetch(list(questions))

    def asking(self) -> AbstractContextManager[Traces | None]:
        """While steps may be asked for; after it no child is left that traces them."""
        return closing(self.traces) if self.traces is not None else nullcontext()

    def trace(self, candidate: Strategy) -> Trace | None:
        """Of the longest rows."""
        return self.trace_of(self.question(candidate))

    def trace_of(self, question: Question) -> Trace | None:
        return self.traces.get(question) if self.traces is not None else None

    def padding(self, candidate: Strategy) -> Padding | None:
        """How much of a step is padding; None until the rows are tokenised."""
        if self.counts is None:
            return None
        lengths = self.question(candidate).lengths
        return time_padding.of(
            self.counts, candidate, MULTIPLE[candidate.device], self.recipe.data, lengths
        )

    def mean_cut(self, candidate: Strategy) -> Cut | None:
        """What a step holds on average, in rows as long as the longest; None until the rows are
        tokenised, and where they are packed and fill it."""
        if self.counts is None or self.recipe.data.packing:
            return None
        lengths = self.question(candidate).lengths
        return time_padding.mean_cut(
            self.counts, candidate, MULTIPLE[candidate.device], self.recipe.data, lengths
        )


@dataclass(frozen=True)
class Judged:
    """A candidate with what it would take; `misses` says which budget it exceeds, with numbers."""

    candidate: Strategy
    memory: MemoryEstimate
    time: TimeEstimate | None
    budget_bytes: int
    misses: str | None
    excess: float = 0.0  # times the budget that it exceeds most

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
        memory = _with_host(context, fewest, memory, None, 0, exact=False)
    judged = _judged(context, candidate, memory, None)
    return judged if judged.misses else None


def _least_activation_bytes(context: PlanContext, candidate: Strategy) -> int:
    """Bytes that the longest rows take at least: the input of each layer, which checkpointing keeps
    too, and the logits of one chunk."""
    config, (_, target) = context.shape.config, context.question(candidate).lengths
    width, layers = (
        next((config[name] for name in names if config.get(name)), 0)
        for names in (WIDTH_NAMES, LAYER_NAMES)
    )
    element_bytes = 4 if candidate.mixed_precision == "no" else 2
    kept = KEPT_TENSORS_A_LAYER if not candidate.activation_checkpointing else 1
    of_layers = kept * layers * width * element_bytes
    of_logits = config["vocab_size"] * 4 // candidate.num_output_chunks
    return candidate.per_device_train_batch_size * target * (of_layers + of_logits)


def judge(context: PlanContext, candidate: Strategy, exact: bool = True) -> Judged:
    """Predict one candidate and compare it with both budgets; `exact` replays the allocator, and
    traces what else than the longest rows the highest peak may be of, which takes longer."""
    states = _states(context, candidate)
    trace = context.trace(candidate)
    steps = [(context.question(candidate), candidate.per_device_train_batch_size)]
    if exact:
        steps = context.shapes(candidate)
        context.fetch_steps(question for question, _ in steps)
    shapes = [(context.trace_of(question), rows) for question, rows in steps]
    known = [(found, rows) for found, rows in shapes if found is not None]
    if trace is None or len(known) < len(shapes):
        return _judged(context, candidate, states, None)
    memories = [_with_peak(context, candidate, states, found, rows, exact) for found, rows in known]
    memory = max(memories, key=lambda one: (one.device_bytes, one.host_bytes))
    return _judged(
        context, candidate, memory, _time(context, candidate, trace, context.mean_cut(candidate))
    )


def share_of_longest(context: PlanContext, candidate: Strategy) -> float:
    """Predicted seconds of a step over those of one whose rows are all as long as the longest; 1
    where not known."""
    trace, cut = context.trace(candidate), context.mean_cut(candidate)
    if trace is None or cut is None:
        return 1.0
    return (
        _time(context, candidate, trace, cut).step_s / _time(context, candidate, trace, None).step_s
    )


def _time(context: PlanContext, candidate: Strategy, trace: Trace, cut: Cut | None) -> TimeEstimate:
    work = StepWork(trace.work, _update(context.whole))
    speed = rates.of(context.machine, candidate)
    return timing.estimate(work, candidate, context.shape, context.whole, speed, context.link, cut)


def _judged(
    context: PlanContext, candidate: Strategy, memory: MemoryEstimate, time: TimeEstimate | None
) -> Judged:
    budget = budget_bytes(context.recipe, context.machine, candidate)
    of_host = host_bytes(candidate, memory) / max(
        host_budget_bytes(context.recipe, context.machine), 1
    )
    excess = max(memory.device_bytes / max(budget, 1), of_host)
    return Judged(
        candidate, memory, time, budget, _misses(context, candidate, memory, budget), excess
    )


def _states(context: PlanContext, candidate: Strategy) -> MemoryEstimate:
    model_type = context.shape.config["model_type"]
    return sharding.per_rank(
        context.whole, context.parameters, context.recipe, candidate, model_type
    )


def _with_peak(
    context: PlanContext,
    candidate: Strategy,
    states: MemoryEstimate,
    trace: Trace,
    samples: int,
    exact: bool,
) -> MemoryEstimate:
    counts = samples, _eval_samples(context, candidate)
    memory = replace(
        states,
        peak=trace.peak(*counts),
        step_allocated_bytes=trace.peak(samples, None).allocated_bytes,
    )
    memory = _with_host(context, candidate, memory, trace, samples, exact)
    if candidate.device == "cpu":
        return memory
    outside = CONTEXT_BYTES[context.machine.gpus[0].vendor]
    if candidate.backend == "nccl":
        outside += NCCL_BYTES if candidate.num_processes == 2 else NCCL_MORE_BYTES
    reserved, of_step = memory.allocated_bytes, memory.step_allocated_bytes
    if exact:
        room = budget_bytes(context.recipe, context.machine, candidate) - outside
        begun, rest = trace.run(*counts, makes_states=candidate.engine != "deepspeed")
        of_step = _reserved_bytes(begun, context.allocator, room)
        reserved = _reserved_bytes([*begun, *rest], context.allocator, room)
    memory = replace(
        memory, fragmentation_bytes=max(reserved - memory.allocated_bytes, 0), outside_bytes=outside
    )
    memory = replace(memory, step_reserved_bytes=max(of_step, memory.step_allocated_bytes))
    free = min(gpu.free_bytes for gpu in context.machine.gpus[: candidate.processes_per_machine])
    # the error bar is part of what planning leaves free
    kept = int(free * (1 - context.recipe.launch.vram_fraction))
    margin = max(
        int(context.error_margin * memory.reserved_bytes) - kept,
        int(context.oom_history.device * memory.reserved_bytes),
        0,
    )
    return replace(memory, margin_bytes=margin)


def _eval_samples(context: PlanContext, candidate: Strategy) -> int | None:
    """Samples of an evaluation's batch; None where nothing is evaluated."""
    return candidate.per_device_eval_batch_size if context.recipe.evaluates else None


def _reserved_bytes(
    events: Sequence[memory_allocator.Event], config: memory_allocator.AllocatorConfig, room: int
) -> int:
    """What the allocator reserves for these events. Where it would like more than there is room
    for, it gives cached blocks back and tries again: what it has then, or, where that does not help
    either, what it would like."""
    free = memory_allocator.replay(events, config)
    if free.peak_reserved_bytes <= room:
        return free.peak_reserved_bytes
    pressed = memory_allocator.replay(events, config, capacity_bytes=max(room, 0))
    return free.peak_reserved_bytes if pressed.out_of_memory else pressed.peak_reserved_bytes


def _with_host(
    context: PlanContext,
    candidate: Strategy,
    memory: MemoryEstimate,
    trace: Trace | None,
    samples: int,
    exact: bool,
) -> MemoryEstimate:
    """With what the job takes of the host; without a trace, all but what a step takes on CPUs."""
    counts = samples, _eval_samples(context, candidate)
    sizes = (
        {section: peak.allocated_bytes for section, peak in trace.peaks(*counts).items()}
        if trace
        else {}
    )
    # also where nothing is evaluated: what an engine holds beside the states is known from it
    evaluated = (
        trace.peaks(samples, candidate.per_device_eval_batch_size).get("evaluation")
        if trace
        else None
    )
    written = {}
    # its bucket is as large as asked for, and filled as far as there are gradients
    if candidate.engine == "deepspeed":
        element_bytes = 4 if candidate.mixed_precision == "no" else 2
        filled = min(context.shape.trainable_parameters, sharding.BUCKET_ELEMENTS)
        written[sharding.BUCKET_ELEMENTS * element_bytes] = filled * element_bytes
    untouched = sum(size - touched for size, touched in written.items())
    first = next(iter(context.parameters.values()))
    holes = 0
    if candidate.device == "cpu" and exact and trace is not None:
        held = malloc.held_bytes(trace.events(*counts), written)
        holes = max(held - max(sizes.values()) + untouched, 0)
    job = host_memory.Job(
        recipe=context.recipe,
        strategy=candidate,
        shape=context.shape,
        states=memory,
        step_bytes=max(
            (size for section, size in sizes.items() if section != "evaluation"), default=0
        ),
        evaluation_bytes=evaluated.allocated_bytes if evaluated else 0,
        embedding_bytes=math.prod(first) * DTYPE_BYTES[context.recipe.model.dtype],
        untouched_bytes=untouched,
        reduced_bytes=sum(written.values()),
        holes_bytes=holes,
        rows=context.rows,
        cache_bytes=context.cache_bytes,
    )
    predicted = host_memory.estimate(job, context.imports)
    return replace(memory, host=predicted.by_cause, host_phase=predicted.phase)


def _update(whole: MemoryEstimate) -> WorkCost:
    """The optimizer step: norm, clipping and update read and write gradients, weights and states in
    a few kernels."""
    trained = whole.gradients_bytes
    moved = 2 * whole.optimizer_bytes + 2 * trained + 4 * trained
    return WorkCost(matmul_flops={}, bytes_moved=Affine(float(moved)), num_kernels=Affine(20.0))


def budget_bytes(recipe: Recipe, machine: Machine, candidate: Strategy) -> int:
    """What one rank may use of its device: a share of the smallest card's free memory, or its part
    of the host's."""
    if candidate.device == "cuda":
        free = min(gpu.free_bytes for gpu in machine.gpus[: candidate.processes_per_machine])
        return int(free * recipe.launch.vram_fraction)
    return host_budget_bytes(recipe, machine) // candidate.processes_per_machine


def host_budget_bytes(recipe: Recipe, machine: Machine) -> int:
    reserve = int(recipe.launch.host_reserve_gib * GIB)
    # a small container is not all reserve
    if "host_reserve_gib" not in recipe.launch.model_fields_set:
        reserve = min(reserve, machine.host_limit_bytes // 8)
    return max(machine.host_available_bytes - reserve, 0)


def _misses(
    context: PlanContext, candidate: Strategy, memory: MemoryEstimate, budget: int
) -> str | None:
    """Which budget is exceeded, with numbers; None when it fits."""
    ruled_out = context.oom_history.rules_out(
        "device", candidate, memory.device_bytes - memory.margin_bytes, memory
    )
    if ruled_out:
        return ruled_out
    if memory.device_bytes > budget and not context.assume_fits:
        if memory.peak is None:
            return f"model states {size(memory.model_state_bytes)} each, budget {size(budget)}"
        return f"{size(memory.device_bytes)} in {memory.peak.section}, budget {size(budget)}"
    return misses_host(context, candidate, memory)


def misses_host(context: PlanContext, candidate: Strategy, memory: MemoryEstimate) -> str | None:
    """Whether the machine's RAM is exceeded, with numbers; None when it is not."""
    host = host_budget_bytes(context.recipe, context.machine)
    needed = int(host_bytes(candidate, memory) * (1 + context.oom_history.host))
    ruled_out = context.oom_history.rules_out(
        "host", candidate, host_bytes(candidate, memory), memory
    )
    if ruled_out:
        return ruled_out
    if needed > host and not context.assume_fits:
        phase = f" in {memory.host_phase}" if memory.host_phase else ""
        available = size(context.machine.host_available_bytes)
        budget = f"{size(host)} ({available} available less launch.host_reserve_gib)"
        return f"{size(needed)} in host RAM{phase}, budget {budget}"
    return None


def host_bytes(candidate: Strategy, memory: MemoryEstimate) -> int:
    """What the job takes of a machine's RAM; where nothing better is known, what its ranks hold of
    the states there."""
    if memory.host_bytes:
        return memory.host_bytes
    of_rank = memory.offloaded_bytes + (memory.device_bytes if candidate.device == "cpu" else 0)
    return of_rank * candidate.processes_per_machine


def describe(candidate: Strategy) -> str:
    """A candidate in a few words: mode, ranks, batch, checkpointing."""
    words = (
        f"{candidate.mode} x{candidate.num_processes}, batch"
        f" {candidate.per_device_train_batch_size}"
    )
    words += f" x {candidate.gradient_accumulation_steps}"
    words += ", checkpointing" if candidate.activation_checkpointing else ""
    return words + (
        f", loss in {candidate.num_output_chunks} chunks" if candidate.num_output_chunks > 1 else ""
    )
