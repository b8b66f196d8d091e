"""How much of what a step computes is padding, from a sample of the rows' lengths. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from launch.schema.plan import Padding, Strategy
from launch.schema.recipe import DataSection

DRAWN = 4096  # rows; the share then moves by about a hundredth from one draw to another
MOST_SORTED = 1 << 14  # rows: above it fewer groups are sorted together than training does
SORTED_TOGETHER, LEAST_PARTS, MICRO_STEP_SHARE = 50, 4, 1 / 8  # training/data/length_batches.py's
Lengths = Sequence[Sequence[int]]  # tokens of (source, target) of a row
# the rows of an optimizer step -> its micro-batches, of all ranks
CutStep = Callable[[Lengths], list[Lengths]]


class Cut(NamedTuple):
    """How an optimizer step is cut."""

    rows: float  # of a rank's micro-batch, the longest or what takes as many tokens
    micro_steps: float


def of(
    counts: Mapping[str, Any],
    strategy: Strategy,
    multiple: int,
    data: DataSection,
    longest: tuple[int, int],
) -> Padding | None:
    """What the tokenised training file gives under this strategy; None where an older version has
    counted it.

    `counts` as tokenising wrote them; `multiple`: to which the collator pads; `longest` source and
    target that was planned for."""
    lengths = counts.get("lengths")
    if not lengths:
        return None
    rows = counts["documents"] if data.packing else counts["rows"]
    drawn = _drawn(lengths, strategy)
    grouped = _grouped(lengths, rows, strategy)
    by_rows, by_tokens = _by_rows(strategy), _by_tokens(strategy, multiple, longest)
    at_random, by_length = (
        _computed(steps, by_rows, strategy, multiple).share for steps in (drawn, grouped)
    )
    cut_by_tokens = _computed(
        grouped if data.group_by_length else drawn, by_tokens, strategy, multiple
    )
    order, share = ("by_length", by_length) if data.group_by_length else ("random", at_random)
    in_quarters = None
    if data.batch_by_tokens:
        share = cut_by_tokens.share
        in_quarters = _in_quarters(
            grouped if data.group_by_length else drawn, strategy, multiple, longest
        )
    # sequences are padded to the longest of a micro-batch: to the longest of them all, at most
    if data.packing:
        most = math.ceil(counts["longest_input"] / multiple) * multiple
        order, share = "packed", 1 - counts["tokens"] / (counts["rows"] * most)
    if strategy.attn_implementation == "flash_attention_2":  # rows follow one another in a batch
        tokens = strategy.per_device_train_batch_size * counts["tokens"] / counts["rows"]
        share = by_length = in_quarters = 1 - tokens / (tokens + (multiple - 1) / 2)
        cut_by_tokens = cut_by_tokens._replace(share=share)
    return Padding(
        order=order,
        share=share,
        at_random=at_random,
        by_length=by_length,
        samples=counts["rows"],
        rows=rows,
        tokens=counts["tokens"],
        by_tokens=cut_by_tokens.share,
        micro_steps=cut_by_tokens.micro_steps if data.batch_by_tokens else None,
        in_quarters=in_quarters,
    )


def _in_quarters(
    steps: Sequence[Lengths], strategy: Strategy, multiple: int, longest: tuple[int, int]
) -> float | None:
    """The share by tokens with a quarter of the batch and four times the accumulation; None: it has
    no quarter."""
    if strategy.per_device_train_batch_size % 4:
        return None
    finer = replace(
        strategy,
        per_device_train_batch_size=strategy.per_device_train_batch_size // 4,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps * 4,
    )
    return _computed(steps, _by_tokens(finer, multiple, longest), finer, multiple).share


def mean_cut(
    counts: Mapping[str, Any],
    strategy: Strategy,
    multiple: int,
    data: DataSection,
    longest: tuple[int, int],
) -> Cut | None:
    """What a step of rows is cut into on average; None where an older version has counted."""
    lengths = counts.get("lengths")
    if not lengths:
        return None
    # without padding
    if strategy.attn_implementation == "flash_attention_2" and not data.batch_by_tokens:
        share = sum(map(sum, lengths)) / len(lengths) / sum(longest)
        return Cut(
            strategy.per_device_train_batch_size * share, strategy.gradient_accumulation_steps
        )
    alike = replace(  # what many candidates have in common
        strategy,
        per_device_eval_batch_size=1,
        activation_checkpointing=False,
        num_output_chunks=1,
        dataloader_num_workers=0,
    )
    rows = counts["rows"] if data.group_by_length else None
    return _mean_cut(
        tuple(map(tuple, lengths)), rows, alike, multiple, longest, data.batch_by_tokens
    )


@lru_cache(maxsize=64)
def _mean_cut(
    lengths: Lengths,
    grouped_rows: int | None,
    strategy: Strategy,
    multiple: int,
    longest: tuple[int, int],
    is_by_tokens: bool,
) -> Cut:
    if grouped_rows is None:
        steps = _drawn(lengths, strategy, DRAWN // 4)
    else:
        steps = _grouped(lengths, grouped_rows, strategy)
    cut = _by_tokens(strategy, multiple, longest) if is_by_tokens else _by_rows(strategy)
    found = _computed(steps, cut, strategy, multiple)
    # of a rank's micro-batch
    tokens = found.tokens / found.micro_steps / len(steps) / strategy.num_processes
    return Cut(tokens / sum(longest), found.micro_steps)


def _drawn(lengths: Lengths, strategy: Strategy, least: int = DRAWN) -> list[Lengths]:
    """Optimizer steps of rows that come at random."""
    size = strategy.effective_batch_size
    rows = random.Random(0).choices(lengths, k=math.ceil(least / size) * size)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _grouped(lengths: Lengths, rows: int, strategy: Strategy) -> list[Lengths]:
    """The optimizer steps of one sorted part of an epoch, as training/data/length_batches.py makes
    them."""
    size = strategy.effective_batch_size
    together = min(
        SORTED_TOGETHER, max(rows // size // LEAST_PARTS, 1), max(MOST_SORTED // size, 1)
    )
    part = sorted(random.Random(0).choices(lengths, k=together * size), key=lambda one: one[1])
    strip = size * max(math.isqrt(together // 2), 1)
    strips = [
        sorted(part[at : at + strip], key=lambda one: one[0]) for at in range(0, len(part), strip)
    ]
    in_order = [one for rows in strips for one in rows]
    return [
        sorted(in_order[at : at + size], key=lambda one: one[0] + one[1], reverse=True)
        for at in range(0, len(in_order), size)
    ]


def _by_rows(strategy: Strategy) -> CutStep:
    width = strategy.per_device_train_batch_size * strategy.num_processes
    return lambda step: [step[at : at + width] for at in range(0, len(step), width)]


def _by_tokens(strategy: Strategy, multiple: int, longest: tuple[int, int]) -> CutStep:
    """As training/data/length_batches.py cuts."""
    ranks = strategy.num_processes
    width = strategy.per_device_train_batch_size * ranks
    budget = [strategy.per_device_train_batch_size * length for length in longest]

    def cut(step: Lengths) -> list[Lengths]:
        rows = sorted(step, key=lambda row: -max(row[0] / budget[0], row[1] / budget[1]))
        padded = [[_padded(length, multiple) for length in row] for row in rows]
        ends, begin = [], 0
        while begin < len(rows):
            widest = [0, 0]
            for end in range(begin, len(rows)):
                widest = [max(one) for one in zip(widest, padded[end], strict=True)]
                held = (end - begin) // ranks + 1
                if held > 1 and any(
                    held * one > limit for one, limit in zip(widest, budget, strict=True)
                ):
                    begin += (end - begin) // ranks * ranks
                    break
            else:
                begin = len(rows)
            ends.append(begin)
        while len(ends) < math.ceil(len(rows) / width):
            saved, at = max(
                _saved(padded[a:b], a, ranks) for a, b in zip([0, *ends[:-1]], ends, strict=True)
            )
            if saved <= MICRO_STEP_SHARE * ranks * sum(budget):
                break
            ends = sorted([*ends, at])
        return [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    return cut


def _saved(part: Lengths, begin: int, ranks: int) -> tuple[int, int]:
    """(tokens of padding that go if this part is cut in two, where the second begins)."""
    first = list(accumulate(part, _wider))
    second = list(accumulate(reversed(part), _wider))[::-1]
    whole = len(part) * sum(first[-1])
    return (
        max(
            ((whole - at * sum(first[at - 1]) - (len(part) - at) * sum(second[at]), begin + at))
            for at in range(ranks, len(part), ranks)
        )
        if len(part) > ranks
        else (0, begin)
    )


def _wider(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _padded(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple


class _Computed(NamedTuple):
    share: float  # of padding
    tokens: int  # with it, both sides of all rows
    micro_steps: float  # of a step, on average


def _computed(
    steps: Sequence[Lengths], cut: CutStep, strategy: Strategy, multiple: int
) -> _Computed:
    """What these steps compute where they are cut so, and dealt to the ranks."""
    real = computed = micro_steps = 0
    for part in (part for step in steps for part in cut(step)):
        micro_steps += 1
        for rank in range(strategy.num_processes):
            batch = part[rank :: strategy.num_processes]
            for side in (0, 1) if batch else ():
                lengths = [row[side] for row in batch]
                real += sum(lengths)
                computed += len(batch) * _padded(max(lengths), multiple)
    return _Computed(1 - real / computed, computed, micro_steps / len(steps))
