"""Sizes in a step whose logits are made in another number of parts than were recorded. Pure."""

import math
from dataclasses import replace

from launch.predict.step.recorded import NotComposed, Recorded
from launch.schema.recorded_step import LOSS, PARTS, Block, Call, Layer, Operator

_STACKED = ("aten::stack", "aten::cat")  # operators that stack the sums of the parts
_SUM_BYTES = 4  # one sum, in float32


class PartSizes:
    """Sizes in a step whose logits are made in another number of parts. They grow evenly with the
    positions of a part: a block of a part is compared with that of the last part, which is
    shorter."""

    def __init__(self, outer: Recorded, parts: int, positions: int) -> None:
        self.outer, self.parts = outer, parts
        self.recorded = outer.recorded_layers[LOSS]
        self.lengths = _lengths(positions, self.recorded)
        self.wanted = _lengths(positions, parts)
        if positions and self.lengths[0] == self.lengths[1] and self.lengths != self.wanted:
            raise NotComposed(f"{self.recorded} recorded parts of the logits are equally long")
        if positions and min(self.wanted) == 1:
            raise NotComposed("a part of the logits has a single position")
        self.has_lengths = bool(positions) and self.lengths[0] != self.lengths[1]

    def of_part(self, row: Block, recorded: int, is_last: bool) -> None:
        """Change a block of a part, which is like this recorded one."""
        self.outside(row)
        if not self.has_lengths:
            return
        twin = self.outer.twins.get(recorded)
        if twin is None:
            if row.sample_bytes or self.outer.log.batch == 1:
                raise NotComposed(f"{row.op}: only one of the parts of the logits makes it")
            return
        owner = self.outer.place[recorded][1]
        other = self.outer.log.blocks[twin]

        def grown(recorded_size: int, of_other: int) -> int:
            size = self._grown(recorded_size, of_other, owner == (LOSS, self.recorded - 1), is_last)
            if size != int(size):
                raise NotComposed(
                    f"{row.op}: {recorded_size} and {of_other} bytes in parts of the logits"
                )
            return int(size)

        row.fixed_bytes = grown(row.fixed_bytes, other.fixed_bytes)
        row.sample_bytes = grown(row.sample_bytes, other.sample_bytes)
        if row.sum is not None and other.sum is not None:
            rows = grown(row.sum.fixed_rows, other.sum.fixed_rows)
            of_sample = grown(row.sum.sample_rows, other.sum.sample_rows)
            row.sum = replace(row.sum, fixed_rows=rows, sample_rows=of_sample)

    def _grown(self, size: float, other: float, of_last: bool, is_last: bool) -> float:
        """A size in another part, by its sizes in the last part and in one of the others."""
        length, other_length = self.lengths[of_last], self.lengths[not of_last]
        slope = (size - other) / (length - other_length)
        return size + slope * (self.wanted[is_last] - length)

    def outside(self, row: Block) -> None:
        """Change a block outside of parts."""
        row.target_bytes += self.parts * row.all_target_bytes
        row.all_target_bytes = 0
        if row.op in _STACKED and row.sizes == (_SUM_BYTES * self.recorded, 0, 0):
            row.fixed_bytes = _SUM_BYTES * self.parts

    def operator(
        self, operator: Operator, call: Call, recorded: Layer | None, layer: Layer | None
    ) -> Operator:
        """The work of a call in a part, or outside of parts."""
        flops, moved = operator.flops, operator.bytes
        in_part = layer is not None and layer[0] == LOSS
        of_targets = any((*flops[2:], *moved[2:]))
        if not (in_part or of_targets or operator.name in (*_STACKED, "aten::sum")):
            return operator
        if layer is not None and layer[0] == LOSS and self.has_lengths and recorded is not None:
            other = self.outer.twin_operators.get((call.phase, recorded, call.operator))
            if other is not None:
                of_last, is_last = recorded[1] == self.recorded - 1, layer[1] == self.parts - 1
                flops, moved = (
                    tuple(
                        self._grown(size, twins_size, of_last, is_last)
                        for size, twins_size in zip(sizes, twins_own, strict=True)
                    )
                    for sizes, twins_own in ((flops, other.flops), (moved, other.bytes))
                )
        # outside of parts a call that has to do with one has to do with all
        times = 1 if layer is not None and layer[0] == LOSS else self.parts / self.recorded
        flops, moved = (
            (fixed, sample, times * target + self.parts * of_all, 0)
            for fixed, sample, target, of_all in (flops, moved)
        )
        if operator.name in _STACKED and moved == (2 * _SUM_BYTES * self.recorded, 0, 0, 0):
            moved = (2 * _SUM_BYTES * self.parts, 0, 0, 0)
        if operator.name == "aten::sum" and moved == (_SUM_BYTES * (self.recorded + 1), 0, 0, 0):
            moved = (_SUM_BYTES * (self.parts + 1), 0, 0, 0)
        return replace(operator, flops=flops, bytes=moved)


def _lengths(positions: int, parts: int) -> tuple[int, int]:
    """Positions of a part of the logits, and of the last."""
    length = math.ceil(positions / parts)
    return length, positions - length * (parts - 1)


def made_parts(positions: int, parts: int) -> int:
    """The parts that the positions of a row make, as the trainer divides them."""
    return math.ceil(positions / math.ceil(positions / parts)) if positions else parts


def uneven_parts(positions: int) -> int:
    """The fewest parts to record, of which the last is shorter; 0: there are none."""
    counts = (made_parts(positions, parts) for parts in range(PARTS, positions + 1))
    return next((n for n in counts if n >= PARTS and len({*_lengths(positions, n)}) > 1), 0)
