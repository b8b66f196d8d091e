"""The way from the token cache to the batches that a rank trains: mapped rows, and padding.

The cache is memory-mapped, so a rank has no row in private memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from launch.data.rows import IGNORED
from training.data import stored_rows

# Tensors of a batch: the tokens that have a loss, and the positions that predict them, counted over
# rows
TARGET_IDS, TARGET_POSITIONS = TARGET_TENSORS = ("target_ids", "target_positions")

# tokens of the filler row of a rank that has no sample in a micro-step; it has no target
FILLER_LENGTH = 2


class Row(NamedTuple):
    """A sample as arrays of integers."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray | None = None  # lengths of its documents, if it is a packed sequence
    number: int | None = None


NOTHING: list[Row] = []  # compared by identity: the rows of a micro-step that no rank computes


class TokenRows(Dataset):
    """The memory-mapped files of the cache. Their rows are Row without a number."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.table = stored_rows.mapped(paths)
        self.batches = self.table.to_batches()
        self.starts = np.cumsum([0, *map(len, self.batches)])

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker that is spawned maps the files itself."""
        return type(self), self.paths

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | None) -> list[Row]:
        """The rows with these indices; NOTHING for None."""
        if indices is None:
            return NOTHING
        rows = [self._row(int(index)) for index in indices]
        return [
            Row(row["input_ids"], row["labels"], row.get("lengths"))
            for row in stored_rows.read(pa.Table.from_batches(rows, self.table.schema))
        ]

    def _row(self, index: int) -> pa.RecordBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.batches[batch].slice(index - int(self.starts[batch]), 1)

    def lengths(self) -> np.ndarray:
        """The numbers of tokens of every row's input and labels, (rows, 2) int32. Only the file's
        offsets are read, not its tokens."""
        return stored_rows.lengths(self.table)


class NumberedRows(TokenRows):
    """TokenRows whose rows have their numbers."""

    def __getitems__(self, indices: Sequence[int] | None) -> list[Row]:
        rows = super().__getitems__(indices)
        if not indices:
            return rows
        return [row._replace(number=number) for row, number in zip(rows, indices, strict=True)]


class EpochLoader(DataLoader):
    """A DataLoader that passes the epoch from Trainer to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        # a SampleOrder in training; torch's annotation knows only Sampler
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right to the longest of the micro-batch, rounded up to `multiple`.

    Returns input_ids, attention_mask, labels (batch, seq) and for T5 decoder_input_ids (batch,
    target seq). With a mask comes is_padded, whether it hides anything: transformers would ask the
    device. Packed sequences have position_ids instead of the mask. These restart with each document
    and with the padding, by which the model separates documents. With `flattens` all rows become a
    single row, (1, tokens), without padding between them. The starts of the documents are added for
    flash_attn's kernels of unequal lengths. An empty list gives a filler row whose labels are all
    IGNORED, so its loss and its gradient are exactly zero. Numbered rows add their numbers,
    sample_ids, as an array that stays on the host, and num_tokens and num_samples of those with
    targets. NOTHING gives an empty batch, for which nothing is computed. With `names_targets` come
    TARGET_TENSORS, (targets,) each: a device would have to be asked for their number.
    """

    pad_token_id: int
    decoder_start_token_id: int | None = None  # T5's first token of a target
    multiple: int = 1
    is_packed: bool = False
    flattens: bool = False
    names_targets: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        if rows is NOTHING:
            return {}
        if not rows:
            pads = np.full(FILLER_LENGTH, self.pad_token_id), np.full(FILLER_LENGTH, IGNORED)
            rows = [Row(*pads, lengths=np.array([FILLER_LENGTH]))]
        batch = self._batch(rows)
        if rows[0].number is not None:
            batch["sample_ids"] = np.array([row.number for row in rows], dtype=np.int32)
            with_target = [row for row in rows if (row.labels != IGNORED).any()]
            batch["num_tokens"] = sum(len(row.input_ids) for row in with_target)
            batch["num_samples"] = len(with_target)
        return batch

    def _batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        batch = self._tensors(rows)
        if self.names_targets:
            shift = self.decoder_start_token_id is None
            batch |= dict(zip(TARGET_TENSORS, targets(batch["labels"].numpy(), shift), strict=True))
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
        batch: dict[str, Any] = {
            "input_ids": inputs,
            "attention_mask": self._padded([np.ones(len(row.input_ids)) for row in rows], 0),
            "labels": labels,
            "is_padded": any(len(row.input_ids) < inputs.size(1) for row in rows),
        }
        if self.decoder_start_token_id is not None:
            shifted = labels.roll(1, dims=1)
            shifted[:, 0] = self.decoder_start_token_id
            batch["decoder_input_ids"] = shifted.masked_fill(shifted == IGNORED, self.pad_token_id)
        return batch

    def _flattened(self, rows: Sequence[Row]) -> dict[str, Any]:
        """A single row of all documents. The padding up to the multiple is a document without
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


def targets(labels: np.ndarray, shift: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """TARGET_TENSORS of labels (batch, seq). `shift`: a position predicts the next token. A batch
    without a target has a position whose target is IGNORED, so that every rank computes."""
    ids = np.full_like(labels, IGNORED)
    ids[:, : labels.shape[1] - shift] = labels[:, int(shift) :]
    positions = np.flatnonzero(ids != IGNORED)
    if not len(positions):
        positions = np.zeros(1, np.int64)
    return torch.from_numpy(ids.reshape(-1)[positions]), torch.from_numpy(positions)


def _row(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """All parts as a tensor (1, tokens)."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)[None])


def _positions(rows: Sequence[Row], width: int) -> torch.Tensor:
    """(batch, width): the tokens of each document and of the padding, counted from 0."""
    counted = []
    for row in rows:
        assert row.lengths is not None and row.lengths.sum() == len(row.input_ids)
        counted.append([np.arange(length) for length in (*row.lengths, width - len(row.input_ids))])
    return torch.from_numpy(np.stack([np.concatenate(parts) for parts in counted]))
