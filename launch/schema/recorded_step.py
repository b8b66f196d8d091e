"""A training step of one process, as training.trace records it: every storage that is born and
dies, and every operator that is called, each in its phase and layer.

Every size is split into a part that grows with the batch, a part that grows with its targets and a
fixed part: the numbers of recorded samples and targets are primes, so a size that one of them
divides is a number of bytes per sample, or per target. Pure."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

from launch.schema.plan import Strategy

STEP = ".step"  # suffix of the files of recorded steps
BATCH = 1009  # a prime that divides no usual width, vocabulary or length
TARGETS = 100_003  # another, of each part in which the logits are made
# Several parts: their number, the targets of the smaller last part, the targets of all parts
PARTS, _LAST_TARGETS, ALL_TARGETS = 4, 100_001, 400_010
UNITS = 4  # units of a shortened stack: first, two alike, last, which may have fewer layers
LOSS = -1  # stands for a stack: the parts of the logits are its layers
# ops of blocks: of one without bytes, from which on the optimizer steps; of a weight that is
# trained, of another weight, and of a weight that a step does not use: the original beside a copy
# of LoRA's modules_to_save; of a weight of 4 bits, and of its scales
UPDATE = "update"
TRAINED, FROZEN, UNUSED = "parameter", "frozen parameter", "unused parameter"
PACKED, SCALES = "packed parameter", "scales"
SLOT = "slot of streamed weights"  # the device holds the weights of streamed layers there
Layer = tuple[int, int]  # (stack, index in it)
Parts = tuple[float, float, float, float]
Runs = Sequence[tuple[int, int]]  # (number of a run, times that it is repeated)
# differences between the tensors of a kernel without products: dtype alone, shape, strides. A list:
# tensors of one layer in a kernel on lists of tensors, whose launch is another operator
Form = Literal["", "cast", "broadcast", "strided", "list"]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Question:
    """One step to trace. Lengths are tokens of a padded row (of source and target)."""

    strategy: Strategy
    lengths: tuple[int, int]
    is_padded: bool = True  # some row of a batch is shorter, so that masks are needed
    architecture: str = ""  # the GPU whose kernels run; "" on a CPU
    fused_attention: bool = True  # the GPU has kernels for it
    documents: int = 0  # documents in a row, if rows are flattened for attention; else 0
    few_shapes: bool = False  # micro-batches have, for which cuDNN's attention may come first
    parts_apart: bool = False  # for compose: the parts of the logits are told apart
    all_layers: bool = False  # every layer is recorded, though many may be alike

    @property
    def is_single(self) -> bool:
        """One sample is traced for itself: copies that a larger batch needs are views there.
        Flattened rows are always a single one."""
        return self.strategy.per_device_train_batch_size == 1 and not self.documents

    @property
    def accumulates(self) -> bool:
        return self.strategy.gradient_accumulation_steps > 1

    @property
    def loss_parts(self) -> int:
        """The parts of the logits, as many as the step has; 0: it may be composed of any number."""
        return 0 if self.parts_apart else self.strategy.levers.num_output_chunks

    @property
    def cast(self) -> str:
        """The engine that casts the whole model; "": none does."""
        mode = self.strategy.launch_mode
        is_cast = not mode.is_whole and self.strategy.mixed_precision != "no"
        return mode.engine if is_cast else ""


@dataclass(frozen=True)
class Sum:
    """A kernel's sum over rows, whose buffer is launch.predict.memory.partial_sums' bytes."""

    fixed_rows: int
    # rows are fixed_rows + batch * sample_rows + targets * target_rows
    sample_rows: int
    target_rows: int
    columns: int
    multiprocessors: int
    threads: int  # most threads that a multiprocessor runs at once


@dataclass(slots=True)
class Block:
    """One storage. Its size at batch b with t targets in each part of the logits is fixed_bytes
    + b * sample_bytes + t * target_bytes, unless it is the buffer of a sum."""

    fixed_bytes: int
    sample_bytes: int
    kind: str  # "": decided from its phases (launch.predict.step.reduced)
    op: str
    born: str  # phase
    layer: Layer | None
    stream: int = 0  # stream on which it is made; others than 0 are an engine's own
    sum: Sum | None = None
    target_bytes: int = 0
    document_bytes: int = 0  # per sample, of each document in its row but the first
    all_target_bytes: int = 0  # per target of all parts of the logits, before a step is composed

    def of_layer(self, layer: Layer | None) -> "Block":
        """A copy in another layer."""
        fixed = self.fixed_bytes, self.sample_bytes, self.kind, self.op, self.born
        of_rows = self.target_bytes, self.document_bytes, self.all_target_bytes
        return Block(*fixed, layer, self.stream, self.sum, *of_rows)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.fixed_bytes, self.sample_bytes, self.target_bytes

    @property
    def is_fixed(self) -> bool:
        return not (self.sample_bytes or self.target_bytes)


@dataclass(slots=True)
class Event:
    """The birth or death of a block."""

    block: int
    birth: bool
    phase: str
    layer: Layer | None


@dataclass(frozen=True)
class Operator:
    """The work of a call of an operator. FLOPs and bytes are (fixed, per sample, per target of a
    part of the logits, per target of all parts)."""

    name: str
    # a product, fused attention, another kernel, a view or a new block, for which no kernel runs, a
    # value that the host waits for, a copy to the host of what backward needs, a module's call
    kind: Literal["product", "attention", "other", "view", "wait", "offload", "module"]
    dtype: str = ""  # dtype of its result; a product in 16 bits names its alignment too
    flops: Parts = (0, 0, 0, 0)
    bytes: Parts = (0, 0, 0, 0)  # memory that it reads and writes
    launches: int = 0  # number of kernel launches; of tensors in a list
    form: Form = ""

    def with_parts(self, change: Callable[[float, float, float, float], Parts]) -> "Operator":
        """The operator whose FLOPs and bytes are changed alike."""
        return replace(self, flops=change(*self.flops), bytes=change(*self.bytes))


@dataclass(frozen=True)
class Passes:
    """The operators of a step in runs: the forward and backward passes of each micro-step, the
    update behind them, and a micro-batch of an evaluation."""

    operators: Sequence[Operator]
    runs: Sequence[Sequence[int]]  # numbers of operators
    micro_steps: Sequence[Runs]
    update: Runs = ()
    evaluation: Runs = ()

    def with_operators(self, change: Callable[[Operator], Operator]) -> "Passes":
        """The same passes of other operators."""
        return replace(self, operators=[change(operator) for operator in self.operators])

    @property
    def offloaded(self) -> list[Parts]:
        """Bytes of each tensor that the forward pass of a micro-step copies to the host."""
        return [
            self.operators[number].bytes
            for run, times in self.micro_steps[0]
            for number in self.runs[run]
            if self.operators[number].kind == "offload"
            for _ in range(times)
        ]


class Call(NamedTuple):
    """A call of an operator."""

    operator: int
    phase: str
    layer: Layer | None


@dataclass
class Log:
    """The recorded step."""

    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)  # each once
    calls: list[Call] = field(default_factory=list)
    batch: int = BATCH

    def of_documents(self, count: int) -> "Log":
        """The step of rows of so many documents, from that of rows of one. Events are shared."""
        blocks = [block.of_layer(block.layer) for block in self.blocks]
        for block in blocks:
            block.sample_bytes += (count - 1) * block.document_bytes
        return replace(self, blocks=blocks)

    def split(self, size: float) -> Parts:
        """(fixed part, part per sample, per target of a part, per target of all parts) of a size at
        this log's batch. In a batch of one sample no size is a number of bytes per sample."""
        for targets in (TARGETS, _LAST_TARGETS):
            if size and size % targets == 0:
                return 0, 0, size // targets, 0
        if size and size % ALL_TARGETS == 0:
            return 0, 0, 0, size // ALL_TARGETS
        if self.batch == 1 or size % self.batch:
            return size, 0, 0, 0
        return 0, size // self.batch, 0, 0


