"""The facts that all candidates of a plan have in common, and what follows from them for one: its
largest micro-batches, its trace, its padding."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from launch.data.token_cache import TokenCache
from launch.data.worker import WORKER, Worker
from launch.predict import parameters as predict_parameters
from launch.predict import target_counts
from launch.predict.history.calibration import NO_MARGIN, Margin
from launch.predict.memory.allocator_config import EXPANDABLE, TORCH_DEFAULTS, AllocatorConfig
from launch.predict.memory.largest_batches import LargestBatches
from launch.predict.memory.stored_weights import StoredWeights
from launch.predict.oom_history import NO_OOM_HISTORY, OomHistory
from launch.predict.step.streamed import LayerWeights, Streamed, frozen_layers, streamed
from launch.predict.target_counts import MostTargets
from launch.predict.time import padding as time_padding
from launch.predict.time.padding import StepSplit
from launch.predict.traces import Trace, Traces, with_targets
from launch.probe import architectures
from launch.probe.import_memory import ASSUMED, Imports
from launch.schema.levers import Levers
from launch.schema.machine import Link, Machine
from launch.schema.modes import Mode
from launch.schema.plan import (
    MULTIPLE,
    NOT_CORRECTED,
    Change,
    DataFormat,
    MemoryEstimate,
    ModelSize,
    Padding,
    SecondsCorrection,
    Strategy,
)
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Question
from launch.schema.rows import Division, LargestMicroBatches, MicroBatchSize

_USUAL_DOCUMENT = 128  # tokens, assumed while none have been counted
_FEW_SHAPES = 8  # plans that cuDNN's attention may compile
_MOST_ORDERED = 10_000_000  # rows of all epochs whose order is made while a plan waits, in seconds


@dataclass(frozen=True)
class Model:
    """The model that a recipe trains."""

    size: ModelSize
    parameters: predict_parameters.Shapes
    full_copy: MemoryEstimate  # states of a full copy
    lora_targets: tuple[str, ...] = ()
    stored: StoredWeights | None = None  # None: it begins with random weights
    base_fingerprint: str | None = None  # fingerprint of the weights that an adapter is trained for


@dataclass(frozen=True)
class Rows:
    """The rows that it is trained on."""

    format: DataFormat
    lengths: tuple[int, int] = (0, 0)  # tokens of the longest source and target; (0, 0): max_length
    is_ragged: bool = True  # some row is shorter than the longest, so that a batch may be padded
    rows_of: int | None = None  # tokens of every row, if the plan is for such rows
    tokens: TokenCache | None = None  # cache of the tokenised rows, which may not be written yet
    # counts of the tokenised training file and of the held-out rows, as tokenising wrote them
    counts: Mapping[str, Any] | None = None
    eval_counts: Mapping[str, Any] | None = None
    held_out: int | None = None  # rows; None: there are none, or they are not counted yet
    counts_targets: bool = True  # False: as if every position had a target
    largest_batches: LargestBatches | None = None  # None: the rows are not tokenised

    @property
    def count(self) -> int | None:
        """The number of training rows; None: not known without tokenising."""
        return self.tokens.rows if self.tokens else None

    def evaluated_samples(self, candidate: Strategy) -> int:
        """Samples of the largest batch that a rank evaluates: there may be fewer held-out rows."""
        count = candidate.per_device_eval_batch_size
        return min(count, -(-self.held_out // candidate.num_processes)) if self.held_out else count


@dataclass(frozen=True)
class Installed:
    """Packages, kernels and links of the machine, and what was measured of them."""

    link: Link | None = None  # result of the test of this machine's GPUs
    allocator: AllocatorConfig = TORCH_DEFAULTS
    may_expand: bool = False  # the cards can grow the allocator's segments, and the user names none
    import_memory: Imports = ASSUMED  # memory of the job's processes before there is a model
    has_deepspeed: bool = True  # the package is installed
    # why that package cannot be used; "": the machine's packages are not known
    no_compiler: str | None = ""  # why torch.compile cannot work here, in the same way
    no_flash_attn: str | None = ""
    no_varlen_attn: str | None = ""  # why torch's cannot be used; "": its version is not known
    no_liger: str | None = ""  # the same of liger-kernel
    # why transformers can neither checkpoint every n-th layer here nor offload what it keeps
    no_every_n_layers: str | None = None


@dataclass(frozen=True)
class Wishes:
    """Requests of the command line and of a launcher above, beside the recipe."""

    num_processes: int | None = None
    num_machines: int = 1
    mode: Mode | None = None  # mode of DeepSpeed or FSDP2 that the launcher above has chosen
    force_cpu: bool = False
    force_gloo: bool = False  # ACCELERATE_USE_GLOO=1
    free_batch: bool = False  # any split of the effective batch will do
    wants_tuned: bool = False  # no batch was typed: the result of an earlier tuning is used
    assume_fits: bool = False  # budgets do not count, only what ran out


@dataclass(frozen=True)
class History:
    """Results of earlier attempts, runs and trials on this machine."""

    # shortages by which an attempt of this run has refuted its plan
    oom: OomHistory = NO_OOM_HISTORY
    error_margin: Margin = NO_MARGIN  # share by which past predictions were exceeded
    # its rows come in another order than in a run from the beginning
    continues_another: bool = False
    tuned: Strategy | None = None  # the fastest in short trials
    # correction of a strategy's seconds, by the share of them in which its device waits for its
    # host
    correction: Callable[[Strategy, float], SecondsCorrection] = lambda *_: NOT_CORRECTED
    began_with: Levers | None = None  # the levers of the run that goes on
    # the fastest strategy in real trials of a recipe
    recall: Callable[[ModelSize, Recipe], Strategy | None] = lambda model, recipe: None


@dataclass(frozen=True)
class Limits:
    """Other runs and keys that limit the machine's memory, which is counted without theirs."""

    notes: tuple[str, ...] = ()  # lines of the plan
    beside: tuple[int, ...] = ()  # numbers of the leases


