"""From the token cache to the batches a rank trains on: the mapped rows, the order of samples,
padding.

The cache is mapped, so a rank holds no row in private memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from launch.data.rows import IGNORED
from training.data import length_batches

# tokens of the row that keeps a rank in step when it has no sample; it has no target
FILLER_LENGTH = 2


class Row(NamedTuple):
    """One sample, as int32 arrays."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray | None = None  # of its documents, where it is a packed sequence
    number: int | None = None


NOTHING: list[Row] = []  # the very list: rows of a micro-step that no rank computes


class TokenRows(Dataset):
    """The cache's files, memory-mapped; their rows are Row without a number."""

    def __init__(self, *paths: Path) -> None:
        import datasets

        mapped = [datasets.Dataset.from_file(str(path)) for path in paths]
        self.rows = (
            datasets.concatenate_datasets(mapped) if len(mapped) > 1 else mapped[0]
        ).with_format("arrow")
        self._columns = [name for name in Row._fields if name in self.rows.column_names]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | None) -> list[Row]:
        """Those rows; NOTHING for None."""
        if indices is None:
            return NOTHING
        if not len(indices):
            return []
        table: Any = self.rows[list(map(int, indices))]
        columns = [table.column(name).combine_chunks() for name in self._columns]
        return [
            Row(*(column[i].values.to_numpy() for column in columns)) for i in range(len(indices))
        ]

    def lengths(self) -> np.ndarray:
        """Tokens of every row's input and labels, (rows, 2) int32; the file's offsets are read, not
        its tokens."""
        import pyarrow.compute as pc

        table = self.rows.data
        columns = [
            pc.call_function("list_value_length", [table.column(name)]).to_numpy()
            for name in ("input_ids", "labels")
        ]
        return np.stack(columns, axis=1)


class NumberedRows(TokenRows):
    """With each row its number."""

    def __getitems__(self, indices: Sequence[int] | None) -> list[Row]:
        rows = super().__getitems__(indices)
        if not indices:
            return rows
        return [row._replace(number=number) for row, number in zip(rows, indices, strict=True)]


