"""The order of samples in which an optimizer step covers rows of about one length, and its cut into
micro-batches by tokens. No torch; 4 bytes a row are kept."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SORTED_TOGETHER = 50  # groups: as many as transformers' LengthGroupedSampler sorts at once
MICRO_STEP_SHARE = 1 / 8  # of a full one's tokens: what starting a micro-step costs, in padding
# into which an epoch is cut for it, so that its groups are not those of every other epoch
LEAST_PARTS = 4


def group(order: np.ndarray, lengths: np.ndarray, size: int, random: np.random.Generator) -> None:
    """Rearrange `order` in place, so that each `size` rows in turn are of about one length, the
    groups in random order.

    `lengths` (rows, 2): tokens of source and target. Random parts of the epoch are sorted by the
    target and, in strips, by the source. The few rows that fill no group stay last. The group of
    the longest row is the second: the second step is the first in the steady state, and the one
    that is held against the plan.
    """
    count = len(order) // size
    if count == 0:
        return
    together = min(SORTED_TOGETHER, max(count // LEAST_PARTS, 1))
    # as many strips as groups in a strip, or twice as many
    strip = size * max(math.isqrt(together // 2), 1)
    whole = order[: count * size]
    for at in range(0, len(whole), together * size):
        part = whole[at : at + together * size]
        part[:] = part[np.argsort(lengths[part, 1], kind="stable")]
        for begin in range(0, len(part), strip):
            rows = part[begin : begin + strip]
            rows[:] = rows[np.argsort(lengths[rows, 0], kind="stable")]
    groups = whole.reshape(count, size)
    groups[:] = groups[random.permutation(count)]
    second = min(1, count - 1)
    longest = int(lengths[whole].sum(axis=1).argmax()) // size
    groups[[second, longest]] = groups[[longest, second]]


def sort_steps(order: np.ndarray, lengths: np.ndarray, size: int) -> None:
    """Sort each `size` rows in place, the longest first: a micro-batch, which is a part of them, is
    of one length."""
    for at in range(0, len(order), size):
        step = order[at : at + size]
        step[:] = step[np.argsort(-lengths[step].sum(axis=1), kind="stable")]


@dataclass(frozen=True)
class TokenBudget:
    """The most that a rank's micro-batch takes: padded tokens of source and of target, each side by
    itself."""

    lengths: Callable[[], np.ndarray]  # of all samples, as TokenRows.lengths gives them
    source: int
    target: int
    multiple: int = 1  # to which the collator pads

    def cut(
        self, step: np.ndarray, lengths: np.ndarray, world_size: int, most: int
    ) -> list[np.ndarray]:
        """The samples of an optimizer step in parts that the budget holds, the longest first; each
        part is dealt to the ranks by turns. As few parts as can be; more, up to `most`, where that
        saves more padding than it costs.

        A sample that exceeds the budget is alone on its rank."""
        budget = np.array([self.source, self.target])
        rows = step[np.argsort(-(lengths[step] / budget).max(axis=1), kind="stable")]
        padded = -(-lengths[rows] // self.multiple) * self.multiple
        ends = []
        at = 0
        while at < len(rows):
            widest = np.maximum.accumulate(padded[at:])
            # by rank 0, were this sample the part's last
            held = np.arange(len(widest))[:, None] // world_size + 1
            fits = np.all(held * widest <= budget, axis=1)
            at += len(fits) if fits.all() else max(int(fits.argmin()) // world_size, 1) * world_size
            ends.append(at)
        worth = MICRO_STEP_SHARE * world_size * budget.sum()
        while len(ends) < most:
            begins = [0, *ends[:-1]]
            saved, at = max(
                _saved(padded, begin, end, world_size)
                for begin, end in zip(begins, ends, strict=True)
            )
            if saved <= worth:
                break
            insort(ends, at)
        return np.split(rows, ends[:-1])


def _saved(padded: np.ndarray, begin: int, end: int, world_size: int) -> tuple[int, int]:
    """(tokens of padding that go if these samples are two parts instead of one, where the second
    begins)."""
    part = padded[begin:end]
    places = np.arange(world_size, len(part), world_size)
    if not len(places):
        return 0, end
    first = np.maximum.accumulate(part)[places - 1].sum(axis=1)
    second = np.maximum.accumulate(part[::-1])[::-1][places].sum(axis=1)
    computed = places * first + (len(part) - places) * second
    least = int(computed.argmin())
    return int(len(part) * part.max(axis=0).sum() - computed[least]), begin + int(places[least])
