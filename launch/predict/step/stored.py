"""The log of a composed step as a replay needs it."""

from collections.abc import Mapping
from dataclasses import astuple
from functools import cache
from typing import Any

from launch.predict.step.rewrite_log import FLAT, GRADIENTS, SLICE
from launch.schema.plan import PAGED, Born
from launch.schema.recorded_step import PACKED, SCALES, TRAINED, UPDATE, Block, Log


def content(log: Log, turns: Mapping[str, Log]) -> dict[str, Any]:
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
    layers: dict[Any, list[int]] = {}  # the weights of each
    for number, block in enumerate(log.blocks):
        if block.kind == "weights" and block.layer is not None and block.born == "start:weights":
            layers.setdefault(block.layer, []).append(number)
    return {
        "blocks": blocks,
        "events": events,
        "update": update,
        "streams": streams,
        "layers": [*layers.values()],
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
