"""The files of each part of the data, and the rows of them that the part takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from launch.data import row_choice, rows, shards
from launch.data.conversation import Sample
from launch.data.row_choice import Part, RowChoice
from launch.data.rows import BadRows, Slice
from launch.data.shards import FileFacts
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat


@dataclass(frozen=True)
class Source:
    """A file, a folder of shards or a pattern, and the rows of it that a part takes."""

    path: Path
    data_format: DataFormat
    choice: RowChoice | None = None  # None: every row
    row_offsets: tuple[int, ...] = ()  # with a choice: the number of the first row of each file

    @property
    def name(self) -> str:
        is_held_out = self.choice is not None and self.choice.part == "validation"
        return f"{self.path.name} (held out)" if is_held_out else self.path.name

    def read(self, bad: BadRows) -> Iterator[Sample]:
        """The samples that the part takes, in order."""
        for index, file in enumerate(shards.of(self.path)):
            first = self.row_offsets[index] if self.row_offsets else 0
            yield from samples_of(Slice(file), first, self, bad)


def samples_of(of: Slice, first: int, source: Source, bad: BadRows) -> Iterator[Sample]:
    """The samples of a slice that a part takes. `first` is the number of its first row."""
    choice = source.choice
    takes = None if choice is None else lambda number: choice.takes(first + number)
    return rows.samples_of(of, source.data_format, bad, takes=takes)


def count_rows(data: DataSection, data_format: DataFormat, facts: FileFacts) -> tuple[int, ...]:
    """The number of rows in each file of data.train_file. They are read once, and remembered."""
    what = "numbered pairs" if data_format.kind == "oasst" else "numbered rows"
    counts = tuple(
        facts.get(file, what, partial(rows.count, Slice(file), data_format))
        for file in shards.of(Path(data.train_file))
    )
    facts.keep()
    return counts


def of_part(
    data: DataSection, data_format: DataFormat, counts: Sequence[int] | None, part: Part
) -> Source | None:
    """The rows of a part; None if nothing is held out. `counts` are those of count_rows(), if rows
    are held out of data.train_file.

    Raises DataError if no row is left for a part."""
    if part == "validation" and data.validation_file is not None:
        return Source(Path(data.validation_file), data_format)
    train_file = Path(data.train_file)
    if data.validation_size is None:
        return Source(train_file, data_format) if part == "train" else None
    assert counts is not None
    held_out = row_choice.held_out(data.validation_size, sum(counts), train_file)
    row_offsets = tuple(accumulate(counts[:-1], initial=0))
    return Source(train_file, data_format, RowChoice(held_out, part), row_offsets)


def num_rows(data: DataSection, counts: Sequence[int]) -> tuple[int, int]:
    """(rows that are trained, rows that are held out) of data.train_file with these counts. Raises
    DataError as of_part() does."""
    assert data.validation_size is not None
    total = sum(counts)
    chosen = row_choice.held_out(data.validation_size, total, data.train_file).chosen
    return total - chosen, chosen
