"""How much of what a step computes is padding, from a sample of the rows' lengths. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from launch.schema import DataSection, Padding, Strategy

DRAWN = 4096  # rows; the share then moves by about a hundredth from one draw to another
MOST_SORTED = 1 << 14  # rows: above it fewer groups are sorted together than training does
SORTED_TOGETHER, LEAST_PARTS = 50, 4  # training/by_length.py's
Lengths = Sequence[Sequence[int]]  # tokens of (source, target) of a row


def of(counts: Mapping[str, Any], strategy: Strategy, multiple: int, data: DataSection) -> Padding | None:
    """What the tokenised training file gives under this strategy; None where an older version has counted it.

    `counts` as tokenising wrote them; `multiple`: to which the collator pads."""
    lengths = counts.get("lengths")
    if not lengths:
        return None
    rows = counts["documents"] if data.packing else counts["rows"]
    at_random = _share([random.Random(0).choices(lengths, k=DRAWN)], strategy, multiple)
    if strategy.attn_implementation == "flash_attention_2":  # rows follow one another in a batch
        order = "packed" if data.packing else "by_length" if data.group_by_length else "random"
        tokens = strategy.per_device_train_batch_size * counts["tokens"] / counts["rows"]
        share = 1 - tokens / (tokens + (multiple - 1) / 2)
        return Padding(order, share, at_random, share, counts["rows"], rows, counts["tokens"])
    by_length = _share(_grouped(lengths, rows, strategy), strategy, multiple)
    order, share = ("by_length", by_length) if data.group_by_length else ("random", at_random)
    if data.packing:  # sequences are padded to the longest of a micro-batch: to the longest of them all, at most
        longest = math.ceil(counts["longest_input"] / multiple) * multiple
        order, share = "packed", 1 - counts["tokens"] / (counts["rows"] * longest)
    return Padding(order, share, at_random, by_length, counts["rows"], rows, counts["tokens"])


def _grouped(lengths: Lengths, rows: int, strategy: Strategy) -> list[list[Sequence[int]]]:
    """The optimizer steps of one part of an epoch that is sorted together, as training/by_length.py makes them."""
    size = strategy.effective_batch_size
    together = min(SORTED_TOGETHER, max(rows // size // LEAST_PARTS, 1), max(MOST_SORTED // size, 1))
    part = sorted(random.Random(0).choices(lengths, k=together * size), key=lambda one: one[1])
    strip = size * max(math.isqrt(together // 2), 1)
    strips = [sorted(part[at : at + strip], key=lambda one: one[0]) for at in range(0, len(part), strip)]
    in_order = [one for rows in strips for one in rows]
    return [
        sorted(in_order[at : at + size], key=lambda one: one[0] + one[1], reverse=True)
        for at in range(0, len(in_order), size)
    ]


def _share(steps: list[list[Sequence[int]]], strategy: Strategy, multiple: int) -> float:
    """The share of padding where these rows are cut into micro-batches in this order, and dealt to the ranks."""
    width = strategy.per_device_train_batch_size * strategy.num_processes
    real = computed = 0
    for step in steps:
        for at in range(0, len(step), width):
            for rank in range(strategy.num_processes):
                batch = step[at : at + width][rank :: strategy.num_processes]
                for side in (0, 1) if batch else ():
                    lengths = [row[side] for row in batch]
                    real += sum(lengths)
                    computed += len(batch) * math.ceil(max(lengths) / multiple) * multiple
    return 1 - real / computed
