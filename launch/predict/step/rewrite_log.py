"""Rewrite a log: find the landmarks of its step, and put blocks between its events."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.schema.recorded_step import (
    PACKED,
    SCALES,
    TRAINED,
    UNUSED,
    Block,
    Event,
    Layer,
    Log,
    grouped,
)

# ops of ZeRO's blocks: the weights that are trained, this rank's float32 part of them, and stage
# 3's gradients of that part
FLAT, SLICE, GRADIENTS = "flat weights", "float32 slice", "gradient slices"
# streams of a card's ranks, beside 0 for all else: on one they reduce, on the other they gather
REDUCES, GATHERS = 1, 2
SCALAR_BYTES = 8  # a step counter, a norm: no engine divides these among ranks


@dataclass(frozen=True)
class Weight:
    """A parameter, in the order of named_parameters. Scales of 4 bits are none: no engine divides
    them."""

    block: int
    layer: Layer | None
    bytes: int  # bytes in the type of the computation
    trained: bool
    used: bool = True
    packed: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient of a trained parameter, as the plain step has it."""

    block: int
    layer: Layer | None
    bytes: int
    born: int  # position
    dies: int  # position


@dataclass(frozen=True)
class Landmarks:
    """The positions of a plain log at which its step changes. A position is the index of an event:
    a block that is put there comes before that event."""

    weights: Sequence[Weight]
    gradients: Sequence[Gradient]  # gradients in the order in which backward makes them
    forwards: Sequence[range]
    backwards: Sequence[range]
    optimizer: range
    # per micro-step: of its forward, of its backward
    spans: Sequence[tuple[dict[Layer, range], dict[Layer, range]]]
    evaluation: tuple[range, dict[Layer, range]]  # empty if no evaluation was traced
    tied: bool  # the output layer is the input embedding


class Rewriting:
    """A log with blocks put between its events."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.blocks = list(log.blocks)
        self._inserted: dict[int, list[Event]] = defaultdict(list)
        self._dropped: set[tuple[int, bool]] = set()  # (old block, its birth or its death)

    def born(
        self,
        size: float,
        kind: str,
        op: str,
        position: int,
        layer: Layer | None = None,
        stream: int = 0,
    ) -> int:
        """Add a block of `size` bytes, for any batch, from this position on."""
        self.blocks.append(
            Block(math.ceil(size), 0, kind, op, self._phase(position), layer, stream)
        )
        self._insert(len(self.blocks) - 1, True, position)
        return len(self.blocks) - 1

    def dies(self, block: int, position: int) -> None:
        """End a block, new or old, at this position."""
        self._dropped.add((block, False))
        self._insert(block, False, position)

    def passes(
        self,
        size: float,
        op: str,
        position: int,
        layer: Layer | None = None,
        stream: int = 0,
    ) -> None:
        """Add a buffer that is freed before the next event."""
        self.dies(self.born(size, "communication", op, position, layer, stream), position)

    def change(self, block: int, **fields: Any) -> None:
        """Replace fields of a block, which the log keeps as they are."""
        self.blocks[block] = replace(self.blocks[block], **fields)

    def drop(self, block: int) -> None:
        """Remove an old block, which this rank's device does not have."""
        self._dropped |= {(block, True), (block, False)}

    def _phase(self, position: int) -> str:
        """The phase of a position. Behind a backward, an update or an evaluation it is theirs."""
        before = self.log.events[position - 1].phase if position else ""
        if before.startswith(("backward", "optimizer", "evaluation")):
            return before
        return self.log.events[min(position, len(self.log.events) - 1)].phase

    def _insert(self, block: int, birth: bool, position: int) -> None:
        self._inserted[position].append(
            Event(block, birth, self._phase(position), self.blocks[block].layer)
        )

    def result(self) -> Log:
        events: list[Event] = []
        for position, event in enumerate(self.log.events):
            events += self._inserted.get(position, [])
            if (event.block, event.birth) not in self._dropped:
                events.append(event)
        events += self._inserted.get(len(self.log.events), [])
        return replace(self.log, blocks=self.blocks, events=events)


def landmarks(log: Log, tied: bool) -> Landmarks:
    """The step's phases, layers, weights and gradients."""
    positions = grouped((event.phase, position) for position, event in enumerate(log.events))
    phases = {phase: range(inside[0], inside[-1] + 1) for phase, inside in positions.items()}
    names = [phase.partition(":")[2] for phase in phases if phase.startswith("backward")]
    end = phases[f"backward:{names[-1]}"].stop
    weights = [  # repeated layers' blocks have the last numbers
        Weight(
            *(number, block.layer, block.fixed_bytes),
            *(block.op == TRAINED, block.op != UNUSED, block.op == PACKED),
        )
        for number in (event.block for event in log.events if event.birth)
        for block in [log.blocks[number]]
        if block.born == "start:weights" and block.kind == "weights" and block.op != SCALES
    ]
    return Landmarks(
        weights,
        _gradients(log, end),
        [phases[f"forward:{name}"] for name in names],
        [phases[f"backward:{name}"] for name in names],
        phases.get("optimizer", range(end, end)),
        [
            (_spans(log, positions[f"forward:{name}"]), _spans(log, positions[f"backward:{name}"]))
            for name in names
        ],
        (phases.get("evaluation", range(0)), _spans(log, positions.get("evaluation", []))),
        tied,
    )


