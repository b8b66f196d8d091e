"""A recorded step, and where its blocks are made and freed. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar

from launch.schema.recorded_step import (
    LOSS,
    UNITS,
    Call,
    Event,
    Layer,
    Operator,
    RecordedStep,
    grouped,
)

PASSES = ("forward", "backward")  # phases that a layer's way decides
_THROUGH_LAYERS = (*PASSES, "evaluation")
_PARTS_HERE = -1  # stands for a block: the parts of the logits are made here
MIDDLE = 2  # the unit of a stack that is repeated
LEAST_PARTS = 3  # fewest parts of the logits: first, one before the last, last
Item = TypeVar("Item", Event, Call)
Place = tuple[str, Layer | None, int]  # a birth's phase, owner (None: no layer) and number


class NotComposed(Exception):
    """A step that is not made of recorded layers; the message says what differs."""


@dataclass(frozen=True)
class _Stack:
    """A stack of layers, of which a few were recorded."""

    layers: int
    recorded: int
    period: int  # layers of a unit; 0: all were recorded
    middle = MIDDLE  # the unit that is repeated

    @cached_property
    def source_of(self) -> list[int]:
        """The recorded layer of each layer."""
        more, period = self.layers - self.recorded, self.period
        if not more or not period:
            return list(range(self.layers))
        begin, end = MIDDLE * period, self.recorded - (UNITS - 1) * period
        middle = [begin + index % period for index in range(self.layers - begin - end)]
        return [*range(begin), *middle, *range(self.recorded - end, self.recorded)]

    @cached_property
    def layers_of(self) -> dict[int, list[int]]:
        """The layers of each recorded layer."""
        return grouped((recorded, layer) for layer, recorded in enumerate(self.source_of))

    def unit(self, recorded: int) -> int:
        return min(recorded // (self.period or 1), UNITS - 1)

    def seen_from(self, layer: int, recorded: int, in_pass: bool = False) -> list[int]:
        """The layers that this one means where its recorded layer uses a block of another.
        `in_pass`: of a forward or backward pass, where inputs of a layer are on their way to the
        host until the one behind the next is computed."""
        if self.source_of == list(range(self.recorded)):
            return [recorded]
        source = self.source_of[layer]
        distance = self.unit(recorded) - self.unit(source)
        if abs(distance) <= (2 if in_pass else 1):
            target = layer + (self._place(recorded) - self._place(source))
            if 0 <= target < self.layers:
                return [target]
        elif self.middle not in (self.unit(source), self.unit(recorded) + 1):
            return self.layers_of.get(recorded, [])
        raise NotComposed(f"layer {source} frees a block of layer {recorded}")

    def _place(self, recorded: int) -> int:
        return recorded


@dataclass(frozen=True)
class _LossParts(_Stack):
    """The parts of the logits, as the layers of a stack. Backward goes through the last one first,
    and the one before it makes the sum of gradients that the others are added to."""

    middle = 1

    @cached_property
    def source_of(self) -> list[int]:
        if self.layers == self.recorded:
            return list(range(self.recorded))
        if self.layers < LEAST_PARTS:
            raise NotComposed(f"{self.layers} parts of the logits")
        middle = [1] * (self.layers - UNITS + 1)
        return [0, *middle, self.recorded - 2, self.recorded - 1]

    def unit(self, recorded: int) -> int:
        return max(min(recorded, 1), recorded - self.recorded + UNITS)

    def _place(self, recorded: int) -> int:
        return self.unit(recorded)


@dataclass(frozen=True)
class Run(Generic[Item]):
    """Neighbouring items of a phase, of one layer or of none."""

    layer: Layer | None
    items: list[Item]
    time: int  # the number of the layer's runs before it, in its phase


def _runs(items: Sequence[Item]) -> list[Run[Item]]:
    """A phase in runs."""
    owners = [item.layer for item in items]
    if items and items[0].phase.startswith(_THROUGH_LAYERS):
        owners = _with_neighbours(_owners(items))
    times: dict[Layer | None, int] = defaultdict(int)
    runs: list[Run[Item]] = []
    for layer, group in groupby(zip(owners, items, strict=True), itemgetter(0)):
        runs.append(Run(layer, [item for _, item in group], times[layer]))
        times[layer] += 1
    return runs


def _owners(items: Sequence[Item]) -> Iterator[Layer | None]:
    """The layer of each item: all between the first and the last of a layer is the layer's own."""
    last = {item.layer: index for index, item in enumerate(items)}
    owner: Layer | None = None
    for index, item in enumerate(items):
        if owner is None or index > last[owner]:
            owner = item.layer
        elif item.layer not in (None, owner):
            raise NotComposed(f"{item.phase}: layers {owner} and {item.layer} overlap")
        yield owner


