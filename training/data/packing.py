"""Pack documents into sequences: several rows in a sequence, each with its own positions and
attention. No torch.

A row that fits is never split: the rows of a window are packed by best fit, the longest first.
Pretraining texts follow one another and are split at the end of a sequence. Packing is
deterministic and holds only a window in memory.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.data.rows import IGNORED

LEAST = 2  # tokens of a document: the first is never a target
_WINDOW_TOKENS = (
    1 << 22
)  # 8 bytes each; of rows of 150 tokens this fills sequences of 512 to 99.9 %
Row = Mapping[str, Sequence[int]]  # input_ids, labels
# input_ids, labels, lengths and numbers of the documents, all int32
_Sequences = Iterator[dict[str, np.ndarray]]


@dataclass
class Packer:
    """Packs rows in their order into sequences of at most `max_length` tokens; documents are
    numbered from 0."""

    max_length: int
    splits: bool  # texts are split at the end of a sequence, so that all sequences are full
    window_tokens: int = _WINDOW_TOKENS
    documents: int = 0  # number of documents so far
    _rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _tokens: int = 0

    def add(self, rows: Iterable[Row]) -> _Sequences:
        """Add rows and yield the sequences that they fill."""
        for row in rows:
            self._rows.append(
                (np.array(row["input_ids"], np.int32), np.array(row["labels"], np.int32))
            )
            self._tokens += len(row["input_ids"])
            if self._tokens >= self.window_tokens:
                yield from self._packed(is_last=False)

    def finish(self) -> _Sequences:
        """Yield the last sequences, after all rows were added."""
        yield from self._packed(is_last=True)

    def _packed(self, is_last: bool) -> _Sequences:
        rows, self._rows, self._tokens = self._rows, [], 0
        if self.splits:
            rows, packs = self._in_order(rows, is_last)
        else:
            packs = best_fit([len(ids) for ids, _ in rows], self.max_length)
        for pack in packs:
            yield {
                "input_ids": np.concatenate([rows[row][0] for row in pack]),
                "labels": np.concatenate([rows[row][1] for row in pack]),
                "lengths": np.array([len(rows[row][0]) for row in pack], np.int32),
                "documents": np.array(pack, np.int32) + self.documents,
            }
        self.documents += sum(map(len, packs))

    def _in_order(
        self, rows: list[tuple[np.ndarray, np.ndarray]], is_last: bool
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[list[int]]]:
        """Split rows into (pieces, the pieces of each sequence). The last sequence waits for more
        rows, unless `is_last`."""
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        packs: list[list[int]] = [[]]
        free = self.max_length
        for ids, labels in rows:
            while len(ids):
                num_taken = min(free, len(ids))
                if len(ids) - num_taken in range(
                    1, LEAST
                ):  # the remaining token would be no document
                    num_taken -= 1
                if num_taken < LEAST:
                    packs.append([])
                    free = self.max_length
                    continue
                packs[-1].append(len(pieces))
                pieces.append(
                    (ids[:num_taken], np.concatenate([[np.int32(IGNORED)], labels[1:num_taken]]))
                )
                ids, labels, free = ids[num_taken:], labels[num_taken:], free - num_taken
        if not is_last:
            self._rows = [pieces[piece] for piece in packs.pop()]
            self._tokens = sum(len(ids) for ids, _ in self._rows)
        return pieces, [pack for pack in packs if pack]


def best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Divide rows among sequences: the longest row first, each into the fullest sequence that still
    has space for it."""
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, sequence) in order
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect_left(spaces, (lengths[row], 0))
        free, pack = spaces.pop(place) if place < len(spaces) else (max_length, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(row)
        if free - lengths[row] >= LEAST:
            insort(spaces, (free - lengths[row], pack))
    return sorted(sorted(pack) for pack in packs)
