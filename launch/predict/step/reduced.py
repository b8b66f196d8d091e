"""Reduce a step to what is kept of it: the few moments that are the peak of each section at any
micro-batch, the operators in runs that like layers share, and the log as a replay needs it. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from itertools import groupby
from typing import Any

from launch.predict.step.recorded import PASSES
from launch.predict.step.rewrite_log import FLAT, GRADIENTS, SLICE
from launch.schema.plan import PAGED, Born
from launch.schema.recorded_step import (
    PACKED,
    SCALES,
    TRAINED,
    UPDATE,
    Block,
    Log,
    Operator,
    Passes,
    grouped,
    operator_of,
)

# phases of the step, and the evaluation after it
SECTIONS = ("forward", "backward", "optimizer", "evaluation")
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
PassRun = tuple[str, tuple[int, ...]]  # phase, and numbers of operators
# phases beside the passes -> their field of Passes
_FIELDS = {"optimizer": "update", "zero": "update", "evaluation": "evaluation"}
OF_STEP = (*PASSES, "optimizer", "zero")


# ---- peaks
# ---------------------------------------------------------------------------


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
    parts = dict(_parts(log, {moment for moments in highest.values() for moment, _ in moments}))
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


# ---- operators
# ---------------------------------------------------------------------------


def passes_of_runs(operators: Iterable[Operator], runs: Iterable[PassRun]) -> Passes:
    """The passes that are made of these runs, in their order; phases that take no time are left
    out."""
    numbers: dict[tuple[int, ...], int] = {}
    sections: dict[str, list[int]] = {name: [] for name in _FIELDS.values()}
    for phase, run in runs:
        if phase.startswith((*PASSES, *_FIELDS)):
            section = sections.setdefault(_FIELDS.get(phase, phase.partition(":")[2]), [])
            section.append(numbers.setdefault(run, len(numbers)))
    update, evaluation, *micro_steps = (
        [(number, len([*alike])) for number, alike in groupby(section)]
        for section in sections.values()
    )
    return Passes([*operators], [*numbers], micro_steps, update, evaluation)


def passes_of_log(log: Log) -> Passes:
    """The passes of a recorded or composed step."""
    runs = (
        (phase, tuple(call.operator for call in calls))
        for (phase, _), calls in groupby(log.calls, lambda call: (call.phase, call.layer))
    )
    return passes_of_runs(log.operators, runs)


def stored_passes(passes: Passes) -> dict[str, Any]:
    """The passes as a file has them."""
    used = {number for run in passes.runs for number in run}
    operators = [
        astuple(operator) if number in used else None
        for number, operator in enumerate(passes.operators)
    ]
    return {**vars(passes), "operators": operators}


def read_passes(content: Mapping[str, Any]) -> Passes:
    """The passes of a file."""
    rows: Sequence[Any] = content["operators"]
    operators = [operator_of(row) if row else Operator("", "view") for row in rows]
    sections = [*content["micro_steps"], content["update"], content["evaluation"]]
    *micro_steps, update, evaluation = [[(run, n) for run, n in each] for each in sections]
    return Passes(operators, content["runs"], micro_steps, update, evaluation)


# ---- the log of a replay
# ---------------------------------------------------------------------------


def replay_content(log: Log, turns: Mapping[str, Log]) -> dict[str, Any]:
    """The parts of a step's log, and of those of its special turns, that a replay needs."""
    return _content(log) | {"turns": {turn: _content(turns[turn]) for turn in turns}}


def _content(log: Log) -> dict[str, Any]:
    """Reduce a log to the parts that a replay needs."""
    ends = {event.block for event in log.events if not event.birth}
    blocks = [_size_of(block, number in ends) for number, block in enumerate(log.blocks)]
    events = [event.block if event.birth else ~event.block for event in log.events]
    streams = {number: block.stream for number, block in enumerate(log.blocks) if block.stream}
    # The first step makes the optimizer's states at its first update.
    update = next(
        (index for index, event in enumerate(log.events) if log.blocks[event.block].op == UPDATE),
        len(events),
    )
    weights = grouped(
        (block.layer, number)
        for number, block in enumerate(log.blocks)
        if block.kind == "weights" and block.layer is not None and block.born == "start:weights"
    )
    return {
        "blocks": blocks,
        "events": events,
        "update": update,
        "streams": streams,
        "layers": [*weights.values()],  # the weights of each
    }


def _size_of(block: Block, ends: bool) -> list[Any]:
    """A row of launch.predict.traces.LoggedBlock."""
    born = _born(block.born, block.kind, block.op, ends)
    if block.sum is None:
        of_targets = [None, block.target_bytes] if block.target_bytes else []
        return [block.fixed_bytes, block.sample_bytes, born, *of_targets]
    fixed_rows, sample_rows, target_rows, *of_kernel = astuple(block.sum)
    return [fixed_rows, sample_rows, born, of_kernel, target_rows]


# op of a block that is there when the step starts -> the part that a replay needs
_BY_OP: Mapping[str, Born] = {
    GRADIENTS: "engine",
    SLICE: "slice",
    **dict.fromkeys((TRAINED, FLAT), "trained"),
    PACKED: "packed",
    SCALES: "scales",
}


@cache
def _born(phase: str, kind: str, op: str, ends: bool) -> Born:
    """The part of a phase that a replay needs, of a block. `ends`: it ends in the log."""
    section, _, part = phase.partition(":")
    if section == "start":
        if kind == "communication" or op in _BY_OP:
            return "engine" if kind == "communication" else _BY_OP[op]
        if part == "optimizer":
            return "paged" if kind == PAGED else "state"
        return "workspace" if part == "workspace" else "start"
    if section != "evaluation":
        return "step"
    return "evaluation" if ends or kind != "communication" else "kept"
