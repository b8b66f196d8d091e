"""The prediction for one candidate: bytes on the device and on the host, seconds per step. Values
in, values out.

The step's peak comes from its trace, what the allocator keeps on top of it from a replay, the rest
from constants with a source. A candidate whose step was not traced is judged by its model states
alone, and the plan says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from launch.base.text import size
from launch.data.token_cache import TokenCache
from launch.predict import load_order, sharding, target_counts
from launch.predict import parameters as predict_parameters
from launch.predict.history.calibration import NO_MARGIN, Margin
from launch.predict.memory import allocator as memory_allocator
from launch.predict.memory import context as memory_context
from launch.predict.memory import host_memory, malloc
from launch.predict.memory import phases as memory_phases
from launch.predict.memory.allocator_config import EXPANDABLE
from launch.predict.memory.largest_batches import LargestBatches
from launch.predict.oom_history import NO_OOM_HISTORY, OomHistory
from launch.predict.target_counts import MostTargets
from launch.predict.time import padding as time_padding
from launch.predict.time import rates, timing
from launch.predict.time.padding import StepSplit
from launch.predict.time.timing import Affine, StepWork, TimeEstimate, WorkCost
from launch.predict.traces import Question, Trace, Traces, with_targets
from launch.predict.trained_parameters import trainable_shapes
from launch.probe import architectures
from launch.probe.import_memory import ASSUMED, Imports
from launch.schema.machine import GIB, NOT_MEASURED, CardFigures, Link, Machine
from launch.schema.micro_batches import Division, LargestMicroBatches, MicroBatchSize
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.phases import DeviceMemory, DevicePhases, MemoryPhases
from launch.schema.plan import (
    MULTIPLE,
    PAGED,
    Change,
    DataFormat,
    MemoryEstimate,
    ModelSize,
    Padding,
    Peak,
    Strategy,
)
from launch.schema.recipe import Recipe

USUAL_DOCUMENT = 128  # tokens, assumed while none have been counted
# A communicator of two ranks, and of more: github.com/NVIDIA/nccl issue 964, A100.
NCCL_BYTES, NCCL_MORE_BYTES = 544 << 20, 688 << 20


WIDTH_NAMES = ("hidden_size", "n_embd", "d_model")  # of a config: features of a token
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers")
# For backward, without checkpointing: inputs of the norms, of attention's and of the MLP's products
KEPT_TENSORS_A_LAYER = 8
INSIDE_MLP = 2  # of them, that an MLP in parts does not keep

LEAST_LENGTH = 8  # tokens of a row that is worth a trace
MOST_ORDERED = 10_000_000  # rows of all epochs whose order is made while a plan waits, in seconds

NO_PHASES = MemoryPhases()


class TracedStep(NamedTuple):
    """A step that a peak may be of."""

    question: Question
    rows: int  # of its micro-batch
    sizes: tuple[MicroBatchSize, ...] = ()  # of the micro-batch, if they are known
    # of the run's first step, if its rows are no fraction of these: source and target differ
    first: Question | None = None


def _all_targets(batch: MicroBatchSize, flattens: bool) -> MicroBatchSize:
    return replace(batch, targets=batch.tokens if flattens else batch.rows * batch.target)


@dataclass(frozen=True)
class PlanContext:
    """The facts that all candidates of one recipe on one machine have in common."""

    recipe: Recipe
    machine: Machine
    model: ModelSize
    parameters: predict_parameters.Shapes
    full_copy: MemoryEstimate  # states of a full copy of the model
    data_format: DataFormat
    lora_targets: tuple[str, ...] = ()
    lengths: tuple[int, int] = (0, 0)  # of the longest source and target; (0, 0): max_length
    is_ragged: bool = True  # some row is shorter than the longest, so that a batch may be padded
    rows_of: int | None = None  # tokens of every row, if the plan is for such rows
    link: Link | None = None
    traces: Traces | None = None  # None: states only
    allocator: memory_allocator.AllocatorConfig = memory_allocator.TORCH_DEFAULTS
    may_expand: bool = False  # the cards can grow the allocator's segments, and the user names none
    import_memory: Imports = ASSUMED  # what the job's processes hold before there is a model
    base_fingerprint: str | None = None  # of the weights that an adapter is trained for
    changes: tuple[Change, ...] = ()  # values that the recipe replaced before planning
    rows: int | None = None  # of the training file
    tokens: TokenCache | None = None  # where the tokenised rows are, or will be
    cache_bytes: int | None = None  # of the tokenised rows; None: not there yet
    # of the tokenised training file, as tokenising wrote them
    counts: Mapping[str, Any] | None = None
    held_out_rows: int | None = None  # None: not counted yet
    eval_counts: Mapping[str, Any] | None = None  # of the tokenised held-out rows
    counts_targets: bool = True  # False: as if every position had a target
    largest_batches: LargestBatches | None = None  # None: the rows are not tokenised
    continues_another: bool = False  # with rows in another order than a run from the beginning
    error_margin: Margin = NO_MARGIN  # by which past predictions were exceeded
    oom_history: OomHistory = NO_OOM_HISTORY  # and that of this very run
    assume_fits: bool = False  # budgets do not count, only what ran out
    # the fastest strategy in real trials of a recipe on this machine
    recall: Callable[[ModelSize, Recipe], Strategy | None] = lambda model, recipe: None

    def allocator_settings(self, candidate: Strategy) -> str:
        """Settings that a plan adds to the allocator's. Micro-batches of many lengths, or of many
        numbers of targets, leave segments that no later step fits into, unless segments grow.
        Packed rows are padded to one length, unless they are flattened."""
        varies = self.is_ragged and (candidate.flattens or not self.recipe.data.packing)
        varies |= candidate.logits_at_targets and target_counts.vary(self.counts)
        is_added = self.may_expand and varies and candidate.device == "cuda"
        return EXPANDABLE if is_added else ""

    def evaluated_samples(self, candidate: Strategy) -> int:
        """Samples of the largest batch that a rank evaluates: there may be fewer held-out rows."""
        count = candidate.per_device_eval_batch_size
        if not self.held_out_rows:
            return count
        return min(count, -(-self.held_out_rows // candidate.num_processes))

    def question(self, candidate: Strategy) -> Question:
        multiple = MULTIPLE[candidate.device]
        max_length = self.recipe.data.max_length
        source, target = (
            -(-(length or max_length) // multiple) * multiple for length in self.lengths
        )
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
        """Documents of a row that attention gets one by one, up to the next power of two; 0 if it
        gets whole rows."""
        if not candidate.flattens:
            return 0
        if not self.recipe.data.packing:
            return 1
        mean = (
            self.counts["documents"] / self.counts["rows"]
            if self.counts
            else length / USUAL_DOCUMENT
        )
        return 1 << max(math.ceil(mean) - 1, 0).bit_length()

    def no_order(self, candidate: Strategy) -> str | None:
        """The reason why the micro-batches of the run are not known before it; None: they are."""
        data, training = self.recipe.data, self.recipe.training
        if data.streaming:
            return "a stream's rows are not counted"
        if self.counts is None or self.largest_batches is None:
            return "the rows are not tokenised yet"
        if self.traces is None:
            return "nothing is traced"
        if data.batch_by_tokens:
            return "data.batch_by_tokens divides each step by its own rows"
        if self.continues_another:
            return "a run that continues another has the rows that remain"
        epochs = training.num_train_epochs
        if training.max_steps > 0:
            epochs = training.max_steps * candidate.effective_batch_size / self.counts["rows"]
        if self.counts["rows"] * epochs > MOST_ORDERED:
            return f"an order of more than {MOST_ORDERED:,} rows is not made in advance"
        return self.largest_batches.failure

    def _divisions(self, candidate: Strategy) -> tuple[Division, list[Division]]:
        """The divisions of the rows of a training, and of evaluations with its batch and smaller
        ones, of which a plan may choose one."""
        assert self.counts is not None
        training, data = self.recipe.training, self.recipe.data
        epoch_steps = -(-self.counts["rows"] // candidate.effective_batch_size)
        num_steps = math.ceil(training.num_train_epochs * epoch_steps)
        trained = Division(
            "train",
            candidate.per_device_train_batch_size,
            candidate.gradient_accumulation_steps,
            candidate.num_processes,
            data.group_by_length,
            MULTIPLE[candidate.device],
            candidate.flattens,
            training.seed,
            training.max_steps if training.max_steps > 0 else num_steps,
        )
        evaluated = []
        count = candidate.per_device_eval_batch_size if self.eval_counts else 0
        while count:
            evaluated.append(
                replace(
                    trained,
                    part="validation",
                    micro_batch=count,
                    accumulation=1,
                    seed=0,
                    num_steps=0,
                )
            )
            count //= 2
        return trained, evaluated

    def order(self, candidates: Iterable[Strategy]) -> None:
        """Have the largest micro-batches of these candidates found, unless they are stored."""
        ordered = [each for each in candidates if self.no_order(each) is None]
        if not ordered:
            return
        assert self.largest_batches is not None
        divisions = (self._divisions(each) for each in ordered)
        self.largest_batches.fetch(
            each for trained, evaluated in divisions for each in (trained, *evaluated)
        )

    def _largest(self, candidate: Strategy) -> LargestMicroBatches:
        """The largest micro-batches of a training; without sizes if they are not known."""
        if self.no_order(candidate) is not None:
            return LargestMicroBatches()
        assert self.largest_batches is not None
        largest = self.largest_batches.get(self._divisions(candidate)[0])
        return largest or LargestMicroBatches()

    def _evaluated_sizes(self, candidate: Strategy) -> Mapping[int, Sequence[MicroBatchSize]]:
        """The largest micro-batches of its evaluations, by their rows."""
        if self.no_order(candidate) is not None:
            return {}
        assert self.largest_batches is not None
        sizes: dict[int, Sequence[MicroBatchSize]] = {}
        for division in self._divisions(candidate)[1]:
            largest = self.largest_batches.get(division)
            count = self.evaluated_samples(
                replace(candidate, per_device_eval_batch_size=division.micro_batch)
            )
            if largest:
                sizes[count] = largest.sizes
        return sizes

    def traced_steps(self, candidate: Strategy) -> list[TracedStep]:
        """All steps that the highest peak may be of. If the order of rows is known: of the
        micro-batch that takes most, and of the longest rows. Else of the longest rows.

        By tokens also the most rows that such a budget can hold, which are a whole step's.
        Between the two no part of a peak is higher than at one of them: at so many padded tokens
        what grows with them is the same, attention's squares fall with the length, what a row takes
        by itself grows with the rows."""
        question, rows = self.question(candidate), candidate.per_device_train_batch_size
        parts = candidate.gradient_accumulation_steps
        if sizes := self._largest(candidate).sizes:
            return self._steps_of(question, sizes)
        if not self.recipe.data.batch_by_tokens or parts == 1 or self.rows_of is not None:
            return [TracedStep(question, rows)]
        multiple = MULTIPLE[candidate.device]
        shorter = tuple(
            max(length // parts // multiple * multiple, LEAST_LENGTH) for length in question.lengths
        )
        most = min(
            rows * length // short for length, short in zip(question.lengths, shorter, strict=True)
        )
        most = max(min(most, rows * parts), 1)
        short = replace(question, lengths=shorter, is_padded=True)
        return [
            TracedStep(question, rows),
            TracedStep(
                replace(short, strategy=replace(candidate, per_device_train_batch_size=most)), most
            ),
        ]

    def _steps_of(self, question: Question, sizes: Sequence[MicroBatchSize]) -> list[TracedStep]:
        """The steps of the micro-batch that takes most by the trace of the longest rows, and of
        that with the longest rows."""
        candidate, multiple = question.strategy, MULTIPLE[question.strategy.device]
        if question.documents and self.recipe.data.packing:  # sequences of about one length
            return [TracedStep(question, candidate.per_device_train_batch_size, tuple(sizes))]
        rows = candidate.per_device_train_batch_size
        chosen = {max(sizes, key=lambda each: (each.source + each.target, each.rows, each.targets))}
        if (trace := self.trace(candidate)) is not None:
            batches = trace.targets.batches(rows)
            most = sizes[batches.index(trace.highest(batches))]
            chosen = {most} if candidate.flattens else {*chosen, most}
        steps = []
        for batch in chosen:
            lengths = batch.source, batch.target
            if candidate.flattens:
                mean = -(-batch.tokens // batch.rows // multiple) * multiple
                lengths = mean, mean
            strategy = replace(candidate, per_device_train_batch_size=batch.rows)
            asked = replace(question, strategy=strategy, lengths=lengths)
            steps.append(TracedStep(asked, batch.rows, (batch,), self._first(candidate, asked)))
        return steps

    def _first(self, candidate: Strategy, question: Question) -> Question | None:
        """The run's first step in rows of its own lengths, of an encoder-decoder."""
        sizes = self._largest(candidate).first_step
        if not self.model.is_encoder_decoder or not sizes:
            return None
        largest = max(sizes, key=lambda each: each.rows * (each.source + each.target))
        return replace(question, lengths=(largest.source, largest.target))

    def fetch(self, candidates: Iterable[Strategy]) -> None:
        """Have the steps of these candidates traced, of the longest rows, unless their traces are
        stored, and their largest micro-batches found."""
        candidates = list(candidates)
        self.order(candidates)
        self.fetch_steps(self.question(candidate) for candidate in candidates)

    def fetch_steps(self, questions: Iterable[Question]) -> None:
        if self.traces is not None:
            self.traces.fetch(list(questions))

    def asking(self) -> AbstractContextManager[Traces | None]:
        """Hold the tracing child while steps are traced; end it afterwards."""
        return closing(self.traces) if self.traces is not None else nullcontext()

    def trace(self, candidate: Strategy) -> Trace | None:
        """The trace of a step of the longest rows, if it is stored."""
        question = self.question(candidate)
        trace = self.traces.get(question) if self.traces is not None else None
        if trace is None:
            return None
        return with_targets(
            trace, self.most_targets(candidate), self._evaluated_targets(candidate, question)
        )

    def trace_of(self, step: TracedStep, candidate: Strategy) -> Trace | None:
        """The trace of one of the candidate's steps, if it is stored."""
        trace = self.traces.get(step.question) if self.traces is not None else None
        if trace is None:
            return None
        largest = self._largest(candidate)
        sizes = {step.rows: step.sizes} if step.sizes else {}
        most = self._targets(step.question, self.counts, sizes, largest.first_step)
        trace = with_targets(trace, most, self._evaluated_targets(candidate, step.question))
        first = self.traces.get(step.first) if self.traces is not None and step.first else None
        if first is None or step.first is None:
            return trace
        most = self._targets(step.first, self.counts, {}, largest.first_step)
        return replace(trace, first=with_targets(first, most))

    def most_targets(self, candidate: Strategy) -> MostTargets:
        """The largest training micro-batches."""
        largest = self._largest(candidate)
        rows = candidate.per_device_train_batch_size
        sizes = {rows: largest.sizes} if largest.sizes else {}
        return self._targets(self.question(candidate), self.counts, sizes, largest.first_step)

    def _evaluated_targets(self, candidate: Strategy, question: Question) -> MostTargets:
        return self._targets(question, self.eval_counts, self._evaluated_sizes(candidate))

    def _targets(
        self,
        question: Question,
        counts: Mapping[str, Any] | None,
        sizes: Mapping[int, Sequence[MicroBatchSize]],
        first_step: Sequence[MicroBatchSize] = (),
    ) -> MostTargets:
        """Micro-batches with these counts and sizes, as far as they are known, in rows of a
        question's lengths."""
        (source, target), strategy = question.lengths, question.strategy
        if not self.counts_targets:
            flat = bool(question.documents)
            sizes = {rows: [_all_targets(each, flat) for each in of] for rows, of in sizes.items()}
            first_step = [_all_targets(each, flat) for each in first_step]
        largest = counts["most_targets"] if counts and self.counts_targets else ()
        parts, flattens = strategy.num_output_chunks, bool(question.documents)
        return MostTargets(target, tuple(largest), parts, source, flattens, sizes, first_step)

    def mean_targets(self, candidate: Strategy, micro_steps: float) -> float | None:
        """The mean number of targets of a rank's micro-batch; None until the rows are tokenised."""
        if self.counts is None or not self.counts_targets:
            return None
        of_step = (
            candidate.effective_batch_size * self.counts["target_tokens"] / self.counts["rows"]
        )
        return of_step / candidate.num_processes / micro_steps

    def padding(self, candidate: Strategy) -> Padding | None:
        """The padding of a step; None until the rows are tokenised."""
        if self.counts is None:
            return None
        lengths = self.question(candidate).lengths
        return time_padding.of(
            self.counts, candidate, MULTIPLE[candidate.device], self.recipe.data, lengths
        )

    def mean_split(self, candidate: Strategy) -> StepSplit | None:
        """The mean split of a step, in rows as long as the longest; None until the rows are
        tokenised, and where they are packed and fill it."""
        if self.counts is None or self.recipe.data.packing:
            return None
        lengths = self.question(candidate).lengths
        return time_padding.mean_split(
            self.counts, candidate, MULTIPLE[candidate.device], self.recipe.data, lengths
        )


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
    element_bytes = 4 if candidate.mixed_precision == "no" else 2
    share = candidate.checkpointed_share
    on_device = 0 if candidate.activation_offloading else share
    stored = KEPT_TENSORS_A_LAYER - (candidate.tiled_mlp_num_shards > 1) * INSIDE_MLP
    tensors = on_device + (1 - share) * stored
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
        steps = context.traced_steps(candidate)
        context.fetch_steps(
            question for step in steps for question in (step.question, step.first) if question
        )
        traces = [(context.trace_of(step, candidate), step.rows) for step in steps]
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
    budget = budget_bytes(context, candidate)
    of_host = host_bytes(candidate, memory) / max(
        host_budget_bytes(context.recipe, context.machine), 1
    )
    excess = max(memory.device_bytes / max(budget, 1), of_host)
    return Judged(
        candidate, memory, time, budget, _misses(context, candidate, memory, budget), excess
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
            budget_bytes(context, candidate),
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
        available_bytes = budget_bytes(context, candidate) - outside
        assert memory.peak is not None
        paged = memory.peak.parts.get(PAGED, 0)
        expands = context.allocator.expandable_segments or bool(
            context.allocator_settings(candidate)
        )
        config = replace(context.allocator, expandable_segments=expands)
        replays = memory_phases.replays(parts, config, available_bytes - paged)
        until_step = replays[: [phase for phase, _ in parts].index("step") + 1]
        memory = _in_blocks(memory, replays, until_step, paged)
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
    sizes = (
        {section: peak.allocated_bytes for section, peak in trace.peaks(*counts).items()}
        if trace
        else {}
    )
    # also where nothing is evaluated: what an engine holds beside the states is known from it
    evaluated = (
        trace.peaks(num_samples, context.evaluated_samples(candidate)).get("evaluation")
        if trace
        else None
    )
    written = {}
    # its bucket is as large as asked for, and filled as far as there are gradients
    if candidate.launch_mode.engine == "deepspeed":
        element_bytes = 4 if candidate.mixed_precision == "no" else 2
        filled = min(context.model.trainable_parameters, sharding.BUCKET_ELEMENTS)
        written[sharding.BUCKET_ELEMENTS * element_bytes] = filled * element_bytes
    untouched = sum(size - touched for size, touched in written.items())
    first = next(iter(context.parameters.values()))
    step_bytes = max(
        (size for section, size in sizes.items() if section != "evaluation"), default=0
    )
    first_bytes, holes, first_holes = step_bytes, 0, 0
    if candidate.device == "cpu" and parts and trace is not None:
        resident_bytes = malloc.resident_bytes(trace.events(*counts), written)
        holes = first_holes = max(resident_bytes - max(sizes.values()) + untouched, 0)
        begins = [part for part in parts if part[0] in ("load", "first_step")]
        if len(begins) == 2:
            first_bytes = memory_phases.allocated_bytes(begins)["first_step"]
            resident_bytes = malloc.resident_bytes(
                [event for _, events in begins for event in events], written, rounds=1
            )
            first_holes = max(resident_bytes - first_bytes + untouched, 0)
    job = host_memory.Job(
        recipe=context.recipe,
        strategy=candidate,
        model=context.model,
        states=memory,
        step_bytes=step_bytes,
        first_step_bytes=first_bytes,
        evaluation_bytes=evaluated.allocated_bytes if evaluated else 0,
        embedding_bytes=math.prod(first) * DTYPE_BYTES[context.recipe.model.dtype],
        untouched_bytes=untouched,
        reduced_bytes=sum(written.values()),
        offloaded_activations=[
            math.ceil(size.total(num_samples)) for size in (trace.work.offloaded if trace else ())
        ],
        holes_bytes=holes,
        first_holes_bytes=first_holes,
        trained_elements=[
            math.prod(sides)
            for sides in trainable_shapes(
                context.parameters,
                context.recipe.model.freeze,
                context.recipe.lora,
                context.model.family,
            ).values()
        ],
        rows=context.rows,
        cache_bytes=context.cache_bytes,
    )
    predicted = host_memory.estimate(job, context.import_memory)
    memory = replace(
        memory,
        host=predicted.by_cause,
        host_phase=predicted.phase,
        pinned_bytes=host_memory.pinned_bytes(job),
    )
    return memory, predicted.by_phase


def _update(full_copy: MemoryEstimate) -> WorkCost:
    """The optimizer step: norm, clipping and update read and write gradients, weights and states in
    a few kernels."""
    trained = full_copy.gradients_bytes
    moved = 2 * full_copy.optimizer_bytes + 2 * trained + 4 * trained
    return WorkCost(matmul_flops={}, bytes_moved=Affine(float(moved)), num_kernels=Affine(20.0))


def budget_bytes(context: PlanContext, candidate: Strategy) -> int:
    """The budget of one rank on its device: a share of the smallest card's free memory, at most the
    user's per_process_memory_fraction; or its part of the host's."""
    recipe, machine = context.recipe, context.machine
    if candidate.device == "cpu":
        return host_budget_bytes(recipe, machine) // candidate.processes_per_machine
    cards = machine.gpus[: candidate.processes_per_machine]
    budget = int(min(gpu.free_bytes for gpu in cards) * recipe.launch.vram_fraction)
    share = context.allocator.per_process_memory_fraction
    if share == 1.0:
        return budget
    # of the allocator alone, on each card
    allowed = int(share * min(gpu.total_bytes for gpu in cards))
    of_context, _ = memory_context.context_bytes(cards[0], context.import_memory.card)
    return min(budget, allowed + of_context)


def host_budget_bytes(recipe: Recipe, machine: Machine) -> int:
    reserve = int(recipe.launch.host_reserve_gib * GIB)
    # a small container is not all reserve
    if "host_reserve_gib" not in recipe.launch.model_fields_set:
        reserve = min(reserve, machine.host_limit_bytes // 8)
    return max(machine.host_available_bytes - reserve, 0)


def _misses(
    context: PlanContext, candidate: Strategy, memory: MemoryEstimate, budget: int
) -> str | None:
    """The budget that is exceeded, with numbers; None when it fits."""
    if ruled_out := context.oom_history.rules_out(
        "device", candidate, memory.device_bytes - memory.margin_bytes, memory
    ):
        return ruled_out
    if memory.device_bytes > budget and not context.assume_fits:
        if memory.peak is None:
            return f"model states {size(memory.model_state_bytes)} each, budget {size(budget)}"
        return f"{size(memory.device_bytes)} in {memory.peak.section}, budget {size(budget)}"
    return misses_host(context, candidate, memory)


def missing_bytes(context: PlanContext, judged: Judged) -> int:
    """The bytes by which a prediction exceeds the memory that its rows are in; what else it
    exceeds counts as infinitely many."""
    candidate, memory = judged.candidate, judged.memory
    if candidate.device == "cpu":
        budget = host_budget_bytes(context.recipe, context.machine)
        return (host_bytes(candidate, memory) - budget) // candidate.processes_per_machine
    if misses_host(context, candidate, memory):
        return sys.maxsize
    return memory.device_bytes - judged.budget_bytes


def misses_host(context: PlanContext, candidate: Strategy, memory: MemoryEstimate) -> str | None:
    """The excess of the machine's RAM, with numbers; None when it fits."""
    budget = host_budget_bytes(context.recipe, context.machine)
    predicted = host_bytes(candidate, memory)
    if ruled_out := context.oom_history.rules_out("host", candidate, predicted, memory):
        return ruled_out
    needed = int(predicted * (1 + context.oom_history.host))
    if needed <= budget or context.assume_fits:
        return None
    phase = f" in {memory.host_phase}" if memory.host_phase else ""
    available = size(context.machine.host_available_bytes)
    return (
        f"{size(needed)} in host RAM{phase}, budget {size(budget)} ({available} available less"
        " launch.host_reserve_gib)"
    )


def host_bytes(candidate: Strategy, memory: MemoryEstimate) -> int:
    """Bytes of a machine's RAM that the job takes; if they are not predicted, those of the states
    that its ranks hold there."""
    if memory.host_bytes:
        return memory.host_bytes
    of_rank = memory.offloaded_bytes + (memory.device_bytes if candidate.device == "cpu" else 0)
    return of_rank * candidate.processes_per_machine


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
