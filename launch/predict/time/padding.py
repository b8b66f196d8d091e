"""The share of a step that is padding, from a sample of the rows' lengths. Pure."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from launch.schema.data_section import DataSection
from launch.schema.levers import Levers
from launch.schema.plan import Padding, Strategy

_DRAWN = 4096  # rows; the share then moves by about a hundredth from one draw to another
_MOST_SORTED = 1 << 14  # rows: above it fewer groups are sorted together than training does
SORTED_TOGETHER, LEAST_PARTS, MICRO_STEP_SHARE = 50, 4, 1 / 8  # training/data/sample_order.py's
Lengths = Sequence[Sequence[int]]  # tokens of (source, target) of a row
# the rows of an optimizer step -> its micro-batches, of all ranks
_Splitter = Callable[[Lengths], list[Lengths]]


class StepSplit(NamedTuple):
    """The micro-batches of an optimizer step."""

    rows: float  # tokens of a rank's micro-batch, as a number of longest rows
    micro_steps: float


def compute(
    counts: Mapping[str, Any],
    strategy: Strategy,
    multiple: int,
    data: DataSection,
    max_lengths: tuple[int, int],
) -> Padding:
    """The padding of the tokenised training file under this strategy.

    `counts` are those of tokenising. The collator pads to a `multiple`. `max_lengths` are the
    source and target lengths of the plan."""
    rows = counts["documents"] if data.packing else counts["rows"]
    drawn = _drawn(counts["lengths"], strategy)
    grouped = _grouped(counts["lengths"], rows, strategy)
    at_random, grouped_share = (
        _computed(steps, _by_rows(strategy), strategy, multiple).share for steps in (drawn, grouped)
    )
    order, share = ("by_length", grouped_share) if data.group_by_length else ("random", at_random)

    micro_steps = None
    if strategy.levers.batch_by_tokens:
        splitter = _by_tokens(strategy, multiple, max_lengths)
        steps = grouped if data.group_by_length else drawn
        share, _, micro_steps = _computed(steps, splitter, strategy, multiple)
    # sequences are padded to the longest of a micro-batch: to the longest of them all, at most
    if data.packing:
        most = _padded(counts["longest_input"], multiple)
        order, share = "packed", 1 - counts["tokens"] / (counts["rows"] * most)
    if strategy.levers.flattens:  # rows follow one another in a batch
        tokens = strategy.per_device_train_batch_size * counts["tokens"] / counts["rows"]
        share = grouped_share = 1 - tokens / (tokens + (multiple - 1) / 2)
    return Padding(
        order=order,
        share=share,
        at_random=at_random,
        by_length=grouped_share,
        samples=counts["rows"],
        rows=rows,
        tokens=counts["tokens"],
        micro_steps=micro_steps,
    )


def mean_split(
    counts: Mapping[str, Any],
    strategy: Strategy,
    multiple: int,
    data: DataSection,
    max_lengths: tuple[int, int],
) -> StepSplit:
    """The mean split of a step of rows."""
    lengths = counts["lengths"]
    # Flattened rows have no padding.
    by_tokens = strategy.levers.batch_by_tokens
    if strategy.levers.flattens and not by_tokens:
        share = sum(map(sum, lengths)) / len(lengths) / sum(max_lengths)
        return StepSplit(
            strategy.per_device_train_batch_size * share, strategy.gradient_accumulation_steps
        )
    alike = replace(  # one entry of the cache serves many candidates
        strategy,
        mode="cpu",
        backend=None,
        num_machines=1,
        mixed_precision="no",
        per_device_eval_batch_size=1,
        levers=Levers(batch_by_tokens=by_tokens),
        dataloader_num_workers=0,
    )
    return _mean_split(
        tuple(map(tuple, lengths)),
        counts["rows"] if data.group_by_length else None,
        alike,
        multiple,
        max_lengths,
    )


@lru_cache(maxsize=64)
def _mean_split(
    lengths: Lengths,
    grouped_rows: int | None,
    strategy: Strategy,
    multiple: int,
    max_lengths: tuple[int, int],
) -> StepSplit:
    steps = (
        _drawn(lengths, strategy, _DRAWN // 4)
        if grouped_rows is None
        else _grouped(lengths, grouped_rows, strategy)
    )
    splitter = _by_rows(strategy)
    if strategy.levers.batch_by_tokens:
        splitter = _by_tokens(strategy, multiple, max_lengths)
    computed = _computed(steps, splitter, strategy, multiple)
    # tokens of a rank's micro-batch
    tokens = computed.tokens / computed.micro_steps / len(steps) / strategy.num_processes
    return StepSplit(tokens / sum(max_lengths), computed.micro_steps)


def _drawn(lengths: Lengths, strategy: Strategy, least: int = _DRAWN) -> list[Lengths]:
    """Optimizer steps of rows that come at random."""
    size = strategy.effective_batch_size
    return _chunks(random.Random(0).choices(lengths, k=math.ceil(least / size) * size), size)


def _chunks(rows: Lengths, size: int) -> list[Lengths]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _grouped(lengths: Lengths, rows: int, strategy: Strategy) -> list[Lengths]:
    """The optimizer steps of one sorted part of an epoch, as training/data/sample_order.py makes
    them."""
    size = strategy.effective_batch_size
    together = min(
        SORTED_TOGETHER, max(rows // size // LEAST_PARTS, 1), max(_MOST_SORTED // size, 1)
    )
    part = sorted(random.Random(0).choices(lengths, k=together * size), key=lambda row: row[1])
    strip = size * max(math.isqrt(together // 2), 1)
    strips = [sorted(rows, key=lambda row: row[0]) for rows in _chunks(part, strip)]
    in_order = [row for rows in strips for row in rows]
    return [sorted(rows, key=sum, reverse=True) for rows in _chunks(in_order, size)]


def _by_rows(strategy: Strategy) -> _Splitter:
    width = strategy.per_device_train_batch_size * strategy.num_processes
    return lambda step: _chunks(step, width)


def _by_tokens(strategy: Strategy, multiple: int, max_lengths: tuple[int, int]) -> _Splitter:
    """The split of training/data/sample_order.py."""
    ranks = strategy.num_processes
    width = strategy.per_device_train_batch_size * ranks
    budget = [strategy.per_device_train_batch_size * length for length in max_lengths]

    def split(step: Lengths) -> list[Lengths]:
        rows = sorted(step, key=lambda row: -max(row[0] / budget[0], row[1] / budget[1]))
        padded = [[_padded(length, multiple) for length in row] for row in rows]
        ends, begin = [], 0
        while begin < len(rows):
            widest = [0, 0]
            for end in range(begin, len(rows)):
                widest = [max(pair) for pair in zip(widest, padded[end], strict=True)]
                rows_of_rank = (end - begin) // ranks + 1
                if rows_of_rank > 1 and any(
                    rows_of_rank * length > limit
                    for length, limit in zip(widest, budget, strict=True)
                ):
                    begin += (end - begin) // ranks * ranks
                    break
            else:
                begin = len(rows)
            ends.append(begin)
        while len(ends) < math.ceil(len(rows) / width):
            saved, split_end = max(
                _saved(padded[a:b], a, ranks) for a, b in zip([0, *ends[:-1]], ends, strict=True)
            )
            if saved <= MICRO_STEP_SHARE * ranks * sum(budget):
                break
            ends = sorted([*ends, split_end])
        return [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    return split


def _saved(part: Lengths, begin: int, ranks: int) -> tuple[int, int]:
    """(tokens of padding that go if this part is split in two, where the second begins)."""
    first = list(accumulate(part, _wider))
    second = list(accumulate(reversed(part), _wider))[::-1]
    padded_tokens = len(part) * sum(first[-1])
    return max(
        (
            (padded_tokens - n * sum(first[n - 1]) - (len(part) - n) * sum(second[n]), begin + n)
            for n in range(ranks, len(part), ranks)
        ),
        default=(0, begin),
    )


def _wider(row: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    return max(row[0], other[0]), max(row[1], other[1])


def _padded(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple


class _Computed(NamedTuple):
    share: float  # share of the computed tokens that are padding
    tokens: int  # computed tokens, padding included, both sides of all rows
    micro_steps: float  # mean number of micro-steps in a step


def _computed(
    steps: Sequence[Lengths], splitter: _Splitter, strategy: Strategy, multiple: int
) -> _Computed:
    """The tokens that the ranks compute in these steps."""
    real = computed = micro_steps = 0
    for part in (part for step in steps for part in splitter(step)):
        micro_steps += 1
        for rank in range(strategy.num_processes):
            batch = part[rank :: strategy.num_processes]
            for side in (0, 1) if batch else ():
                lengths = [row[side] for row in batch]
                real += sum(lengths)
                computed += len(batch) * _padded(max(lengths), multiple)
    return _Computed(1 - real / computed, computed, micro_steps / len(steps))