def _spans(log: Log, positions: Sequence[int]) -> dict[Layer, range]:
    """The range from a layer's first event to its last, of layers in the order of entering."""
    inside = grouped((log.events[position].layer, position) for position in positions)
    return {
        layer: range(of_layer[0], of_layer[-1] + 1)
        for layer, of_layer in inside.items()
        if layer is not None
    }


def _gradients(log: Log, end: int) -> list[Gradient]:
    """Blocks of fixed size that are born in a backward and outlive the last backward, but for the
    workspace of cuBLAS."""
    blocks, events = log.blocks, log.events
    dies = {event.block: index for index, event in enumerate(events) if not event.birth}
    lasting = (
        (position, event)
        for position, event in enumerate(events)
        if event.birth and event.phase.startswith("backward") and dies.get(event.block, end) >= end
    )
    return [
        Gradient(
            event.block,
            event.layer,
            block.fixed_bytes,
            position,
            dies.get(event.block, len(events)),
        )
        for position, event in lasting
        for block in [blocks[event.block]]
        if block.is_fixed and block.fixed_bytes > SCALAR_BYTES and block.kind != "workspace"
    ]


def ready(log: Log, marks: Landmarks, gradient: Gradient, micro_step: int) -> int:
    """The position in a backward at which a gradient is complete.

    The gradient of a tied embedding grows until the end, where the embedding's own backward is. A
    gradient that an earlier backward made is added to in its layer."""
    phase, spans = marks.backwards[micro_step], marks.spans[micro_step][1]
    is_embedding = gradient.layer is None and gradient is embedding_gradient(marks)
    if marks.tied and is_embedding:
        return phase.stop
    if gradient.born in phase:
        return _behind_node(log, gradient.born, phase.stop)
    if gradient.layer in spans:
        return spans[gradient.layer].stop
    return next(iter(spans.values())).start if spans and not is_embedding else phase.stop


def later_gradients(log: Log, gradients: Sequence[Gradient], positions: range) -> Iterator[int]:
    """The blocks in which another micro-step, at `positions`, makes these gradients before they are
    added."""
    missing = Counter((log.blocks[each.block].op, each.bytes, each.layer) for each in gradients)
    for event in log.events[positions.start : positions.stop]:
        block = log.blocks[event.block]
        key = (block.op, block.fixed_bytes, event.layer)
        if event.birth and block.is_fixed and missing[key]:
            missing[key] -= 1
            yield event.block


def _behind_node(log: Log, position: int, stop: int) -> int:
    """The position behind the autograd node that made a gradient. A kernel may make several results
    at once; the node of a matrix product makes the gradient of its input after it, and the sum that
    is a bias's gradient comes last."""

    def block(birth: int) -> Block:
        return log.blocks[log.events[birth].block]

    first, after = block(position), _next_birth(log, position, stop)
    if after < stop and block(after).op == first.op:
        is_product = first.op == "aten::mm" and not block(after).is_fixed
        if is_product or after == position + 1:
            after = _next_birth(log, after, stop)
    if after < stop and first.op == "aten::mm" and block(after).op == "aten::sum":
        is_of_bias = block(after).is_fixed
        after = _next_birth(log, after, stop) if is_of_bias else after
    return after


def _next_birth(log: Log, position: int, stop: int) -> int:
    """The position of the first birth behind this one, where the temporaries before it are
    freed. A kernel's own buffers do not count."""
    return next(
        (
            later
            for later in range(position + 1, stop)
            if log.events[later].birth and log.blocks[log.events[later].block].kind != "workspace"
        ),
        stop,
    )


def behind_logits(log: Log, positions: range, last: bool) -> int:
    """The position behind the first (`last`: the last) birth of logits, or of their gradient."""
    births = [
        position
        for position in positions
        if log.events[position].birth and log.blocks[log.events[position].block].kind == "logits"
    ]
    if not births:
        return positions.stop
    return _next_birth(log, births[-1 if last else 0], positions.stop)


def input_embedding(marks: Landmarks) -> Weight:
    """The input embedding, or the copy of it that is trained."""
    return next(weight for weight in marks.weights if weight.used)


def embedding_gradient(marks: Landmarks) -> Gradient | None:
    """The gradient of the input embedding. Of an untied embedding, backward makes it last."""
    first = input_embedding(marks)
    alike = [
        gradient
        for gradient in marks.gradients
        if gradient.layer is None and gradient.bytes == first.bytes
    ]
    return alike[-1] if first.trained and alike else None
