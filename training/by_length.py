"""The order of samples in which an optimizer step covers rows of about one length. No torch; 4 bytes a row are kept."""

from __future__ import annotations

import math

import numpy as np

SORTED_TOGETHER = 50  # groups: as many as transformers' LengthGroupedSampler sorts at once
LEAST_PARTS = 4  # into which an epoch is cut for it, so that its groups are not those of every other epoch


def group(order: np.ndarray, lengths: np.ndarray, size: int, random: np.random.Generator) -> None:
    """Rearrange `order` in place, so that each `size` rows in turn are of about one length, the groups in random order.

    `lengths` (rows, 2): tokens of source and target. Random parts of the epoch are sorted by the target and, in strips,
    by the source. The few rows that fill no group stay last. The group of the longest row is the second: the second
    step is the first in the steady state, and the one that is held against the plan.
    """
    count = len(order) // size
    if count == 0:
        return
    together = min(SORTED_TOGETHER, max(count // LEAST_PARTS, 1))
    strip = size * max(math.isqrt(together // 2), 1)  # as many strips as groups in a strip, or twice as many
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
    """Sort each `size` rows in place, the longest first: a micro-batch, which is a part of them, is of one length."""
    for at in range(0, len(order), size):
        step = order[at : at + size]
        step[:] = step[np.argsort(-lengths[step].sum(axis=1), kind="stable")]
