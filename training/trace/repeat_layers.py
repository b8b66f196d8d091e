"""Extend the log of a model with few layers to the same model with many, event by event: the middle
layers are repeated.

The layers of a stack are alike, so a deeper model does the same with more of the middle. Where only
every n-th layer is checkpointed, each n layers from the first are alike: a unit. If units differ
(one frees a block of a distant unit, or two allocate differently), NotUniform is raised, and the
model is traced with all its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from training.trace.layer_stacks import UNITS, shallow_layers
from training.trace.recorder import Event, Layer, Log, Work

PASSES = ("forward", "backward")  # phases that go through each layer once
MIDDLE = 2  # the unit that is repeated; units 1 and 3 are its neighbours


class NotUniform(Exception):
    """The layers of this model differ from each other; the message names the difference."""


@dataclass(frozen=True)
class _Stack:
    """A stack that gets `copies` more middle units, and the blocks that its units make."""

    stack: int
    period: int  # layers of a unit
    copies: int
    unit_of: Mapping[int, int]  # block -> unit
    birth_of: Mapping[int, tuple[str, int]]  # block -> (phase, ordinal in it and in the unit)
    middle: Mapping[tuple[str, int], int]  # birth -> block of the middle unit
    clones: Mapping[tuple[int, int], int]  # (block of the middle unit, copy) -> block
    sizes: Sequence[tuple[int, int, int]]  # of each block

    def unit(self, layer: Layer | None) -> int | None:
        """The unit of a layer of this stack."""
        return layer[1] // self.period if layer is not None and layer[0] == self.stack else None

    def moved(self, layer: Layer | None, copy: int) -> Layer:
        """The layer of this copy of the middle unit, or behind so many copies."""
        assert layer is not None
        return self.stack, layer[1] + copy * self.period

    def repeat(self, events: list[Event]) -> list[Event]:
        """One phase with the middle unit's events once per copy, in the direction in which the
        phase goes through the layers."""
        units = [self.unit(event.layer) for event in events]
        first = {unit: index for index, unit in reversed(list(enumerate(units)))}
        twins = self._twins(events, units)
        order = range(self.copies + 1)
        if first.get(MIDDLE, 0) >= first.get(MIDDLE + 1, len(events)):
            order = order[::-1]
        repeated: list[Event] = []
        for is_middle, group in groupby(events, lambda event: self.unit(event.layer) == MIDDLE):
            run = list(group)
            repeated += (
                [
                    Event(
                        self._seen_from(event.block, copy, twins),
                        event.birth,
                        event.phase,
                        self.moved(event.layer, copy),
                    )
                    for copy in order
                    for event in run
                ]
                if is_middle
                else [extended for event in run for extended in self._outside(event)]
            )
        return repeated

    def _twins(self, events: list[Event], units: list[int | None]) -> dict[int, int]:
        """The blocks of the last unit that the middle unit uses -> the blocks of the middle unit
        that the unit before uses at the same place. The last unit may make them otherwise."""
        before, middle = (
            [event for event, unit in zip(events, units, strict=True) if unit == wanted]
            for wanted in (MIDDLE - 1, MIDDLE)
        )
        if [event.birth for event in before] != [event.birth for event in middle]:
            return {}
        pairs = zip(before, middle, strict=True)
        return {
            late.block: early.block
            for early, late in pairs
            if self.unit_of.get(late.block) == MIDDLE + 1
            and self.unit_of.get(early.block) == MIDDLE
            and self.sizes[late.block] == self.sizes[early.block]
        }

    def _seen_from(self, block: int, copy: int, twins: Mapping[int, int]) -> int:
        """The block that this copy of the middle unit uses where the middle unit uses `block`."""
        unit = self.unit_of.get(block)
        if unit is not None and abs(unit - MIDDLE) <= 1:
            neighbour = copy + unit - MIDDLE
            if not 0 <= neighbour <= self.copies:
                return block
            twin = twins.get(block, self.middle.get(self.birth_of[block]))
            if twin is not None and self.sizes[twin] == self.sizes[block]:
                return self.clones[twin, neighbour]
        raise NotUniform(
            f"the middle layers free block {block} of unit {unit}, which their neighbours do not"
            " have"
        )

    def _outside(self, event: Event) -> list[Event]:
        """The events of the deeper model in place of an event outside the middle unit."""
        owner, unit = self.unit_of.get(event.block), self.unit(event.layer)
        if unit is not None and unit > MIDDLE:
            if owner == MIDDLE - 1:
                raise NotUniform(f"{event.phase}: the last layers free a block of unit {owner}")
            block = self.clones.get((event.block, self.copies), event.block)
            layer = self.moved(event.layer, self.copies)
            return [Event(block, event.birth, event.phase, layer)]
        if owner != MIDDLE or unit == MIDDLE - 1:
            return [event]
        copies = range(self.copies + 1)
        return [
            Event(self.clones[event.block, copy], event.birth, event.phase, event.layer)
            for copy in copies
        ]


def deepen(log: Log, stack: int, layers: int, period: int = 1) -> Log:
    """The log with `layers` instead of shallow_layers(layers, period) layers in that stack.

    Raises NotUniform."""
    of_stack = shallow_layers(layers, period)
    copies = (layers - of_stack) // period
    phases = [list(events) for _, events in groupby(log.events, key=lambda event: event.phase)]
    for events in phases:
        if events[0].phase.startswith(PASSES):
            _complete_layers(events, stack, of_stack, period)
    sizes = [block.sizes for block in log.blocks]
    shallow = _Stack(stack, period, copies, *_births(log, stack, period), {}, sizes)
    blocks, clones = list(log.blocks), {(block, 0): block for block in shallow.middle.values()}
    layer_of = {event.block: event.layer for event in log.events if event.birth}
    for block in shallow.middle.values():
        for copy in range(1, copies + 1):
            clones[block, copy] = len(blocks)
            blocks.append(log.blocks[block].of_layer(shallow.moved(layer_of[block], copy)))
    repeated = replace(shallow, clones=clones)
    events = [event for phase in phases for event in repeated.repeat(phase)]
    for block in log.blocks:
        if (shallow.unit(block.layer) or 0) > MIDDLE:
            block.layer = shallow.moved(block.layer, copies)
    work = dict(log.work)
    for (section, layer), value in log.work.items():
        if shallow.unit(layer) == MIDDLE:
            work[section, layer] = Work()
            work[section, layer].add(value, 1 + copies)
    return Log(blocks, events, work, log.batch)


def _complete_layers(events: list[Event], stack: int, layers: int, period: int) -> None:
    """Give the events of a pass between a layer's first and last event to that layer, and those
    between two layers of a unit to the layer that ran before."""
    for index in range(layers):
        _complete(events, (stack, index), {(stack, index)})
    for start in range(0, layers, period) if period > 1 else ():
        _complete(events, None, {(stack, index) for index in range(start, start + period)})


def _complete(events: list[Event], owner: Layer | None, layers: set[Layer]) -> None:
    """Give the events between the first and the last of these layers to `owner`; None: to the layer
    that ran before."""
    inside = [index for index, event in enumerate(events) if event.layer in layers]
    before = owner
    for event in events[inside[0] : inside[-1]] if inside else []:
        if event.layer is not None and event.layer not in layers:
            raise NotUniform(f"{event.phase}: layers {event.layer} and {max(layers)} overlap")
        event.layer = before = owner or event.layer or before


def _births(
    log: Log, stack: int, period: int
) -> tuple[dict[int, int], dict[int, tuple[str, int]], dict[tuple[str, int], int]]:
    """_Stack.unit_of, birth_of and middle."""
    unit_of: dict[int, int] = {}
    birth_of: dict[int, tuple[str, int]] = {}
    by_unit: dict[int, dict[tuple[str, int], int]] = {index: {} for index in range(UNITS)}
    ordinals: Counter[tuple[str, int]] = Counter()
    for event in log.events:
        if event.birth and event.layer is not None and event.layer[0] == stack:
            index = unit_of[event.block] = event.layer[1] // period
            birth = birth_of[event.block] = (event.phase, ordinals[event.phase, index])
            by_unit[index][birth] = event.block
            ordinals[event.phase, index] += 1
    before, middle = (
        {
            birth: (*block.sizes, block.op)
            for birth, block in ((birth, log.blocks[number]) for birth, number in births.items())
        }
        for births in (by_unit[MIDDLE - 1], by_unit[MIDDLE])
    )
    if not middle.items() <= before.items():
        raise NotUniform(
            f"stack {stack}: units {MIDDLE - 1} and {MIDDLE} of {period} layers allocate"
            " differently"
        )
    return unit_of, birth_of, by_unit[MIDDLE]
