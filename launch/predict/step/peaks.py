"""Reduce a traced log to the few moments that are the peak of each section at any micro-batch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from launch.schema.recorded_step import Log

SECTIONS = (
    "forward",
    "backward",
    "optimizer",
    "evaluation",
)  # phases of the step, and the evaluation after it
# Fewest and most targets of a sample in a part of the logits; ratio up to which two numbers are as
# many
_TARGETS_A_SAMPLE, _AS_MANY = (2.0**-10, 2.0**20), 1.01
# (x, y): micro-batches whose highest sums show that most others are highest nowhere
_DIRECTIONS = [(4**x, 16**y if y else 0) for x in range(8) for y in range(5)]
Sizes = tuple[int, int, int]  # fixed, per sample, per target
NOTHING: Sizes = (0, 0, 0)
# kinds of blocks, by the phase in which they are born
_BORN_IN = {"start:weights": "weights", "start:optimizer": "optimizer", "input": "input"}
# kinds of blocks that outlive the phase in which they are born, by its section
LASTING = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}


def kinds(log: Log) -> list[str]:
    """The purpose of each block, by the phases of its birth and its death, unless the block names
    it: logits and buffers do."""
    died = {event.block: event.phase for event in log.events if not event.birth}
    return [
        block.kind or _BORN_IN.get(block.born) or _lasting_kind(block.born, died.get(number))
        for number, block in enumerate(log.blocks)
    ]


def _lasting_kind(born: str, died: str | None) -> str:
    section = "" if born == died else born.partition(":")[0]
    return LASTING.get(section, "temporaries")


def plus(some: Sizes, added: Sizes, times: int = 1) -> Sizes:
    """The sum of sizes, of which the second counts so many times."""
    return (
        some[0] + times * added[0],
        some[1] + times * added[1],
        some[2] + times * added[2],
    )


def peaks(log: Log) -> list[dict[str, Any]]:
    """The moments that are the peak of their section at any micro-batch: bytes of each kind as
    [fixed, per sample, per target]."""
    highest = {
        section: [moments[index] for index in _highest([totals for _, totals in moments])]
        for section, moments in _moments(log).items()
    }
    wanted = {moment for moments in highest.values() for moment, _ in moments}
    parts = dict(_parts(log, wanted))
    return [
        {
            "section": section,
            "op": log.blocks[log.events[moment].block].op.removeprefix("aten::"),
            "parts": parts[moment],
        }
        for section in SECTIONS
        for moment, _ in highest.get(section, [])
    ]


def _moments(log: Log) -> dict[str, list[tuple[int, Sizes]]]:
    """Of each section the moments behind which memory is given back, and its first; (index of the
    event, bytes in all). Of moments with the same bytes the first."""
    phases, sizes = [event.phase for event in log.events], [block.sizes for block in log.blocks]
    begins = [phase != before for phase, before in zip(phases, ["", *phases], strict=False)]
    counted = [
        index
        for index, event in enumerate(log.events)
        if begins[index] or sizes[event.block] != NOTHING
    ]
    moments: dict[str, dict[Sizes, int]] = defaultdict(dict)
    live = NOTHING
    for index, following in zip(counted, [*counted[1:], None], strict=True):
        event = log.events[index]
        live = plus(live, sizes[event.block], 1 if event.birth else -1)
        grows = following is not None and log.events[following].birth and not begins[following]
        if (event.birth and not grows) or (begins[index] and not event.birth):
            moments[event.phase.partition(":")[0]].setdefault(live, index)
    return {
        section: [(index, totals) for totals, index in moments[section].items()]
        for section in SECTIONS
        if section in moments
    }


def _parts(log: Log, wanted: set[int]) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """Bytes of each kind at these moments."""
    kind_of = kinds(log)
    live = {kind: [0, 0, 0] for kind in sorted(set(kind_of))}
    for index, event in enumerate(log.events):
        of_kind, sign = live[kind_of[event.block]], 1 if event.birth else -1
        for place, size in enumerate(log.blocks[event.block].sizes):
            of_kind[place] += sign * size
        if index in wanted:
            yield index, {kind: [*sizes] for kind, sizes in live.items() if any(sizes)}


def _highest(totals: Sequence[Sizes]) -> list[int]:
    """Indices of the sums fixed + samples * x + targets * y that are highest for some x >= 1 and
    y >= 0."""
    rivals = _rivals(totals)
    return [rivals[index] for index in _highest_of([totals[rival] for rival in rivals])]


def _rivals(totals: Sequence[Sizes]) -> list[int]:
    """Indices of the sums that are not lower than one of the highest for every x and y: a few of
    ten thousand."""
    highest = {
        max(totals, key=lambda sizes, x=x, y=y: sizes[0] + x * sizes[1] + y * sizes[2])
        for x, y in _DIRECTIONS
    }

    def is_lower(sizes: Sizes) -> bool:
        fixed, sample, target = sizes
        return any(
            target <= high[2]
            and sample <= high[1]
            and fixed <= high[0]
            and (fixed < high[0] or sample < high[1])
            for high in highest
        )

    return [index for index, sizes in enumerate(totals) if not is_lower(sizes)]


def _highest_of(totals: Sequence[Sizes]) -> list[int]:
    if not any(target for _, _, target in totals):
        return list(_upper([(fixed, sample) for fixed, sample, _ in totals]))

    def highest(targets: float) -> frozenset[int]:
        """The highest, if every sample has so many targets."""
        return frozenset(
            _upper([(fixed, sample + targets * target) for fixed, sample, target in totals])
        )

    def between(low: float, high: float, ends: tuple[frozenset[int], frozenset[int]]) -> set[int]:
        if ends[0] == ends[1] or high < low * _AS_MANY:
            return {*ends[0], *ends[1]}
        middle = (low * high) ** 0.5
        of_middle = highest(middle)
        return between(low, middle, (ends[0], of_middle)) | between(
            middle, high, (of_middle, ends[1])
        )

    low, high = _TARGETS_A_SAMPLE
    return sorted(highest(0) | between(low, high, (highest(low), highest(high))))


def _upper(lines: Sequence[tuple[float, float]]) -> Iterator[int]:
    """Indices of the lines fixed + samples * x that are highest for an x >= 1, in the order of
    x."""
    index = max(range(len(lines)), key=lambda line: (sum(lines[line]), lines[line][1], line))
    while True:
        yield index
        fixed, slope = lines[index]
        steeper = [
            ((fixed - other) / (steep - slope), -steep, line)
            for line, (other, steep) in enumerate(lines)
            if steep > slope
        ]
        if not steeper:
            return
        index = min(steeper)[2]
