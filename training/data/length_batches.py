"""The order of samples in which an optimizer step has rows of similar lengths, and the division of
a step into micro-batches by tokens. No torch; 4 bytes a row are stored."""

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SORTED_TOGETHER = 50  # groups: as many as transformers' LengthGroupedSampler sorts at once
# the cost of starting a micro-step, in padding: a share of the tokens of a full micro-step
MICRO_STEP_SHARE = 1 / 8
# parts into which an epoch is divided at least, so that every epoch has other groups
LEAST_PARTS = 4


def group(order: np.ndarray, lengths: np.ndarray, size: int, random: np.random.Generator) -> None:
    """Rearrange `order` in place, so that each `size` rows in turn have similar lengths and the
    groups have a random order.

    `lengths` (rows, 2): tokens of source and target. Random parts of the epoch are sorted by the
    target and, in strips, by the source. The few rows that fill no group stay last. The group of
    the longest row becomes the second group, because the second step is the first in the steady
    state and is compared with the plan.
    """
    count = len(order) // size
    if count == 0:
        return
    together = min(SORTED_TOGETHER, max(count // LEAST_PARTS, 1))
    # There are as many strips as groups in a strip, or twice as many
    strip = size * max(math.isqrt(together // 2), 1)
    grouped = order[: count * size]
    for start in range(0, len(grouped), together * size):
        part = grouped[start : start + together * size]
        part[:] = part[np.argsort(lengths[part, 1], kind="stable")]
        for begin in range(0, len(part), strip):
            rows = part[begin : begin + strip]
            rows[:] = rows[np.argsort(lengths[rows, 0], kind="stable")]
    groups = grouped.reshape(count, size)
    groups[:] = groups[random.permutation(count)]
    second = min(1, count - 1)
    longest_group = int(lengths[grouped].sum(axis=1).argmax()) // size
    groups[[second, longest_group]] = groups[[longest_group, second]]


def sort_steps(order: np.ndarray, lengths: np.ndarray, size: int) -> None:
    """Sort each `size` rows in place, the longest first, so that the rows of a micro-batch have
    similar lengths."""
    for start in range(0, len(order), size):
        step = order[start : start + size]
        step[:] = step[np.argsort(-lengths[step].sum(axis=1), kind="stable")]


@dataclass(frozen=True)
class TokenBudget:
    """The limits of a rank's micro-batch: padded tokens of source and of target, each side by
    itself."""

    lengths: Callable[[], np.ndarray]  # lengths of all samples, as TokenRows.lengths gives them
    source: int
    target: int
    multiple: int = 1  # multiple to which the collator pads

    def split(
        self, step: np.ndarray, lengths: np.ndarray, world_size: int, most: int
    ) -> list[np.ndarray]:
        """Split the samples of an optimizer step into parts within the budget, the longest first.
        The ranks take the samples of a part by turns. There are as few parts as possible, and more,
        up to `most`, if that saves more padding than it costs.

        A sample that exceeds the budget is alone on its rank."""
        budget = np.array([self.source, self.target])
        rows = step[np.argsort(-(lengths[step] / budget).max(axis=1), kind="stable")]
        padded = -(-lengths[rows] // self.multiple) * self.multiple
        ends, end = [], 0
        while end < len(rows):
            widest = np.maximum.accumulate(padded[end:])
            # samples of rank 0 if this sample were the last of the part
            count = np.arange(len(widest))[:, None] // world_size + 1
            fits = np.all(count * widest <= budget, axis=1)
            fitting = max(int(fits.argmin()) // world_size, 1) * world_size
            end += len(fits) if fits.all() else fitting
            ends.append(end)
        worth = MICRO_STEP_SHARE * world_size * budget.sum()
        while len(ends) < most:
            saved, middle = max(
                _saved(padded, begin, end, world_size) for begin, end in pairwise([0, *ends])
            )
            if saved <= worth:
                break
            insort(ends, middle)
        return np.split(rows, ends[:-1])


def _saved(padded: np.ndarray, begin: int, end: int, world_size: int) -> tuple[int, int]:
    """(tokens of padding that are saved if these samples become two parts, the start of the second
    part)."""
    part = padded[begin:end]
    places = np.arange(world_size, len(part), world_size)
    if not len(places):
        return 0, end
    first = np.maximum.accumulate(part)[places - 1].sum(axis=1)
    second = np.maximum.accumulate(part[::-1])[::-1][places].sum(axis=1)
    computed = places * first + (len(part) - places) * second
    least = int(computed.argmin())
    return int(len(part) * part.max(axis=0).sum() - computed[least]), begin + int(places[least])
