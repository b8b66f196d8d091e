"""Reduce a traced log to the few moments that are the peak of each section at any micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from training.trace.recorder import Log, Work

SECTIONS = (
    "forward",
    "backward",
    "optimizer",
    "evaluation",
)  # of the step, and the evaluation after it
# in a part of the logits, the fewest and the most; and the ratio up to which numbers are as many
TARGETS_A_SAMPLE, AS_MANY = (2.0**-10, 2.0**20), 1.01
# (1, x, y): micro-batches whose highest sums show that most others are highest nowhere
DIRECTIONS = np.array(
    [(1, 4**x, 16**y if y else 0) for x in range(8) for y in range(5)], dtype=np.float64
).T
# kinds of blocks, by the phase in which they are born
BORN_IN = {"start:weights": "weights", "start:optimizer": "optimizer", "input": "input"}
# kinds of blocks that outlive the phase in which they are born, by its section
LASTING = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}


def kinds(log: Log) -> list[str]:
    """The purpose of each block, by the phases of its birth and its death, unless the block names
    it: logits and buffers do."""
    died = {event.block: event.phase for event in log.events if not event.birth}
    return [
        block.kind or BORN_IN.get(block.born) or _lasting_kind(block.born, died.get(number))
        for number, block in enumerate(log.blocks)
    ]


def _lasting_kind(born: str, died: str | None) -> str:
    is_lasting = born != died
    return LASTING.get(born.partition(":")[0], "temporaries") if is_lasting else "temporaries"


def peaks(log: Log) -> list[dict[str, Any]]:
    """The moments that are the peak of their section at any micro-batch: bytes of each kind as
    [fixed, per sample, per target]."""
    kind_of = kinds(log)
    names = sorted(set(kind_of))
    column = {name: index for index, name in enumerate(names)}
    sizes = np.array([block.sizes for block in log.blocks], dtype=np.int64)
    columns = np.array([column[kind] for kind in kind_of])
    blocks = np.array([event.block for event in log.events])
    signs = np.array([1 if event.birth else -1 for event in log.events])
    changes = np.zeros((len(blocks), len(names), 3), dtype=np.int64)
    changes[np.arange(len(blocks)), columns[blocks]] = sizes[blocks] * signs[:, None]
    live = changes.cumsum(axis=0)
    totals = live.sum(axis=1)
    numbers = {phase: _number(phase) for phase in {event.phase for event in log.events}}
    sections = np.array([numbers[event.phase] for event in log.events])
    inside = {section: np.flatnonzero(sections == n) for n, section in enumerate(SECTIONS)}
    return [
        {
            "section": section,
            "op": log.blocks[log.events[moment].block].op.removeprefix("aten::"),
            "parts": {
                name: parts.tolist()
                for name, parts in zip(names, live[moment], strict=True)
                if parts.any()
            },
        }
        for section, positions in inside.items()
        if len(positions)
        for moment in positions[_highest(totals[positions])]
    ]


def _number(phase: str) -> int:
    """The number of a phase's section; -1: none that has a peak of its own."""
    section = phase.partition(":")[0]
    return SECTIONS.index(section) if section in SECTIONS else -1


def _highest(totals: np.ndarray) -> list[int]:
    """Indices of the sums fixed + samples * x + targets * y that are highest for some x >= 1 and
    y >= 0."""
    rivals = _rivals(totals)
    return [int(rivals[index]) for index in _highest_of(totals[rivals])]


def _rivals(totals: np.ndarray) -> np.ndarray:
    """Indices of the sums that are not lower than one of the highest for every x and y: a few of
    ten thousand."""
    highest = totals[np.unique((totals @ DIRECTIONS).argmax(axis=0))]
    is_lower = np.zeros(len(totals), dtype=bool)
    for fixed, sample, target in highest:
        not_higher = (totals <= (fixed, sample, target)).all(axis=1)
        is_lower |= not_higher & ((totals[:, 0] < fixed) | (totals[:, 1] < sample))
    return np.flatnonzero(~is_lower)


def _highest_of(totals: np.ndarray) -> list[int]:
    if not totals[:, 2].any():
        return list(_upper(totals[:, :2]))

    def highest(targets: float) -> frozenset[int]:
        """The highest, if every sample has so many targets."""
        fixed, sample, target = totals.T.astype(np.float64)
        return frozenset(_upper(np.stack([fixed, sample + targets * target], axis=1)))

    def between(low: float, high: float, ends: tuple[frozenset[int], frozenset[int]]) -> set[int]:
        if ends[0] == ends[1] or high < low * AS_MANY:
            return {*ends[0], *ends[1]}
        middle = (low * high) ** 0.5
        of_middle = highest(middle)
        return between(low, middle, (ends[0], of_middle)) | between(
            middle, high, (of_middle, ends[1])
        )

    low, high = TARGETS_A_SAMPLE
    return sorted(highest(0) | between(low, high, (highest(low), highest(high))))


def _upper(lines: np.ndarray) -> Iterator[int]:
    """Indices of the lines fixed + samples * x that are highest for an x >= 1, in the order of
    x."""
    fixed, slope = lines[:, 0].astype(np.float64), lines[:, 1].astype(np.float64)
    index = int(np.lexsort((slope, fixed + slope))[-1])
    while True:
        yield index
        steeper = np.flatnonzero(slope > slope[index])
        if not len(steeper):
            return
        crossing = (fixed[index] - fixed[steeper]) / (slope[steeper] - slope[index])
        tied = steeper[crossing <= crossing.min()]
        index = int(tied[slope[tied].argmax()])


def work(log: Log) -> dict[str, Any]:
    """Work of the device in one micro-step, of all layers together: the mean of those traced."""
    total = Work()
    for layer_work in log.work.values():
        total.add(layer_work)
    forwards = {event.phase for event in log.events if event.phase.startswith("forward")}
    share = 1 / max(len(forwards), 1)

    def of_micro_step(flops: dict[str, list[float]]) -> dict[str, list[float]]:
        return {dtype: [share * part for part in parts] for dtype, parts in flops.items()}

    return {
        "matmul_flops": of_micro_step(total.flops),
        "attention_flops": of_micro_step(total.attention_flops),
        "bytes_moved": [share * part for part in total.bytes],
        "num_kernels": share * total.kernels,
        "num_matmuls": share * total.products,
        # of the same sizes in each micro-step
        "offloaded": sorted(total.offloaded)[:: max(len(forwards), 1)],
    }
