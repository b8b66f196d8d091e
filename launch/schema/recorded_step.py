"""A training step of one process, as training.trace records it: every storage that is born and
dies, and every operator that is called, each in its phase and layer.

Every size is split into a part that grows with the batch, a part that grows with its targets and a
fixed part: the numbers of recorded samples and targets are primes, so a size that one of them
divides is a number of bytes per sample, or per target. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple

STEP = ".step"  # of the names of recorded steps' files
BATCH = 1009  # a prime that divides no usual width, vocabulary or length
TARGETS = 100_003  # another, of each part in which the logits are made
# where parts are told apart: there are so many of them, the last has fewer targets, and so all have
PARTS, LAST_TARGETS, ALL_TARGETS = 4, 100_001, 400_010
UNITS = 4  # of a stack of few layers: first, two alike, last, which may have fewer layers
LOSS = -1  # in place of a stack: the parts of the logits are its layers
# ops of blocks: of one without bytes, from which on the optimizer steps; of a weight that is
# trained, of another weight, and of a weight that a step does not use: the original beside a copy
# of LoRA's modules_to_save
UPDATE = "update"
TRAINED, FROZEN, UNUSED = "parameter", "frozen parameter", "unused parameter"
Layer = tuple[int, int]  # (stack, index in it)
Parts = tuple[float, float, float, float]


@dataclass(frozen=True)
class Sum:
    """A kernel's sum over rows, whose buffer is launch.predict.memory.partial_sums' bytes."""

    fixed_rows: int
    # rows are fixed_rows + batch * sample_rows + targets * target_rows
    sample_rows: int
    target_rows: int
    columns: int
    multiprocessors: int
    threads: int  # that a multiprocessor holds


@dataclass(slots=True)
class Block:
    """One storage. Its size at batch b with t targets in each part of the logits is fixed_bytes
    + b * sample_bytes + t * target_bytes, unless it is the buffer of a sum."""

    fixed_bytes: int
    sample_bytes: int
    kind: str  # "": decided from its phases (launch.predict.step.peaks)
    op: str
    born: str  # phase
    layer: Layer | None
    stream: int = 0  # on which it is made; others than 0 are an engine's own
    sum: Sum | None = None
    target_bytes: int = 0
    document_bytes: int = 0  # per sample, of each document in its row but the first
    all_target_bytes: int = 0  # per target of all parts of the logits, before a step is composed

    def of_layer(self, layer: Layer | None) -> Block:
        """A copy in another layer."""
        own = self.fixed_bytes, self.sample_bytes, self.kind, self.op, self.born
        of_rows = self.target_bytes, self.document_bytes, self.all_target_bytes
        return Block(*own, layer, self.stream, self.sum, *of_rows)

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
    dtype: str = ""  # of its result; of a product in 16 bits also its alignment
    flops: Parts = (0, 0, 0, 0)
    bytes: Parts = (0, 0, 0, 0)  # that it reads and writes
    launches: int = 0  # of kernels


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

    def of_documents(self, count: int) -> Log:
        """The step of rows of so many documents, from that of rows of one. Events are shared."""
        blocks = [block.of_layer(block.layer) for block in self.blocks]
        for block in blocks:
            block.sample_bytes += (count - 1) * block.document_bytes
        return replace(self, blocks=blocks)

    def split(self, size: float) -> Parts:
        """(fixed part, part per sample, per target of a part, per target of all parts) of a size at
        this log's batch. In a batch of one sample no size is a number of bytes per sample."""
        for targets in (TARGETS, LAST_TARGETS):
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


def dumped(step: RecordedStep) -> dict[str, Any]:
    """The content of a file: rows, whose phases and layers are numbers in lists of their own."""
    log = step.log
    phases = list(dict.fromkeys([*(e.phase for e in log.events), *(c.phase for c in log.calls)]))
    layers = list(dict.fromkeys([*(e.layer for e in log.events), *(c.layer for c in log.calls)]))
    place = {phase: number for number, phase in enumerate(phases)}
    number = {layer: number for number, layer in enumerate(layers)}
    return {
        "depths": step.depths,
        "period": step.period,
        "batch": log.batch,
        "phases": phases,
        "layers": layers,
        "blocks": [list(astuple(block)) for block in log.blocks],
        "events": [
            [e.block if e.birth else ~e.block, place[e.phase], number[e.layer]] for e in log.events
        ],
        "operators": [list(astuple(operator)) for operator in log.operators],
        "calls": [[c.operator, place[c.phase], number[c.layer]] for c in log.calls],
    }


def loaded(content: Mapping[str, Any]) -> RecordedStep:
    """The step of a file. Raises ValueError, KeyError, TypeError or IndexError for a content of
    another shape."""
    phases = [str(phase) for phase in content["phases"]]
    layers = [_layer(layer) for layer in content["layers"]]
    blocks = []
    for fixed, sample, kind, op, born, layer, stream, of_sum, *rest in content["blocks"]:
        buffer = Sum(*map(int, of_sum)) if of_sum is not None else None
        own = int(fixed), int(sample), str(kind), str(op), str(born)
        blocks.append(Block(*own, _layer(layer), int(stream), buffer, *map(int, rest)))
    operators = [
        Operator(str(name), kind, str(dtype), _parts(flops), _parts(moved), int(launches))
        for name, kind, dtype, flops, moved, launches in content["operators"]
    ]
    events = [
        Event(block if block >= 0 else ~block, block >= 0, phases[phase], layers[layer])
        for block, phase, layer in content["events"]
    ]
    calls = [
        Call(operator, phases[phase], layers[layer]) for operator, phase, layer in content["calls"]
    ]
    if any(event.block >= len(blocks) for event in events):
        raise ValueError("a block that is not there")
    if any(not 0 <= call.operator < len(operators) for call in calls):
        raise ValueError("an operator that is not there")
    log = Log(blocks, events, operators, calls, int(content["batch"]))
    return RecordedStep(log, tuple(map(int, content["depths"])), int(content["period"]))


def _layer(value: Any) -> Layer | None:
    if value is None:
        return None
    stack, index = value
    return int(stack), int(index)


def _parts(values: Any) -> Parts:
    fixed, sample, target, all_targets = map(float, values)
    return fixed, sample, target, all_targets
