"""Documents packed into sequences: several rows in one, each with positions and attention of its
own. No torch.

A row that fits is never cut: rows of a window are packed by best fit, the longest first.
Pretraining texts follow one another and are cut where a sequence is full. Deterministic, and a
window is all that is held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.data.rows import IGNORED

LEAST = 2  # tokens of a document: the first is never a target
WINDOW_TOKENS = 1 << 22  # 8 bytes each; of rows of 150 tokens this fills sequences of 512 to 99.9 %
Row = Mapping[str, Sequence[int]]  # input_ids, labels
# input_ids, labels, lengths and numbers of the documents, all int32
Sequences = Iterator[dict[str, np.ndarray]]


@dataclass
class Packer:
    """Takes rows in their order and gives sequences of at most `max_length` tokens; documents are
    numbered from 0."""

    max_length: int
    cuts: bool  # texts are cut at the end of a sequence, and no place in it stays empty
    window_tokens: int = WINDOW_TOKENS
    documents: int = 0  # so far
    _rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _tokens: int = 0

    def add(self, rows: Iterable[Row]) -> Sequences:
        """The sequences that are full with these rows."""
        for row in rows:
            self._rows.append(
                (np.array(row["input_ids"], np.int32), np.array(row["labels"], np.int32))
            )
            self._tokens += len(row["input_ids"])
            if self._tokens >= self.window_tokens:
                yield from self._packed(is_last=False)

    def rest(self) -> Sequences:
        """What is left, once all rows are here."""
        yield from self._packed(is_last=True)

    def _packed(self, is_last: bool) -> Sequences:
        rows, self._rows, self._tokens = self._rows, [], 0
        if self.cuts:
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
        """(pieces, which of them each sequence holds). The last sequence waits for more rows, if
        there will be any."""
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        packs: list[list[int]] = [[]]
        room = self.max_length
        for ids, labels in rows:
            while len(ids):
                taken = min(room, len(ids))
                if len(ids) - taken in range(1, LEAST):  # what is left would be no document
                    taken -= 1
                if taken < LEAST:
                    packs.append([])
                    room = self.max_length
                    continue
                packs[-1].append(len(pieces))
                pieces.append((ids[:taken], np.concatenate([[np.int32(IGNORED)], labels[1:taken]])))
                ids, labels, room = ids[taken:], labels[taken:], room - taken
        if not is_last:
            waiting = packs.pop()
            self._rows = [pieces[piece] for piece in waiting]
            self._tokens = sum(len(ids) for ids, _ in self._rows)
        return pieces, [pack for pack in packs if pack]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which rows share a sequence: the longest row first, each into the fullest sequence that still
    has room for it."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, sequence) in order
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        at = bisect_left(rooms, (lengths[row], 0))
        left, pack = rooms.pop(at) if at < len(rooms) else (room, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(row)
        if left - lengths[row] >= LEAST:
            insort(rooms, (left - lengths[row], pack))
    return sorted(sorted(pack) for pack in packs)
