"""Extend the log of a model with few layers to the same model with many, event by event: the middle
layer is repeated.

The layers of a stack are alike, so a deeper model does the same with more of the middle. If they
differ (a layer frees a block of a distant layer, or two layers allocate differently), NotUniform is
raised, and the model is traced with all its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from training.trace.recorder import Event, Log, Work

TRACED = 4  # layers of a shallow stack: first, two alike, last
PASSES = ("forward", "backward")  # phases that go through each layer once
MIDDLE = 2  # the layer that is repeated; layers 1 and 3 are its neighbours


class NotUniform(Exception):
    """The layers of this model differ from each other; the message names the difference."""


@dataclass(frozen=True)
class _Stack:
    """A stack that gets `copies` more middle layers, and the blocks that its layers make."""

    stack: int
    copies: int
    layer_of: Mapping[int, int]  # block -> layer
    birth_of: Mapping[int, tuple[str, int]]  # block -> (phase, ordinal in it and in the layer)
    middle: Mapping[tuple[str, int], int]  # birth -> block of the middle layer
    clones: Mapping[tuple[int, int], int]  # (block of the middle layer, copy) -> block

    def repeat(self, events: list[Event]) -> list[Event]:
        """One phase with the middle layer's events once per copy, in the direction in which the
        phase goes through the layers."""
        first = {event.layer: index for index, event in reversed(list(enumerate(events)))}
        middle, last = (self.stack, MIDDLE), (self.stack, MIDDLE + 1)
        order = range(self.copies + 1)
        if first.get(middle, 0) >= first.get(last, len(events)):
            order = order[::-1]
        repeated: list[Event] = []
        for is_middle, group in groupby(events, key=lambda event: event.layer == middle):
            run = list(group)
            repeated += (
                [
                    replace(
                        event,
                        block=self._seen_from(event.block, copy),
                        layer=(self.stack, MIDDLE + copy),
                    )
                    for copy in order
                    for event in run
                ]
                if is_middle
                else [extended for event in run for extended in self._outside(event)]
            )
        return repeated

    def _seen_from(self, block: int, copy: int) -> int:
        """The block that this copy of the middle layer uses where the middle layer uses `block`."""
        layer = self.layer_of.get(block)
        if layer is not None and abs(layer - MIDDLE) <= 1:
            neighbour = copy + layer - MIDDLE
            if not 0 <= neighbour <= self.copies:
                return block
            twin = self.middle.get(self.birth_of[block])
            if twin is not None:
                return self.clones[twin, neighbour]
        raise NotUniform(
            f"a middle layer frees block {block} of layer {layer}, which its neighbours do not have"
        )

    def _outside(self, event: Event) -> list[Event]:
        """The events of the deeper model in place of an event outside the middle layer."""
        owner = self.layer_of.get(event.block)
        if event.layer is not None and event.layer[0] == self.stack and event.layer[1] > MIDDLE:
            if owner == MIDDLE - 1:
                raise NotUniform(f"{event.phase}: the last layer frees a block of layer {owner}")
            block = self.clones.get((event.block, self.copies), event.block)
            return [replace(event, block=block, layer=(self.stack, event.layer[1] + self.copies))]
        if owner != MIDDLE or event.layer == (self.stack, MIDDLE - 1):
            return [event]
        copies = range(self.copies + 1)
        return [replace(event, block=self.clones[event.block, copy]) for copy in copies]


def deepen(log: Log, stack: int, layers: int) -> Log:
    """The log with `layers` instead of TRACED layers in that stack.

    Raises NotUniform."""
    copies = layers - TRACED
    phases = [list(events) for _, events in groupby(log.events, key=lambda event: event.phase)]
    for events in phases:
        if events[0].phase.startswith(PASSES):
            _complete_layers(events, stack)
    layer_of, birth_of, middle = _births(log, stack)
    blocks, clones = list(log.blocks), {(block, 0): block for block in middle.values()}
    for block in middle.values():
        for copy in range(1, copies + 1):
            clones[block, copy] = len(blocks)
            blocks.append(replace(log.blocks[block], layer=(stack, MIDDLE + copy)))
    repeated = _Stack(stack, copies, layer_of, birth_of, middle, clones)
    events = [event for phase in phases for event in repeated.repeat(phase)]
    for block in log.blocks:
        if block.layer is not None and block.layer[0] == stack and block.layer[1] > MIDDLE:
            block.layer = (stack, block.layer[1] + copies)
    work = dict(log.work)
    for (section, layer), value in log.work.items():
        if layer == (stack, MIDDLE):
            work[section, layer] = Work()
            work[section, layer].add(value, 1 + copies)
    return Log(blocks, events, work, log.batch)


def _complete_layers(events: list[Event], stack: int) -> None:
    """Give the events of a pass between a layer's first and last event to that layer."""
    for layer in ((stack, index) for index in range(TRACED)):
        inside = [index for index, event in enumerate(events) if event.layer == layer]
        for event in events[inside[0] : inside[-1]] if inside else []:
            if event.layer not in (None, layer):
                raise NotUniform(f"{event.phase}: layers {event.layer} and {layer} overlap")
            event.layer = layer


def _births(
    log: Log, stack: int
) -> tuple[dict[int, int], dict[int, tuple[str, int]], dict[tuple[str, int], int]]:
    """_Stack.layer_of, birth_of and middle."""
    layer_of: dict[int, int] = {}
    birth_of: dict[int, tuple[str, int]] = {}
    by_layer: dict[int, dict[tuple[str, int], int]] = {index: {} for index in range(TRACED)}
    ordinals: Counter[tuple[str, int]] = Counter()
    for event in log.events:
        if event.birth and event.layer is not None and event.layer[0] == stack:
            index = layer_of[event.block] = event.layer[1]
            birth = birth_of[event.block] = (event.phase, ordinals[event.phase, index])
            by_layer[index][birth] = event.block
            ordinals[event.phase, index] += 1
    before, middle = (
        {
            birth: (block.fixed_bytes, block.sample_bytes, block.op)
            for birth, block in ((birth, log.blocks[number]) for birth, number in births.items())
        }
        for births in (by_layer[MIDDLE - 1], by_layer[MIDDLE])
    )
    if not middle.items() <= before.items():
        raise NotUniform(f"stack {stack}: layers {MIDDLE - 1} and {MIDDLE} allocate differently")
    return layer_of, birth_of, by_layer[MIDDLE]