@dataclass(frozen=True)
class RecordedStep:
    """A log of a model with few layers, and the model that it stands for."""

    log: Log
    depths: tuple[int, ...] = ()  # layers of each of its stacks
    period: int = 0  # layers of a unit, of which four were recorded; 0: all layers were


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in their order; keys in that of their first values."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def dumped(step: RecordedStep) -> str:
    """The text of a file: a digest, then rows whose phases and layers are numbers in lists of their
    own."""
    log = step.log
    placed = [*log.events, *log.calls]
    phases = {
        phase: number for number, phase in enumerate(dict.fromkeys(each.phase for each in placed))
    }
    layers = {
        layer: number for number, layer in enumerate(dict.fromkeys(each.layer for each in placed))
    }

    def row(number: int, each: Event | Call) -> list[int]:
        return [number, phases[each.phase], layers[each.layer]]

    content = json.dumps(
        {
            "depths": step.depths,
            "period": step.period,
            "batch": log.batch,
            "phases": [*phases],
            "layers": [*layers],
            "blocks": [list(astuple(block)) for block in log.blocks],
            "events": [
                row(event.block if event.birth else ~event.block, event) for event in log.events
            ],
            "operators": [list(astuple(operator)) for operator in log.operators],
            "calls": [row(call.operator, call) for call in log.calls],
        }
    )
    return with_digest(content)


def loaded(text: str) -> RecordedStep:
    """The step of a file. Raises ValueError for a text that was damaged."""
    step = json.loads(content_of(text))
    phases, layers = step["phases"], [layer and (layer[0], layer[1]) for layer in step["layers"]]
    blocks = [Block(*row) for row in step["blocks"]]
    for block in blocks:
        block.layer = block.layer and (block.layer[0], block.layer[1])
        if block.sum:
            block.sum = Sum(*cast(Any, block.sum))
    events = [
        Event(block if block >= 0 else ~block, block >= 0, phases[phase], layers[layer])
        for block, phase, layer in step["events"]
    ]
    calls = [
        Call(operator, phases[phase], layers[layer]) for operator, phase, layer in step["calls"]
    ]
    log = Log(blocks, events, [*map(operator_of, step["operators"])], calls, step["batch"])
    return RecordedStep(log, tuple(step["depths"]), step["period"])


def operator_of(row: Sequence[Any]) -> Operator:
    """The operator of a file's row."""
    name, kind, dtype, flops, moved, *counts = row
    return Operator(name, kind, dtype, tuple(flops), tuple(moved), *counts)


def with_digest(content: str) -> str:
    """The text of a file: a digest, by which damage is found, then the content."""
    return f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}"


def content_of(text: str) -> str:
    """The content of with_digest(). Raises ValueError for a text that was damaged."""
    _, _, content = text.partition("\n")
    if text != with_digest(content):
        raise ValueError("another digest than that of the content")
    return content
