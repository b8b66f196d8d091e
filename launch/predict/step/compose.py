"""Compose a step of any depth and mixture of levers from recorded steps.

A recorded step has a few layers of each stack: the first unit, two that are alike, and the last. A
deeper model does the same with more of the middle one. Each layer of the composed step has the
events that it has in the recorded step of its own way (kept, computed again, ...): where a part
frees what another part has made, what these steps hand on to one another is matched. Everything
outside of layers comes from one of them, whose logits may be made in parts: they are repeated like
layers. What cannot be matched raises NotComposed, and the step is recorded with all its layers.
Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from launch.predict.step.part_sizes import PartSizes
from launch.predict.step.recorded import PASSES, Item, NotComposed, Place, Recorded, Run
from launch.schema.recorded_step import (
    LOSS,
    TRAINED,
    UNITS,
    Block,
    Call,
    Event,
    Layer,
    Log,
    Operator,
)

_CAST = "aten::_to_copy"
NORMS = ("aten::stack", "aten::_foreach_norm")


_Frees = list[tuple[Recorded, int]]  # blocks of layers


class _Free(NamedTuple):
    """The end of a block, behind so many births of a layer."""

    births: int
    block: Place


class Composer:
    """The step whose layers are those of the recorded step that `way_of` names, and all else is
    that of `outer`, which is one of these, with the logits in so many parts of these positions of a
    row (0: of its targets). If some layers compute their activations again, it is the one in which
    all do: it has what they hold.

    Raises NotComposed, also later."""

    def __init__(
        self,
        outer: Recorded,
        way_of: Callable[[Layer], Recorded] | None = None,
        parts: int = 1,
        positions: int = 0,
    ) -> None:
        self.outer, self.parts = outer, parts
        self.way_of = way_of or (lambda layer: outer)
        self.stacks = outer.stacks(parts)
        self.sizes = PartSizes(outer, parts, positions) if LOSS in self.stacks else None
        layers = (
            (stack, layer)
            for stack, row in self.stacks.items()
            if stack != LOSS
            for layer in range(row.layers)
        )
        self.ways = list({id(way): way for way in map(self.way_of, layers)}.values())
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.made: dict[Place, int] = {}  # place, with the layer of the composed step -> block
        self.freed: set[int] = set()
        self.operators: dict[Operator, int] = {}  # -> number
        self._numbers: dict[tuple[int, bool], tuple[int, ...]] = {}  # operators of each run
        self._aligned: dict[tuple[int, str, int], tuple[int, int, int, int]] = {}

    def log(self) -> Log:
        for phase in self.outer.events:
            for step in self.steps(phase):
                if isinstance(step, Event):
                    self._outside(step)
                elif isinstance(step, list):
                    self._free(step, phase)
                else:
                    self._layer(*step)
        self._check_ends()
        calls = [
            Call(number, phase, _moved(call.layer, run.layer, layer))
            for phase in self.outer.calls
            for run, layer, numbers in self.runs(phase)
            for call, number in zip(run.items, numbers, strict=True)
        ]
        return Log(self.blocks, self.events, list(self.operators), calls, self.outer.log.batch)

    def steps(self, phase: str) -> Iterator[Event | _Frees | tuple[Run[Event], Layer, Recorded]]:
        """The events of a phase outside of layers, blocks of layers that other recorded steps free
        between these, and the runs of layers, in their order."""
        inner = [source for source in self.ways if source is not self.outer]
        frees = self._frees_of(inner, phase) if phase.startswith(PASSES) else {}
        area, stack, count = 0, None, 0
        for run, layer, source in self.expanded(phase, lambda source: source.events):
            if layer is None:
                for event in run.items:
                    if event.birth and (area, count) in frees:
                        yield frees.pop((area, count))
                    yield event
                    count += event.birth
                stack = None if stack == LOSS else stack
                continue
            if layer[0] != stack:
                if layer[0] == LOSS:
                    yield frees.pop((area, count), [])
                    count += 1
                else:
                    yield from _frees_in_area(frees, area)
                    area, count = area + 1, 0
                stack = layer[0]
            yield run, layer, source
        yield from _frees_in_area(frees, area)
        if frees:
            raise NotComposed(f"{phase}: blocks of layers are freed at another place")

    # ---- layers

    def expanded(
        self, phase: str, of: Callable[[Recorded], dict[str, list[Run[Item]]]]
    ) -> Iterator[tuple[Run[Item], Layer | None, Recorded]]:
        """The runs of a phase, each with the layer of the composed step that it is of and the
        recorded step that it is from: the middle unit's once per copy, in the direction in which
        the phase goes through the layers."""
        outer = of(self.outer)[phase]

        def of_layer(run: Run[Item], layer: Layer) -> tuple[Run[Item], Layer, Recorded]:
            source, _ = self._source_of(phase, layer)
            if source is self.outer:
                return run, layer, source
            for twin in of(source).get(phase, []):
                if (twin.layer, twin.time) == (run.layer, run.time):
                    return twin, layer, source
            raise NotComposed(f"{phase}: layer {run.layer} has no such events")

        def unit_of(run: Run[Item]) -> tuple[int, int] | None:
            return run.layer and (run.layer[0], self.stacks[run.layer[0]].unit(run.layer[1]))

        units = [*map(unit_of, outer)]
        for unit, group in groupby(outer, unit_of):
            runs = list(group)
            if unit is None:
                yield from ((run, None, self.outer) for run in runs)
                continue
            layers = [self.layers_of(run.layer) for run in runs]
            copies = range(max(map(len, layers)))
            last = unit[0], UNITS - 1
            is_ahead = last not in units or units.index(unit) < units.index(last)
            for copy in copies if is_ahead else reversed(copies):
                for run, of_run in zip(runs, layers, strict=True):
                    if copy < len(of_run):
                        yield of_layer(run, of_run[copy])

    def layers_of(self, recorded: Layer | None) -> list[Layer]:
        """The layers of the composed step that a recorded one stands for."""
        assert recorded is not None
        stack, index = recorded
        return [(stack, layer) for layer in self.stacks[stack].layers_of.get(index, [])]

    def _layer(self, run: Run[Event], layer: Layer, source: Recorded) -> None:
        """The events of a layer, and of blocks that it frees in place of another."""
        phase, count = run.items[0].phase, 0
        moved = self.moved.pop((phase, layer), []) if not run.time else []
        for event in run.items:
            if moved and event.birth:
                for block in [free.block for free in moved if free.births == count]:
                    self._died(self._number_of(block), phase, layer)
                count += 1
            self._inside(event, run, layer, source)
        for free in moved:
            if free.births >= count:
                self._died(self._number_of(free.block), phase, layer)

    def _inside(self, event: Event, run: Run[Event], layer: Layer, source: Recorded) -> None:
        phase = event.phase
        moved = _moved(event.layer, run.layer, layer)
        if not event.birth:
            made_in, owner, number = source.place[event.block]
            if owner == run.layer and made_in.startswith(PASSES):
                self._died(self._number_of((made_in, layer, number)), phase, moved)
                return
            for block in self._blocks_meant(event.block, source, layer):
                self._died(block, phase, moved)
            return
        block = source.log.blocks[event.block]
        row = block.of_layer(_moved(block.layer, run.layer, layer))
        if layer[0] == LOSS and self.sizes is not None:
            self.sizes.of_part(row, event.block, layer[1] == self.parts - 1)
        self._born(row, (phase, layer, source.place[event.block][2]), moved)

    def _blocks_meant(self, block: int, source: Recorded, layer: Layer) -> list[int]:
        """The blocks that this layer means where its recorded layer uses `block`."""
        phase, owner, _ = source.place[block]
        if owner is None:
            return [self._outer_block(block, source)]
        owners = self.layers_of(owner)
        if owner[0] == layer[0]:
            in_pass = phase.startswith(PASSES) and layer[0] != LOSS
            indices = self.stacks[owner[0]].seen_from(layer[1], owner[1], in_pass)
            owners = [(owner[0], index) for index in indices]
        elif len(owners) != 1:
            raise NotComposed(f"{phase}: layer {layer} frees a block of layer {owner}")
        return self._of_layers(block, source, owners)

    def _of_layers(self, block: int, source: Recorded, layers: Sequence[Layer]) -> list[int]:
        """The blocks of these layers that a recorded block stands for."""
        places = (self._of_layer(block, source, each) for each in layers)
        return [self._number_of(place) for place in places if place is not None]

    def _of_layer(self, block: int, source: Recorded, layer: Layer) -> Place | None:
        """The block of this layer that a recorded block stands for; None: its way hands none on."""
        phase, owner, number = source.place[block]
        assert owner is not None
        way, recorded = self._source_of(phase, layer)
        if way is source and recorded == owner:
            return phase, layer, number
        reader, kind = source.reader(block), source.size(block)
        theirs = source.handed_on(phase, owner, reader, kind)
        ours = way.handed_on(phase, recorded, reader, kind)
        # One of the ways hands on more than the layer's output, which both hand on
        if (
            not ours
            and reader == "layer"
            and way.outputs(phase, recorded) & source.outputs(phase, owner)
        ):
            return None
        if len(theirs) != len(ours):
            raise NotComposed(
                f"{phase}: layers {owner} and {recorded} make {len(theirs)} and {len(ours)} blocks"
                f" of {source.log.blocks[block].op} for {reader}"
            )
        return phase, layer, way.place[ours[theirs.index(block)]][2]

    def _source_of(self, phase: str, layer: Layer) -> tuple[Recorded, Layer]:
        """The recorded step of this layer in this phase, and its recorded layer."""
        is_way = phase.startswith(PASSES) and layer[0] != LOSS
        recorded_in = self.way_of(layer) if is_way else self.outer
        return recorded_in, (layer[0], self.stacks[layer[0]].source_of[layer[1]])

    @cached_property
    def moved(self) -> dict[tuple[str, Layer], list[_Free]]:
        """Blocks that a layer frees though its record does not: what was made outside of layers,
        and is held by layers that compute again, in place of the first of them; what the layer
        before hands on, of another way."""
        moved: dict[tuple[str, Layer], list[_Free]] = defaultdict(list)
        if len(self.ways) == 1:
            return moved
        for block in self.outer.area_of:
            phase, owner = self.outer.freed.get(block, ("", None))
            if owner is None or owner[0] == LOSS or not phase.startswith(PASSES):
                continue
            holder = self._holder(block, owner)
            if holder is not None and holder[1] != self.stacks[owner[0]].layers_of[owner[1]][0]:
                births = self._births_before(self.outer, block)
                moved[phase, holder].append(_Free(births, self.outer.place[block]))
        for stack, row in self.stacks.items():
            for index in range(row.layers - 1) if stack != LOSS else ():
                for phase, layer, free in self._only_handed_on((stack, index)):
                    moved[phase, layer].append(free)
        return moved

    def _holder(self, block: int, owner: Layer) -> Layer | None:
        """The layer that frees a block that is made outside of layers, in place of this recorded
        one of `outer`; None: outside of layers."""
        stack = self.stacks[owner[0]]
        first = owner[0], stack.layers_of[owner[1]][0]
        way = self.way_of(first)
        if way is self.outer or way.reader(self._in_way(block, way)) == "layer":
            return first
        alike = range(first[1], stack.layers, stack.period or 1)
        layers = ((owner[0], index) for index in alike)
        return next((layer for layer in layers if self.way_of(layer) is self.outer), None)

    def _in_way(self, block: int, way: Recorded) -> int:
        """The block of a way that stands for one that `outer` makes outside of layers."""
        phase, area, number = self.outer.area_of[block]
        alike = self._alignment(way, phase, area)[0]
        if number >= alike:
            raise NotComposed(f"{phase}: {self.outer.log.blocks[block].op} is of the loss")
        return way.areas[phase, area][number]

    @staticmethod
    def _births_before(source: Recorded, block: int) -> int:
        """The births of the layer that frees a block, before it does."""
        phase, owner = source.freed[block]
        events = [
            event for run in source.events[phase] if run.layer == owner for event in run.items
        ]
        is_end = [event.block == block and not event.birth for event in events]
        return sum(event.birth for event in events[: is_end.index(True)])

    def _only_handed_on(self, layer: Layer) -> Iterator[tuple[str, Layer, _Free]]:
        """Yield the ends of blocks that a layer hands on to the next one, of another way, which
        does not know of them."""
        following = layer[0], layer[1] + 1
        ways = self.way_of(layer), self.way_of(following)
        if ways[0] is ways[1]:
            return
        _, recorded = self._source_of("forward", layer)
        _, next_recorded = self._source_of("forward", following)
        for (phase, owner), blocks in ways[0].births.items():
            for block in blocks if owner == recorded and phase.startswith(PASSES) else ():
                if ways[0].freed.get(block, ("", None))[1] != (layer[0], recorded[1] + 1):
                    continue
                kind = phase, (layer[0], next_recorded[1] - 1), "layer", ways[0].size(block)
                if not ways[1].handed_on(*kind):
                    place = phase, layer, ways[0].place[block][2]
                    freed_in = ways[0].freed[block][0]
                    yield freed_in, following, _Free(self._births_before(ways[0], block), place)

    # ---- outside of layers

    def _outside(self, event: Event) -> None:
        if not event.birth:
            self._free([(self.outer, event.block)], event.phase, event.layer)
            return
        row = self.outer.log.blocks[event.block].of_layer(event.layer)
        if self.sizes is not None:
            self.sizes.outside(row)
        self._born(row, self.outer.place[event.block], event.layer)

    def _one_a_parameter(self, row: Block) -> None:
        """Change a list of the norms of all gradients, or their addresses."""
        recorded, composed = self._trained
        if recorded and row.fixed_bytes and not row.fixed_bytes % recorded:
            row.fixed_bytes = row.fixed_bytes // recorded * composed

    @cached_property
    def _trained(self) -> tuple[int, int]:
        """The numbers of trained parameters, recorded and composed; asked after all are made."""
        recorded, composed = (
            sum(block.op == TRAINED for block in blocks)
            for blocks in (self.outer.log.blocks, self.blocks)
        )
        return recorded, composed

    def _frees_of(self, sources: Sequence[Recorded], phase: str) -> dict[tuple[int, int], _Frees]:
        """Blocks of layers that other recorded steps free outside of layers, by area and by the
        number of the birth in `outer` before which they do."""
        frees: dict[tuple[int, int], _Frees] = defaultdict(list)
        for source in sources:
            counts: dict[int, int] = defaultdict(int)
            for area, event in source.outside(phase):
                if event is None or event.birth:
                    counts[area] += 1
                elif self._is_freed_here(source, event.block):
                    place = self._place_in(source, phase, area, counts[area], event.block)
                    frees[area, place].append((source, event.block))
        return frees

    def _is_freed_here(self, source: Recorded, block: int) -> bool:
        owner = source.place[block][1]
        if owner is not None:
            layers = () if owner[0] == LOSS else self.layers_of(owner)
            return any(self.way_of(layer) is source for layer in layers)
        ours = self._in_outer(block, source)
        if ours is None or self.outer.reader(ours) != "layer":
            return False
        freed_by = self.outer.freed[ours][1]
        assert freed_by is not None
        return self._holder(ours, freed_by) is None

    def _free(self, blocks: _Frees, phase: str, attribute: Layer | None = None) -> None:
        """End blocks that are freed outside of layers; in place of a layer's block that of each
        layer, in a pass of those of its way."""
        for source, block in blocks:
            birth, owner, _ = source.place[block]
            if owner is None:
                self._died(self._outer_block(block, source), phase, attribute)
                continue
            layers = self.layers_of(owner)
            if phase.startswith(PASSES):
                layers = [each for each in layers if self._source_of(birth, each)[0] is source]
            for number in self._of_layers(block, source, layers):
                self._died(number, phase, attribute)

    def _outer_block(self, block: int, source: Recorded) -> int:
        """The block outside of layers that stands for this one."""
        ours = self._in_outer(block, source)
        if ours is None:
            operator = source.log.blocks[block].op
            raise NotComposed(f"{source.place[block][0]}: a layer frees {operator} of the loss")
        return self._number_of(self.outer.place[ours])

    def _in_outer(self, block: int, source: Recorded) -> int | None:
        """The block of `outer` that stands for one that is made outside of layers."""
        if source is self.outer:
            return block
        phase, area, number = source.area_of[block]
        alike, at_end, count, ours = self._alignment(source, phase, area)
        if alike <= number < count - at_end:
            return None
        index = number if number < alike else ours - (count - number)
        return self.outer.areas[phase, area][index]

    def _place_in(self, source: Recorded, phase: str, area: int, count: int, block: int) -> int:
        """The number of births in an area of `outer` before a block of a layer is freed that is
        freed behind `count` of those of `source`. Casts are freed where autocast ends."""
        alike, at_end, births, ours = self._alignment(source, phase, area)
        if count == births:
            return ours
        if count <= alike:
            return count
        if births - count <= at_end:
            return ours - (births - count)
        place = self._end_of_autocast(phase, area)
        if place is None or source.log.blocks[block].op != _CAST:
            raise NotComposed(f"{phase}: blocks of layers are freed within the loss")
        return place

    def _end_of_autocast(self, phase: str, area: int) -> int | None:
        """The number of births in an area behind which casts of layers are freed."""
        count, log = 0, self.outer.log
        for event in (event for number, event in self.outer.outside(phase) if number == area):
            if event is None or event.birth:
                count += 1
            elif log.blocks[event.block].op == _CAST and self.outer.place[event.block][1]:
                return count
        return None

    def _alignment(self, source: Recorded, phase: str, area: int) -> tuple[int, int, int, int]:
        """The births of an area that are alike from its beginning, and those up to its end, of all
        in `source` and in `outer`."""
        key = id(source), phase, area
        if key not in self._aligned:
            theirs = [source.size(block) for block in source.areas.get((phase, area), [])]
            ours = [self.outer.size(block) for block in self.outer.areas.get((phase, area), [])]
            alike, at_end = _common(theirs, ours), _common(theirs[::-1], ours[::-1])
            self._aligned[key] = alike, at_end, len(theirs), len(ours)
        return self._aligned[key]

    # ---- the composed log

    def _number_of(self, place: Place) -> int:
        if place not in self.made:
            raise NotComposed(f"{place}: no such block")
        return self.made[place]

    def _born(self, block: Block, place: Place, layer: Layer | None) -> None:
        number = self.made[place] = len(self.blocks)
        if place[0] == "optimizer" and block.op in NORMS:
            self._one_a_parameter(block)
        self.blocks.append(block)
        self.events.append(Event(number, True, place[0], layer))

    def _died(self, block: int, phase: str, layer: Layer | None) -> None:
        if block in self.freed:
            raise NotComposed(f"{phase}: {self.blocks[block].op} is freed twice")
        self.freed.add(block)
        self.events.append(Event(block, False, phase, layer))

    def _check_ends(self) -> None:
        """Raises NotComposed unless each block lives as long as in its recorded step."""
        for (phase, layer, index), number in self.made.items():
            source, owner = (self.outer, None) if layer is None else self._source_of(phase, layer)
            recorded = source.births[phase, owner][index]
            if (recorded in source.freed) == (number not in self.freed):
                raise NotComposed(
                    f"{phase}: {self.blocks[number].op} of {layer} is freed in one way only"
                )

    def runs(self, phase: str) -> Iterator[tuple[Run[Call], Layer | None, tuple[int, ...]]]:
        """The runs of a phase, each with the layer that it is of and the numbers of its
        operators."""
        for run, layer, source in self.expanded(phase, lambda source: source.calls):
            is_last = layer is not None and layer == (LOSS, self.parts - 1)
            key = id(run), is_last
            if key not in self._numbers:
                self._numbers[key] = tuple(
                    self._number(call, run, layer, source) for call in run.items
                )
            yield run, layer, self._numbers[key]

    def _number(self, call: Call, run: Run[Call], layer: Layer | None, source: Recorded) -> int:
        operator = source.log.operators[call.operator]
        if self.sizes is not None:
            operator = self.sizes.operator(operator, call, run.layer, layer)
        return self.operators.setdefault(operator, len(self.operators))


def _frees_in_area(frees: dict[tuple[int, int], _Frees], area: int) -> Iterator[_Frees]:
    for key in sorted(key for key in frees if key[0] == area):
        yield frees.pop(key)


def _moved(named: Layer | None, recorded: Layer | None, layer: Layer | None) -> Layer | None:
    """The layer in place of a recorded one; a part of the logits is none."""
    if named is None or named[0] == LOSS or layer is None:
        return None if named is not None and named[0] == LOSS else named
    return layer if named == recorded else named


def _common(first_items: Sequence[object], second_items: Sequence[object]) -> int:
    """The length of the common beginning."""
    pairs = zip(first_items, second_items, strict=False)
    return next(
        (index for index, (first, second) in enumerate(pairs) if first != second),
        min(len(first_items), len(second_items)),
    )