@dataclass(frozen=True)
class Facts:
    """The facts that all candidates of one recipe on one machine have in common."""

    recipe: Recipe
    machine: Machine
    model: Model
    rows: Rows
    installed: Installed = Installed()
    wishes: Wishes = Wishes()
    history: History = History()
    limits: Limits = Limits()
    traces: Traces | None = None  # None: states only
    changes: tuple[Change, ...] = ()  # values that the recipe replaced before planning

    @cached_property
    def frozen_layers(self) -> list[LayerWeights]:
        """The frozen weights of each layer, where they may be streamed."""
        return frozen_layers(self.recipe, self.model.parameters, self.model.size.family)

    def streamed(self, candidate: Strategy) -> Streamed:
        """The layers that a candidate streams."""
        return streamed(self.frozen_layers, candidate.levers)

    def allocator_settings(self, candidate: Strategy) -> str:
        """Settings that a plan adds to the allocator's. Micro-batches of many lengths, or of many
        numbers of targets, leave segments that no later step fits into, unless segments grow.
        Packed rows are padded to one length, unless they are flattened."""
        varies = self.rows.is_ragged and (candidate.levers.flattens or not self.recipe.data.packing)
        varies |= candidate.levers.logits_at_targets and target_counts.vary(self.rows.counts)
        is_added = self.installed.may_expand and varies and candidate.device == "cuda"
        return EXPANDABLE if is_added else ""

    def question(self, candidate: Strategy) -> Question:
        multiple = MULTIPLE[candidate.device]
        source, target = (
            -(-(length or self.recipe.data.max_length) // multiple) * multiple
            for length in self.rows.lengths
        )
        # The length is rounded up to the multiple, or nothing is known of the rows
        rounds_up = self.rows.lengths[0] != source
        is_padded = (
            rounds_up
            or (self.rows.is_ragged and candidate.per_device_train_batch_size > 1)
            or self.recipe.data.packing  # masks keep documents apart
        )
        if candidate.device == "cpu":
            return Question(candidate, (source, target), is_padded)
        card = self.machine.gpus[0]
        return Question(
            candidate,
            (source, target),
            is_padded,
            card.architecture,
            fused_attention=architectures.look_up(card).attention != "math",
            documents=self._documents(candidate, source),
            few_shapes=self.few_shapes,
        )

    def _documents(self, candidate: Strategy, length: int) -> int:
        """Documents of a row that attention gets one by one, up to the next power of two; 0 if it
        gets whole rows."""
        if not candidate.levers.flattens:
            return 0
        if not self.recipe.data.packing:
            return 1
        mean = (
            self.rows.counts["documents"] / self.rows.counts["rows"]
            if self.rows.counts
            else length / _USUAL_DOCUMENT
        )
        return 1 << max(math.ceil(mean) - 1, 0).bit_length()

    def no_order(self, candidate: Strategy) -> str | None:
        """The reason why the micro-batches of the run are not known before it; None: they are."""
        training = self.recipe.training
        counts, batches = self.rows.counts, self.rows.largest_batches
        num_rows = counts["rows"] * training.num_train_epochs if counts else 0
        if training.max_steps > 0:
            num_rows = training.max_steps * candidate.effective_batch_size
        obstacles = (
            (self.recipe.data.streaming, "a stream's rows are not counted"),
            (counts is None or batches is None, "the rows are not tokenised yet"),
            (self.traces is None, "nothing is traced"),
            (
                candidate.levers.batch_by_tokens,
                "data.batch_by_tokens divides each step by its own rows",
            ),
            (
                self.history.continues_another,
                "a run that continues another has the rows that remain",
            ),
            (
                num_rows > _MOST_ORDERED,
                f"an order of more than {_MOST_ORDERED:,} rows is not made in advance",
            ),
        )
        obstacle = next((text for is_met, text in obstacles if is_met), None)
        return obstacle or (batches.failure if batches is not None else None)

    @property
    def has_one_length(self) -> bool:
        """True if no row is padded beside another, and each is a document."""
        return not (self.rows.is_ragged or self.recipe.data.packing)

    @property
    def few_shapes(self) -> bool:
        """True if micro-batches have few shapes: packed rows, and rows of about one length. Not of
        an encoder with a decoder, whose targets have lengths of their own."""
        if self.model.size.is_encoder_decoder:
            return False
        if self.recipe.data.packing or self.has_one_length:
            return True
        if self.rows.counts is None:
            return False
        spread = self.rows.lengths[0] - self.rows.counts.get("shortest_input", 0)
        return spread < _FEW_SHAPES * MULTIPLE["cuda"]

    def num_steps(self, candidate: Strategy) -> int:
        """Optimizer steps of the training; 0 while its rows are not counted."""
        training, counts = self.recipe.training, self.rows.counts
        if training.max_steps > 0 or not counts:
            return max(training.max_steps, 0)
        return math.ceil(
            training.num_train_epochs * -(-counts["rows"] // candidate.effective_batch_size)
        )

    def _divisions(self, candidate: Strategy) -> list[Division]:
        """The divisions of the rows of a training, and of evaluations with its batch and smaller
        ones, of which a plan may choose one; none if the order of rows is not known."""
        if self.no_order(candidate) is not None:
            return []
        training, data = self.recipe.training, self.recipe.data
        trained = Division(
            "train",
            candidate.per_device_train_batch_size,
            candidate.gradient_accumulation_steps,
            candidate.num_processes,
            data.group_by_length,
            MULTIPLE[candidate.device],
            candidate.levers.flattens,
            training.seed,
            self.num_steps(candidate),
        )
        evaluated = replace(trained, part="validation", accumulation=1, seed=0, num_steps=0)
        count = candidate.per_device_eval_batch_size if self.rows.eval_counts else 0
        halves = (count >> times for times in range(count.bit_length()))
        return [trained, *(replace(evaluated, micro_batch=half) for half in halves)]

    def order(self, candidates: Iterable[Strategy]) -> None:
        """Have the largest micro-batches of these candidates found, unless they are stored."""
        divisions = [division for each in candidates for division in self._divisions(each)]
        if self.rows.largest_batches is not None:
            self.rows.largest_batches.fetch(divisions)

    def largest(self, candidate: Strategy) -> LargestMicroBatches:
        """The largest micro-batches of a training; without sizes if they are not known."""
        divisions, batches = self._divisions(candidate), self.rows.largest_batches
        stored = batches.get(divisions[0]) if divisions and batches is not None else None
        largest = stored or LargestMicroBatches()
        return LargestMicroBatches(
            self._counted(candidate, largest.sizes), self._counted(candidate, largest.first_step)
        )

    def _counted(
        self, candidate: Strategy, sizes: Sequence[MicroBatchSize]
    ) -> list[MicroBatchSize]:
        """Micro-batches with the targets that count."""
        if self.rows.counts_targets:
            return [*sizes]
        return [
            replace(
                each,
                targets=each.tokens if candidate.levers.flattens else each.rows * each.target,
            )
            for each in sizes
        ]

    def _evaluated_sizes(self, candidate: Strategy) -> Mapping[int, Sequence[MicroBatchSize]]:
        """The largest micro-batches of its evaluations, by their rows."""
        sizes: dict[int, Sequence[MicroBatchSize]] = {}
        for division in self._divisions(candidate)[1:]:
            assert self.rows.largest_batches is not None
            if largest := self.rows.largest_batches.get(division):
                of_batch = replace(candidate, per_device_eval_batch_size=division.micro_batch)
                count = self.rows.evaluated_samples(of_batch)
                sizes[count] = self._counted(candidate, largest.sizes)
        return sizes

    def fetch(self, candidates: Sequence[Strategy]) -> None:
        """Have the steps of these candidates traced, of the longest rows, unless their traces are
        stored, and their largest micro-batches found."""
        self.order(candidates)
        self.fetch_steps(self.question(candidate) for candidate in candidates)

    def fetch_steps(self, questions: Iterable[Question]) -> None:
        if self.traces is not None:
            self.traces.fetch(list(questions))

    def asking(self) -> Worker:
        """Keep the child with torch while a plan is made; end it afterwards."""
        return WORKER

    def trace(self, candidate: Strategy) -> Trace | None:
        """The trace of a step of the longest rows, if it is stored."""
        question = self.question(candidate)
        trace = self.traces.get(question) if self.traces is not None else None
        return trace and self._of_rows(trace, candidate, question)

    def price(self, candidate: Strategy) -> Trace | None:
        """The work of such a step, and what it holds at least, by the steps that are recorded so
        far; None where nothing is known of it."""
        question = self.question(candidate)
        price = self.traces.price(question) if self.traces is not None else None
        return price and self._of_rows(price, candidate, question)

    def _of_rows(self, trace: Trace, candidate: Strategy, question: Question) -> Trace:
        return with_targets(
            trace, self.most_targets(candidate), self.evaluated_targets(candidate, question)
        )

    def most_targets(self, candidate: Strategy) -> MostTargets:
        """The largest training micro-batches."""
        largest = self.largest(candidate)
        sizes = {candidate.per_device_train_batch_size: largest.sizes} if largest.sizes else {}
        return self.targets(self.question(candidate), self.rows.counts, sizes, largest.first_step)

    def evaluated_targets(self, candidate: Strategy, question: Question) -> MostTargets:
        return self.targets(question, self.rows.eval_counts, self._evaluated_sizes(candidate))

    def targets(
        self,
        question: Question,
        counts: Mapping[str, Any] | None,
        sizes: Mapping[int, Sequence[MicroBatchSize]],
        first_step: Sequence[MicroBatchSize] = (),
    ) -> MostTargets:
        """Micro-batches with these counts and sizes, as far as they are known, in rows of a
        question's lengths."""
        (source, target), strategy = question.lengths, question.strategy
        largest = counts["most_targets"] if counts and self.rows.counts_targets else ()
        parts, flattens = strategy.levers.num_output_chunks, bool(question.documents)
        return MostTargets(target, tuple(largest), parts, source, flattens, sizes, first_step)

    def mean_targets(self, candidate: Strategy, micro_steps: float) -> float | None:
        """The mean number of targets of a rank's micro-batch; None until the rows are tokenised."""
        if self.rows.counts is None or not self.rows.counts_targets:
            return None
        of_step = (
            candidate.effective_batch_size
            * self.rows.counts["target_tokens"]
            / self.rows.counts["rows"]
        )
        return of_step / candidate.num_processes / micro_steps

    def padding(self, candidate: Strategy) -> Padding | None:
        """The padding of a step; None until the rows are tokenised."""
        if self.rows.counts is None:
            return None
        return time_padding.compute(
            self.rows.counts,
            candidate,
            MULTIPLE[candidate.device],
            self.recipe.data,
            self.question(candidate).lengths,
        )

    def mean_split(self, candidate: Strategy) -> StepSplit | None:
        """The mean split of a step, in rows as long as the longest; None until the rows are
        tokenised, and where they are packed and fill it."""
        if self.rows.counts is None or self.recipe.data.packing:
            return None
        return time_padding.mean_split(
            self.rows.counts,
            candidate,
            MULTIPLE[candidate.device],
            self.recipe.data,
            self.question(candidate).lengths,
        )