class SampleOrder:
    """Which samples a rank takes in each micro-batch of an epoch: a batch sampler for DataLoader.

    The order of samples depends on the seed and the epoch alone; micro-batch, accumulation and
    ranks only cut it. An optimizer step covers the next effective_batch_size samples; the last step
    of an epoch covers what is left, in as few micro-steps as hold it, so no sample is dropped or
    repeated. A rank without a sample in a micro-step gets []; a micro-step for which no rank has
    one is None, and they are the first of a step: its last one is when the ranks reduce their
    gradients.

    With `lengths` of all samples (TokenRows.lengths) the samples of a step are of about one length,
    and those of a micro-batch even more so. The order then depends on `group_size` too, the
    effective batch of the run that made it: a run that takes over with another one keeps it, and so
    sees exactly what was left.

    With a `budget` a step's samples are cut by tokens: into at most `accumulation` micro-batches,
    where it holds `micro_batch` samples of any length.
    """

    def __init__(
        self,
        samples: int,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        rank: int,
        seed: int,
        start: int = 0,
        lengths: Callable[[], np.ndarray] | None = None,
        group_size: int | None = None,
        budget: length_batches.TokenBudget | None = None,
    ) -> None:
        self.samples, self.micro_batch, self.accumulation = samples, micro_batch, accumulation
        self.world_size, self.rank, self.seed = world_size, rank, seed
        # samples of all epochs that an earlier run with another effective batch has trained
        self.start = start
        self.lengths = lengths  # None: samples come at random
        self.group_size = group_size or self.effective_batch_size
        self.budget = budget  # None: every micro-batch has micro_batch samples
        self.epoch = 0

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.effective_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def first_step(self, epoch: int) -> tuple[int, int]:
        """(step, sample) of the epoch at which this run takes over; (0, 0) except in the epoch of
        `start`."""
        if self.start == 0 or epoch != self.start // self.samples:
            return 0, 0
        offset = self.start % self.samples
        return (
            self.steps_per_epoch - -(-(self.samples - offset) // self.effective_batch_size),
            offset,
        )

    def samples_seen(self, step: int) -> int:
        """Samples of all epochs that are trained after `step` optimizer steps."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first, offset = self.first_step(epoch)
        return epoch * self.samples + min(
            offset + max(step_in_epoch - first, 0) * self.effective_batch_size, self.samples
        )

    def rows_of(self, step: int, micro_batches: Iterable[int]) -> list[int]:
        """The rows that this rank takes in these micro-batches (from 0) of an optimizer step (from
        1)."""
        epoch, step_in_epoch = divmod(step - 1, self.steps_per_epoch)
        first, _ = self.first_step(epoch)
        parts = next(itertools.islice(self._cut(epoch), step_in_epoch - first, None))
        wanted = (parts[micro] for micro in micro_batches if micro < len(parts))
        return [row for part in wanted for row in part[self.rank :: self.world_size].tolist()]

    def _cut(self, epoch: int) -> Iterator[list[np.ndarray]]:
        """The micro-batches, of all ranks together, of each optimizer step that is left of an
        epoch."""
        order, width = self._order(epoch), self.micro_batch * self.world_size
        lengths = self.budget.lengths() if self.budget else None
        for at in range(self.first_step(epoch)[1], self.samples, self.effective_batch_size):
            step = order[at : at + self.effective_batch_size]
            if self.budget and lengths is not None:
                yield self.budget.cut(step, lengths, self.world_size, -(-len(step) // width))
            else:
                yield [step[begin : begin + width] for begin in range(0, len(step), width)]

    def _order(self, epoch: int) -> np.ndarray:
        # 4 bytes a row is all that a rank holds privately
        samples = np.arange(self.samples, dtype=np.int32)
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(samples)
        if self.lengths is not None:
            lengths = self.lengths()
            length_batches.group(order, lengths, self.group_size, random)
            length_batches.sort_steps(
                order[self.first_step(epoch)[1] :], lengths, self.effective_batch_size
            )
        return order

    def __len__(self) -> int:
        """Micro-batches of one epoch on one rank."""
        # the first epoch's last step may be fuller than the others': room for it in all of them
        if self.start:
            return self.steps_per_epoch * self.accumulation
        full = self.steps_per_epoch - 1
        last = self.samples - full * self.effective_batch_size
        return full * self.accumulation + -(-last // (self.micro_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int] | None]:
        first, _ = self.first_step(self.epoch)
        # trained before this run; Trainer skips them
        yield from [None] * (first * self.accumulation)
        for step, parts in enumerate(self._cut(self.epoch), first):
            micro_steps = min(self.accumulation, len(self) - step * self.accumulation)
            yield from [None] * (micro_steps - len(parts))
            for part in parts:
                yield part[self.rank :: self.world_size].tolist()


class EpochLoader(DataLoader):
    """A DataLoader that tells its batch sampler the epoch, as Trainer asks of it."""

    def set_epoch(self, epoch: int) -> None:
        # a SampleOrder in training; torch's annotation knows only Sampler
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right to the longest of the micro-batch, rounded up to `multiple`.

    Gives input_ids, attention_mask, labels (batch, seq) and for T5 decoder_input_ids (batch, target
    seq). Packed sequences have position_ids instead of the mask: they start again with each
    document, and with the padding, by which the model tells documents apart. `flattens`: all rows
    are one, (1, tokens), without padding between them; it comes with where each document begins,
    for flash_attn's kernels of unequal lengths. No rows give one filler row whose labels are all
    IGNORED: its loss and its gradient are exactly zero. Numbered rows also give their numbers,
    sample_ids, as an array that stays on the host; packed and flattened ones their num_tokens and
    num_samples. NOTHING gives an empty batch, for which nothing is computed.
    """

    pad_token_id: int
    decoder_start_token_id: int | None = None  # given: T5
    multiple: int = 1
    is_packed: bool = False
    flattens: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        if rows is NOTHING:
            return {}
        if not rows:
            pads = np.full(FILLER_LENGTH, self.pad_token_id), np.full(FILLER_LENGTH, IGNORED)
            return self._tensors([Row(*pads, lengths=np.array([FILLER_LENGTH]))])
        batch: dict[str, Any] = self._tensors(rows)
        if rows[0].number is not None:
            batch["sample_ids"] = np.array([row.number for row in rows], dtype=np.int32)
            if self.is_packed or self.flattens:
                with_target = [row for row in rows if (row.labels != IGNORED).any()]
                batch["num_tokens"] = sum(len(row.input_ids) for row in with_target)
                batch["num_samples"] = len(with_target)
        return batch

    def _tensors(self, rows: Sequence[Row]) -> dict[str, Any]:
        if self.flattens:
            return self._flattened(rows)
        inputs = self._padded([row.input_ids for row in rows], self.pad_token_id)
        labels = self._padded([row.labels for row in rows], IGNORED)
        if self.is_packed:
            return {
                "input_ids": inputs,
                "position_ids": _positions(rows, inputs.size(1)),
                "labels": labels,
            }
        mask = self._padded([np.ones(len(row.input_ids)) for row in rows], 0)
        batch = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
        if self.decoder_start_token_id is not None:
            shifted = torch.full_like(labels, self.pad_token_id)
            shifted[:, 1:] = labels[:, :-1].masked_fill(
                labels[:, :-1] == IGNORED, self.pad_token_id
            )
            shifted[:, 0] = self.decoder_start_token_id
            batch["decoder_input_ids"] = shifted
        return batch

    def _flattened(self, rows: Sequence[Row]) -> dict[str, Any]:
        """One row of all documents; what fills it up to the multiple is a document without
        targets."""
        of_rows = [
            [len(row.input_ids)] if row.lengths is None else row.lengths.tolist() for row in rows
        ]
        lengths = [length for documents in of_rows for length in documents]
        if filling := -sum(lengths) % self.multiple:
            lengths.append(filling)
        ends = np.cumsum([0, *lengths])
        labels = np.concatenate([*(row.labels for row in rows), np.full(filling, IGNORED)])
        labels[ends[:-1]] = IGNORED  # a document's first token follows from nothing
        starts = torch.from_numpy(ends.astype(np.int32))
        return {
            "input_ids": _row(
                [*(row.input_ids for row in rows), np.full(filling, self.pad_token_id)]
            ),
            "position_ids": _row([np.arange(length) for length in lengths]),
            "labels": _row([labels]),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts),
            **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
        }

    def _padded(self, arrays: Sequence[np.ndarray], value: int) -> torch.Tensor:
        width = -(-max(len(array) for array in arrays) // self.multiple) * self.multiple
        padded = np.full((len(arrays), width), value, dtype=np.int64)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(padded)


def _row(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """(1, tokens) of them all."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)[None])


def _positions(rows: Sequence[Row], width: int) -> torch.Tensor:
    """(batch, width): each document's tokens counted from 0, and the padding's."""
    counted = []
    for row in rows:
        assert row.lengths is not None and row.lengths.sum() == len(row.input_ids)
        counted.append([np.arange(length) for length in (*row.lengths, width - len(row.input_ids))])
    return torch.from_numpy(np.stack([np.concatenate(parts) for parts in counted]))
