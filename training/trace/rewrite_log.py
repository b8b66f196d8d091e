"""A log that is rewritten: the landmarks of its step, and blocks put between its events."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from training.trace.recorder import Block, Event, Layer, Log

FROZEN = "frozen parameter"  # op of a weight that is not trained; the others are "parameter"
SCALAR_BYTES = 8  # a step counter, a norm: no engine shares these out


@dataclass(frozen=True)
class Weight:
    """A parameter, in the order of named_parameters."""

    block: int
    layer: Layer | None
    bytes: int  # as it is computed with
    trained: bool


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
    """Where in a plain log what happens. A position is that of an event: what is put there comes
    before it."""

    weights: Sequence[Weight]
    gradients: Sequence[Gradient]  # in the order in which backward makes them
    forwards: Sequence[range]
    backwards: Sequence[range]
    optimizer: range
    # per micro-step: of its forward, of its backward
    spans: Sequence[tuple[dict[Layer, range], dict[Layer, range]]]
    evaluation: tuple[range, dict[Layer, range]]  # empty where none was traced
    tied: bool  # the output layer is the input embedding


class Rewriting:
    """A log with blocks put between its events."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.blocks = [replace(block) for block in log.blocks]
        self._inserted: dict[int, list[Event]] = defaultdict(list)
        self._dropped: set[int] = set()
        self._born = {event.block: at for at, event in enumerate(log.events) if event.birth}
        self._died = {event.block: at for at, event in enumerate(log.events) if not event.birth}

    def born(self, size: float, kind: str, op: str, at: int, layer: Layer | None = None) -> int:
        """A new block of `size` bytes, whatever the batch, from position `at` on."""
        self.blocks.append(Block(math.ceil(size), 0, kind, op, self._phase(at), layer))
        self._insert(len(self.blocks) - 1, True, at)
        return len(self.blocks) - 1

    def dies(self, block: int, at: int) -> None:
        """A block, new or old, ends at position `at`."""
        if block in self._died:
            self._dropped.add(self._died[block])
        self._insert(block, False, at)

    def passes(self, size: float, op: str, at: int, layer: Layer | None = None) -> None:
        """A buffer that is gone before the next thing happens."""
        self.dies(self.born(size, "communication", op, at, layer), at)

    def drop(self, block: int) -> None:
        """An old block that this rank's device does not have."""
        self._dropped |= {at[block] for at in (self._born, self._died) if block in at}

    def _phase(self, at: int) -> str:
        """A position behind a backward, an update or an evaluation is still of it."""
        before = self.log.events[at - 1].phase if at else ""
        if before.startswith(("backward", "optimizer", "evaluation")):
            return before
        return self.log.events[min(at, len(self.log.events) - 1)].phase

    def _insert(self, block: int, birth: bool, at: int) -> None:
        self._inserted[at].append(Event(block, birth, self._phase(at), self.blocks[block].layer))

    def result(self) -> Log:
        events: list[Event] = []
        for at in range(len(self.log.events) + 1):
            events += self._inserted.get(at, [])
            if at < len(self.log.events) and at not in self._dropped:
                events.append(self.log.events[at])
        return Log(self.blocks, events, self.log.work, self.log.batch)


def landmarks(log: Log, tied: bool) -> Landmarks:
    """The step's phases, layers, weights and gradients."""
    at: dict[str, list[int]] = defaultdict(list)
    for position, event in enumerate(log.events):
        at[event.phase].append(position)
    phases = {phase: range(positions[0], positions[-1] + 1) for phase, positions in at.items()}
    names = [phase.partition(":")[2] for phase in phases if phase.startswith("backward")]
    end = phases[f"backward:{names[-1]}"].stop
    weights = [
        Weight(number, block.layer, block.fixed_bytes, block.op != FROZEN)
        for number, block in enumerate(log.blocks)
        if block.born == "start:weights" and block.kind == "weights"
    ]
    return Landmarks(
        weights,
        _gradients(log, end),
        [phases[f"forward:{name}"] for name in names],
        [phases[f"backward:{name}"] for name in names],
        phases.get("optimizer", range(end, end)),
        [
            (_spans(log, at[f"forward:{name}"]), _spans(log, at[f"backward:{name}"]))
            for name in names
        ],
        (phases.get("evaluation", range(0)), _spans(log, at["evaluation"])),
        tied,
    )


def _spans(log: Log, positions: Sequence[int]) -> dict[Layer, range]:
    """Layer -> from its first event to behind its last, in the order in which they are entered."""
    found: dict[Layer, range] = {}
    for at in positions:
        layer = log.events[at].layer
        if layer is not None:
            found[layer] = range(found[layer].start if layer in found else at, at + 1)
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def _gradients(log: Log, end: int) -> list[Gradient]:
    """What is born in a backward, whatever the batch, and outlives the last one."""
    dies = {event.block: at for at, event in enumerate(log.events) if not event.birth}
    found = []
    for at, event in enumerate(log.events):
        block, last = log.blocks[event.block], dies.get(event.block, len(log.events))
        is_one = event.birth and event.phase.startswith("backward") and last >= end
        if is_one and block.sample_bytes == 0 and block.fixed_bytes > SCALAR_BYTES:
            found.append(Gradient(event.block, event.layer, block.fixed_bytes, at, last))
    return found


def ready(log: Log, marks: Landmarks, gradient: Gradient, micro_step: int) -> int:
    """Where in one backward a gradient is complete. That of a tied embedding grows until the
    embedding's own backward; one that an earlier backward made is added to while its layer is gone
    through."""
    phase, spans = marks.backwards[micro_step], marks.spans[micro_step][1]
    if marks.tied and gradient is embedding_gradient(marks):
        return phase.stop
    if gradient.born in phase:
        return _behind_node(log, gradient.born, phase.stop)
    if gradient.layer in spans:
        return spans[gradient.layer].stop
    return (
        next(iter(spans.values())).start
        if spans and gradient is not embedding_gradient(marks)
        else phase.stop
    )


def later_gradients(log: Log, gradients: Sequence[Gradient], positions: range) -> Iterator[int]:
    """The blocks in which another micro-step, at `positions`, makes these gradients before they are
    added."""
    sought = Counter((log.blocks[one.block].op, one.bytes, one.layer) for one in gradients)
    for at in positions:
        event = log.events[at]
        block = log.blocks[event.block]
        key = (block.op, block.fixed_bytes, event.layer)
        if event.birth and not block.sample_bytes and sought[key]:
            sought[key] -= 1
            yield event.block


def _behind_node(log: Log, at: int, stop: int) -> int:
    """Where the autograd node that made a gradient is through: a matrix product's makes that of its
    input after it."""
    after = next_birth(log, at, stop)
    if after < stop:
        made, other = log.blocks[log.events[at].block], log.blocks[log.events[after].block]
        if made.op == other.op == "aten::mm" and other.sample_bytes:
            return next_birth(log, after, stop)
    return after


def next_birth(log: Log, at: int, stop: int) -> int:
    """The position of the first birth behind `at`: by then what led to it has been freed."""
    return next((later for later in range(at + 1, stop) if log.events[later].birth), stop)


def embedding_gradient(marks: Landmarks) -> Gradient | None:
    """The gradient of the input embedding, which is the first parameter. Backward makes that of an
    untied one last."""
    first = marks.weights[0]
    alike = [one for one in marks.gradients if one.layer is None and one.bytes == first.bytes]
    return alike[-1] if first.trained and alike else None
