"""The largest micro-batches of a run, from the order of its rows and their lengths. No torch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from launch.schema.rows import Division, LargestMicroBatches, MicroBatchSize
from training.data import stored_rows
from training.data.sample_order import SampleOrder, in_turns

MIXTURES = 16  # parts in which the weights of a mixture of tokens and targets are counted


@dataclass(frozen=True)
class _RowSizes:
    """The sizes of all rows of a part."""

    lengths: np.ndarray  # (rows, 2) tokens of source and target
    targets: np.ndarray  # (rows,)


def row_sizes(files: Sequence[Path]) -> _RowSizes:
    """The sizes of the rows in files of a token cache."""
    table = stored_rows.mapped(files)
    return _RowSizes(stored_rows.lengths(table), stored_rows.targets(table))


def largest(rows: _RowSizes, division: Division) -> LargestMicroBatches:
    """The largest micro-batches of all ranks."""
    sizes: list[MicroBatchSize] = []
    first_step: list[MicroBatchSize] = []
    for epoch, batches in enumerate(_epochs(rows, division)):
        of_epoch = [_measured(rows, division, numbers) for numbers in batches if len(numbers)]
        sizes = _of_mixtures([*sizes, *itertools.chain.from_iterable(map(_selected, of_epoch))])
        if epoch == 0:
            in_step = division.accumulation * division.world_size
            first_step = _of_mixtures(_selected(of_epoch[0][:in_step]))
    return LargestMicroBatches(sizes, first_step)


def _epochs(rows: _RowSizes, division: Division) -> Iterator[Iterable[np.ndarray]]:
    """Yield the rows of the micro-batches of each epoch, (micro-batches, rows) of as many rows
    together."""
    count = len(rows.lengths)
    if division.part == "validation":
        numbers = np.arange(count)
        if division.groups_by_length:
            numbers = rows.lengths.sum(axis=1).argsort(kind="stable")
        yield in_turns(numbers, division.micro_batch, division.world_size)
        return
    order = SampleOrder(
        count,
        division.micro_batch,
        division.accumulation,
        division.world_size,
        rank=0,
        seed=division.seed,
        lengths=(lambda: rows.lengths) if division.groups_by_length else None,
    )
    for epoch, done in enumerate(range(0, division.num_steps, order.steps_per_epoch)):
        yield order.micro_batches(epoch, division.num_steps - done)


def _measured(rows: _RowSizes, division: Division, numbers: np.ndarray) -> np.ndarray:
    """(micro-batches, 6) the fields of MicroBatchSize."""
    lengths = rows.lengths[numbers].astype(np.int64)
    padded = -(-lengths.max(axis=1) // division.multiple) * division.multiple
    tokens = padded.sum(axis=1) * numbers.shape[1]
    if division.flattens:
        tokens = -(-lengths[:, :, 0].sum(axis=1) // division.multiple) * division.multiple
    # without a target, one position is computed
    targets = np.maximum(rows.targets[numbers].sum(axis=1), 1)
    count = np.full(len(numbers), numbers.shape[1])
    is_padded = (lengths[:, :, 0] < padded[:, :1]).any(axis=1)
    return np.stack([count, *padded.T, tokens, targets, is_padded], axis=1)


def _selected(sizes: np.ndarray) -> list[MicroBatchSize]:
    """Those that have the most of some mixture of tokens of source, of target, and targets, of
    those with and of those without padding."""
    is_padded = sizes[:, -1].astype(bool)
    groups = sizes[is_padded], sizes[~is_padded]
    return [each for group in groups if len(group) for each in _selected_of(group)]


def _selected_of(sizes: np.ndarray) -> list[MicroBatchSize]:
    rows, source, target, tokens, targets = sizes[:, :-1].T.astype(float)
    shares = np.stack([rows * source, rows * target, tokens, targets])
    shares /= shares.max(axis=1, keepdims=True)
    # Flattened rows count all their tokens, padded rows both sides
    source, target, tokens, targets = shares
    chosen: set[int] = set()
    for part in range(MIXTURES + 1):
        weight = part / MIXTURES
        for of_tokens in (tokens, source, target):
            mixture = (1 - weight) * of_tokens + weight * targets
            # the longest of equal micro-batches
            most = np.flatnonzero(mixture == mixture.max())
            chosen.add(int(most[source[most].argmax()]))
    return [
        MicroBatchSize(*map(int, counts), is_padded=bool(is_padded))
        for *counts, is_padded in sizes[sorted(chosen)]
    ]


def _of_mixtures(sizes: Sequence[MicroBatchSize]) -> list[MicroBatchSize]:
    """The same of sizes that were selected already."""
    return _selected(np.array(sorted(map(astuple, set(sizes))), dtype=np.int64))