def _with_neighbours(owners: Iterable[Layer | None]) -> list[Layer | None]:
    """The owners of items; between two layers of a stack it is the layer before."""
    groups = [(owner, len([*group])) for owner, group in groupby(owners)]
    ends = [None, *(owner for owner, _ in groups), None]
    filled: list[Layer | None] = []
    for before, (owner, count), after in zip(ends, groups, ends[2:], strict=False):
        is_between = owner is None and before and after and before[0] == after[0]
        filled += count * [before if is_between else owner]
    return filled


class Recorded:
    """A recorded step, and where its blocks are made and freed."""

    def __init__(self, step: RecordedStep) -> None:
        log = step.log
        self.log, self.depths, self.period = log, step.depths, step.period
        events = grouped((event.phase, event) for event in log.events)
        calls = grouped((call.phase, call) for call in log.calls)
        self.events = {phase: _runs(of_phase) for phase, of_phase in events.items()}
        self.calls = {phase: _runs(of_phase) for phase, of_phase in calls.items()}
        self.place: dict[int, Place] = {}  # block -> its birth
        self.births: dict[tuple[str, Layer | None], list[int]] = defaultdict(list)
        self.freed: dict[int, tuple[str, Layer | None]] = {}  # block -> phase and owner
        for phase, runs in self.events.items():
            for run in runs:
                births = self.births[phase, run.layer]
                for event in run.items:
                    if event.birth:
                        self.place[event.block] = phase, run.layer, len(births)
                        births.append(event.block)
                    else:
                        self.freed[event.block] = phase, run.layer
        self._check()

    @cached_property
    def recorded_layers(self) -> dict[int, int]:
        """The number of recorded layers of each stack."""
        layers = sorted(layer for _, layer in self.births if layer is not None)
        return {stack: index + 1 for stack, index in layers}  # that of its last layer

    def stacks(self, parts: int) -> dict[int, _Stack]:
        """The stacks of the model, and the parts of the logits as one."""
        depths = self.depths if self.period else self.recorded_layers
        return {
            stack: _LossParts(parts, recorded, 1)
            if stack == LOSS
            else _Stack(depths[stack], recorded, self.period)
            for stack, recorded in self.recorded_layers.items()
        }

    def size(self, block: int) -> tuple[object, ...]:
        """The size and operator of a block, by which it stands for another."""
        if block == _PARTS_HERE:
            return ("parts of the logits",)
        row = self.log.blocks[block]
        target_bytes = row.target_bytes + row.all_target_bytes
        return row.fixed_bytes, row.sample_bytes, target_bytes, row.sum, row.op

    def handed_on(
        self, phase: str, layer: Layer | None, reader: str, kind: tuple[object, ...]
    ) -> list[int]:
        """The blocks of a kind that a layer makes for another reader, in their order."""
        return [
            block
            for block in self.births.get((phase, layer), [])
            if self.reader(block) == reader and self.size(block) == kind
        ]

    def outputs(self, phase: str, layer: Layer | None) -> set[tuple[object, ...]]:
        """The kinds of blocks that a layer hands on to another."""
        blocks = self.births.get((phase, layer), [])
        return {self.size(block) for block in blocks if self.reader(block) == "layer"}

    def reader(self, block: int) -> str:
        """The place where a block is freed: its own layer, another, outside of layers, a later
        phase or nowhere."""
        if block not in self.freed:
            return "nowhere"
        phase, layer = self.freed[block]
        if not phase.startswith(PASSES):
            return phase
        if layer is None or layer[0] == LOSS:
            return "outside"
        return "own" if layer == self.place[block][1] else "layer"

    def outside(self, phase: str) -> Iterator[tuple[int, Event | None]]:
        """The events of a phase outside of layers, with the number of its area: a stack of layers
        lies between two areas. None: the parts of the logits."""
        area, stack = 0, None
        for run in self.events.get(phase, []):
            if run.layer is None:
                yield from ((area, event) for event in run.items)
            elif run.layer[0] != LOSS:
                area += run.layer[0] != stack
            elif stack != LOSS:
                yield area, None
            stack = run.layer[0] if run.layer is not None else stack if stack != LOSS else None

    @cached_property
    def areas(self) -> dict[tuple[str, int], list[int]]:
        """The blocks that are made in each area of each phase, and _PARTS_HERE."""
        return grouped(
            ((phase, area), _PARTS_HERE if event is None else event.block)
            for phase in self.events
            for area, event in self.outside(phase)
            if event is None or event.birth
        )

    @cached_property
    def area_of(self) -> dict[int, tuple[str, int, int]]:
        """block -> phase, area and number in it."""
        return {
            block: (*area, number)
            for area, blocks in self.areas.items()
            for number, block in enumerate(blocks)
        }

    @cached_property
    def twins(self) -> dict[int, int]:
        """Each block of the last part of the logits, and of the others, and the block of the other
        kind."""
        births = {
            (phase, layer): blocks
            for (phase, layer), blocks in self.births.items()
            if layer is not None and layer[0] == LOSS
        }
        pairs = self._twins(births, lambda block: self.log.blocks[block].op)
        return {block: twin for _, _, block, twin in pairs}

    @cached_property
    def twin_operators(self) -> dict[tuple[str, Layer, int], Operator]:
        """By phase, part and number of an operator, that of the last part, or of the others."""
        calls = grouped(
            ((phase, run.layer), call.operator)
            for phase, runs in self.calls.items()
            for run in runs
            if run.layer is not None and run.layer[0] == LOSS
            for call in run.items
        )
        operators = self.log.operators
        pairs = self._twins(calls, lambda number: operators[number].name)
        return {(phase, part, number): operators[twin] for phase, part, number, twin in pairs}

    def _twins(
        self, of_parts: Mapping[tuple[str, Layer], Sequence[int]], name_of: Callable[[int], str]
    ) -> Iterator[tuple[str, Layer, int, int]]:
        """Pairs of numbers of the same name, of a part and of the last one, or of another, in runs
        that are as long as possible."""
        last = self.recorded_layers[LOSS] - 1
        for (phase, part), numbers in of_parts.items():
            twins = of_parts.get((phase, (LOSS, 1 if part[1] == last else last)), [])
            names, twin_names = [*map(name_of, numbers)], [*map(name_of, twins)]
            for run in SequenceMatcher(None, names, twin_names, False).get_matching_blocks():
                for index in range(run.size):
                    yield phase, part, numbers[run.a + index], twins[run.b + index]

    def _check(self) -> None:
        """Raises NotComposed unless the layers of the two middle units make the same blocks."""
        if not self.period:
            return
        for (phase, layer), births in self.births.items():
            if layer is None or layer[0] == LOSS or layer[1] // self.period != MIDDLE:
                continue
            before = self.births.get((phase, (layer[0], layer[1] - self.period)), [])
            if list(map(self.size, births)) != list(map(self.size, before[: len(births)])):
                raise NotComposed(f"{phase}: layers {layer} and the one before differ")
