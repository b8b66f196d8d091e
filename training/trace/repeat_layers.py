"""From the log of a model with few layers to the log of the same model with many: one layer
repeated, event by event.

Layers of a stack are alike, so a deeper model does what the shallow one does, with more of the
middle. Where they are not (a neighbour but one is touched, two layers do different things)
NotUniform is raised: the model is traced whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from training.trace.recorder import Block, Event, Layer, Log, Work

TRACED = 4  # layers of a shallow stack: first, two alike, last
PASSES = ("forward", "backward")  # phases that go through each layer once
MIDDLE = 2  # the one that is repeated; its neighbours are middles too, or as good as


class NotUniform(Exception):
    """The layers of this model differ from each other; the message says where."""


@dataclass(frozen=True)
class _Stack:
    """Where the blocks of one stack's layers 1, 2 and 3 are born: phase and ordinal within it, per
    layer."""

    home: Mapping[int, int]  # block -> layer
    key: Mapping[int, tuple[str, int]]  # block -> (phase, ordinal)
    middle: Mapping[tuple[str, int], int]  # key -> block of the middle layer


def deepen(log: Log, stack: int, layers: int) -> Log:
    """The log with `layers` instead of TRACED layers in that stack.

    Raises NotUniform."""
    copies = layers - TRACED
    phases = _phases(log, stack)
    known = _stack(log, phases, stack)
    blocks = list(log.blocks)
    clones: dict[tuple[int, int], int] = {}
    for block, layer in known.home.items():
        if layer == MIDDLE:
            clones[block, 0] = block
            for copy in range(1, copies + 1):
                clones[block, copy] = len(blocks)
                blocks.append(replace(log.blocks[block], layer=(stack, MIDDLE + copy)))
    events: list[Event] = []
    for phase in phases:
        events += _repeated(phase, stack, copies, known, clones)
    for block in blocks[: len(log.blocks)]:
        if block.layer is not None and block.layer[0] == stack and block.layer[1] > MIDDLE:
            block.layer = (stack, block.layer[1] + copies)
    work = {key: value for key, value in log.work.items() if key[1] is None or key[1][0] != stack}
    for (section, layer), value in log.work.items():
        if layer is not None and layer[0] == stack:
            work[section, layer] = Work()
            work[section, layer].add(value, 1 + copies if layer[1] == MIDDLE else 1)
    return Log(blocks, events, work, log.batch)


def _phases(log: Log, stack: int) -> list[list[Event]]:
    """The events cut where the phase changes; in a pass, what lies in a layer's run and names none
    is that layer's."""
    found: list[list[Event]] = []
    for event in log.events:
        if not found or found[-1][-1].phase != event.phase:
            found.append([])
        found[-1].append(event)
    for events in found:
        if not events[0].phase.startswith(PASSES):
            continue
        for index in range(TRACED):
            inside = [at for at, event in enumerate(events) if event.layer == (stack, index)]
            for event in events[inside[0] : inside[-1]] if inside else []:
                if event.layer is None:
                    event.layer = (stack, index)
                elif event.layer != (stack, index):
                    raise NotUniform(
                        f"{event.phase}: layers {event.layer} and {(stack, index)} overlap"
                    )
    return found


def _stack(log: Log, phases: list[list[Event]], stack: int) -> _Stack:
    home: dict[int, int] = {}
    key: dict[int, tuple[str, int]] = {}
    by_layer: dict[int, dict[tuple[str, int], int]] = {index: {} for index in range(TRACED)}
    for events in phases:
        ordinals = dict.fromkeys(range(TRACED), 0)
        for event in events:
            if event.birth and event.layer is not None and event.layer[0] == stack:
                index = event.layer[1]
                home[event.block] = index
                key[event.block] = (event.phase, ordinals[index])
                by_layer[index][key[event.block]] = event.block
                ordinals[index] += 1
    if not all(
        _alike(log.blocks, by_layer[MIDDLE - 1].get(name), block)
        for name, block in by_layer[MIDDLE].items()
    ):
        raise NotUniform(f"stack {stack}: layers {MIDDLE - 1} and {MIDDLE} allocate differently")
    return _Stack(home, key, by_layer[MIDDLE])


def _alike(blocks: list[Block], one: int | None, other: int) -> bool:
    if one is None:
        return False
    first, second = blocks[one], blocks[other]
    return (first.fixed_bytes, first.sample_bytes, first.op) == (
        second.fixed_bytes,
        second.sample_bytes,
        second.op,
    )


def _repeated(
    events: list[Event],
    stack: int,
    copies: int,
    known: _Stack,
    clones: Mapping[tuple[int, int], int],
) -> list[Event]:
    """One phase with the middle layer's run repeated in the order in which the phase goes through
    the layers."""
    first = {event.layer: at for at, event in reversed(list(enumerate(events)))}
    upwards = first.get((stack, MIDDLE), 0) < first.get((stack, MIDDLE + 1), len(events))
    order = range(copies + 1) if upwards else range(copies, -1, -1)
    found: list[Event] = []
    for is_middle, run in groupby(events, key=lambda event: event.layer == (stack, MIDDLE)):
        if not is_middle:
            found += [new for event in run for new in _outside(event, stack, copies, known, clones)]
            continue
        repeated = list(run)
        for copy in order:
            for event in repeated:
                block = _seen_from(event.block, copy, copies, known, clones)
                found.append(Event(block, event.birth, event.phase, (stack, MIDDLE + copy)))
    return found


def _seen_from(
    block: int, copy: int, copies: int, known: _Stack, clones: Mapping[tuple[int, int], int]
) -> int:
    """The block that this copy of the middle layer means where the middle layer means `block`."""
    layer = known.home.get(block)
    if layer == MIDDLE:
        return clones[block, copy]
    if layer == MIDDLE - 1 or layer == MIDDLE + 1:
        neighbour = copy + layer - MIDDLE
        if not 0 <= neighbour <= copies:
            return block
        twin = known.middle.get(known.key[block])
        if twin is not None:
            return clones[twin, neighbour]
    raise NotUniform(
        f"a middle layer frees block {block} of layer {layer}, which its neighbours do not have"
    )


def _outside(
    event: Event, stack: int, copies: int, known: _Stack, clones: Mapping[tuple[int, int], int]
) -> list[Event]:
    """An event of another layer or of none, as the deeper model has it."""
    layer: Layer | None = event.layer
    if layer is not None and layer[0] == stack and layer[1] > MIDDLE:
        moved = replace(event, layer=(stack, layer[1] + copies))
        if known.home.get(event.block) == MIDDLE:
            return [replace(moved, block=clones[event.block, copies])]
        if known.home.get(event.block) == MIDDLE - 1:
            raise NotUniform(f"{event.phase}: the last layer frees a block of layer {MIDDLE - 1}")
        return [moved]
    if known.home.get(event.block) != MIDDLE or (
        layer is not None and layer == (stack, MIDDLE - 1)
    ):
        return [event]
    return [replace(event, block=clones[event.block, copy]) for copy in range(copies + 1)]
