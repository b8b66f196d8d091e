"""The files of each part of the data, and the rows of them that the part takes.

Rows that data.validation_size holds out, and those of a source whose weight is no whole number, are
chosen by their numbers alone. So each start, each process that tokenises and `show` choose the same
rows."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

from launch.base.errors import DataError
from launch.data import rows
from launch.data.conversation import Sample
from launch.data.files import shards
from launch.schema.data_section import DataSection, DataSource, short_names
from launch.schema.plan import DataFormat, SourceRows

SEVERAL_LINES = ("paragraphs", "whole_text")  # types whose rows are no lines
Part = Literal["train", "validation"]
RowCounts = tuple[tuple[int, ...], ...]  # of each file of each source of data.train_file


# ---- rows by their numbers
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EvenChoice:
    """`chosen` of `total` rows: the rows are divided into `chosen` stretches of equal length, and
    one row of each is chosen by a hash."""

    chosen: int
    total: int
    seed: str

    def holds(self, number: int) -> bool:
        """True if a row is chosen; rows are numbered from 0."""
        return self.chosen > 0 and number == self._place(self._stretch(number))

    def before(self, number: int) -> int:
        """The number of rows that are chosen before this row."""
        if not self.chosen:
            return 0
        stretch = self._stretch(number)
        return stretch + (self._place(stretch) < number)

    def _stretch(self, number: int) -> int:
        return number * self.chosen // self.total

    def _place(self, stretch: int) -> int:
        """The row of a stretch that is chosen."""
        begin, end = (-(-i * self.total // self.chosen) for i in (stretch, stretch + 1))
        digest = hashlib.sha256(f"{self.seed} {stretch}".encode()).digest()
        return begin + int.from_bytes(digest[:8], "little") % (end - begin)


@dataclass(frozen=True)
class RowChoice:
    """The rows of a source that a part of the data takes."""

    held_out: EvenChoice
    part: Part
    begin: int = 0  # the number of the source's first row
    # choice of the rows that are trained; None: all of the source's rows
    share: EvenChoice | None = None

    def takes(self, number: int) -> bool:
        if self.part == "validation" or self.held_out.holds(number):
            return self.part == "validation" and self.held_out.holds(number)
        if self.share is None:
            return True
        held_out = self.held_out.before(number) - self.held_out.before(self.begin)
        return self.share.holds(number - self.begin - held_out)


def choose_held_out(size: float, total: int, file: object) -> EvenChoice:
    """The rows that data.validation_size holds out of `total` rows. Raises DataError if no row
    would be left for one of the parts."""
    chosen = size if isinstance(size, int) else round(size * total)
    if not 0 < chosen < total:
        raise DataError(
            f"{file}: data.validation_size {size:,} holds {chosen:,} of {total:,} rows out, and"
            f" leaves {max(total - chosen, 0):,} to train on; expected at least 1 row for each,"
            " e.g. --data.validation_size=1"
        )
    return EvenChoice(chosen, total, "held out")


def shares(weight: float, num_rows: int, file: object) -> list[EvenChoice | None]:
    """The rows of a source in each pass over it: all of them (None) as often as the weight is
    whole, then the rest of the weight. Raises DataError if no row would be trained."""
    passes: list[EvenChoice | None] = [None] * math.floor(weight)
    if chosen := round((weight - len(passes)) * num_rows):
        passes.append(EvenChoice(chosen, num_rows, f"pass {len(passes)}"))
    if not passes or not num_rows:
        raise DataError(
            f"{file}: weight {weight:g} of {num_rows:,} rows is no row; raise the weight, or leave"
            " the source out"
        )
    return passes


# ---- files of a part
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file, a folder of shards or a pattern, and the rows of it that a part takes. A source with
    a weight above 1 is several of them, one after another."""

    path: Path
    data_format: DataFormat
    choice: RowChoice | None = None  # None: every row
    row_offsets: tuple[int, ...] = ()  # with a choice: the number of the first row of each file
    is_repeat: bool = False  # its rows are in an earlier pass too, which counts its bad rows

    def read(self, bad: rows.BadRows) -> Iterator[Sample]:
        """The samples that the part takes, in order."""
        for index, file in enumerate(shards.list_shards(self.path)):
            first = self.row_offsets[index] if self.row_offsets else 0
            yield from samples_of(rows.Slice(file), first, self, bad)


def samples_of(of: rows.Slice, first: int, source: Source, bad: rows.BadRows) -> Iterator[Sample]:
    """The samples of a slice that a part takes. `first` is the number of its first row."""
    choice = source.choice
    takes = None if choice is None else lambda number: choice.takes(first + number)
    return rows.samples_of(of, source.data_format, bad, takes=takes)


def samples_in(of: Sequence[Source], max_bad_rows: int) -> Iterator[Sample]:
    """The samples of sources, of which so many bad rows each are left out."""
    for source in of:
        yield from source.read(rows.BadRows(max_bad_rows))


def name(sources: Sequence[Source]) -> str:
    """The names of the sources of a part, for people."""
    names = ", ".join(short_names(source.path for source in sources).values())
    choice = sources[0].choice
    return f"{names} (held out)" if choice is not None and choice.part == "validation" else names


# ---- rows of the training file
# ---------------------------------------------------------------------------


def are_counted(data: DataSection) -> bool:
    """True if the rows of the training file are chosen by their numbers."""
    return data.validation_size is not None or data.is_mixed


def count_rows(data: DataSection, data_format: DataFormat, facts: shards.FileFacts) -> RowCounts:
    """The number of rows in each file of data.train_file. They are read once, and remembered."""
    counts = []
    for index, source in enumerate(data.sources):
        own = data_format.of_source(index)
        what = "numbered pairs" if own.kind == "oasst" else "numbered rows"
        what = f"numbered {own.file_type}" if own.file_type in SEVERAL_LINES else what
        counts.append(
            tuple(
                facts.get(file, what, partial(rows.count, rows.Slice(file), own))
                for file in shards.list_shards(Path(source.path))
            )
        )
    facts.keep()
    return tuple(counts)


def of_part(
    data: DataSection, data_format: DataFormat, counts: RowCounts | None, part: Part
) -> tuple[Source, ...]:
    """The sources of a part, none if nothing is held out. `counts` are those of count_rows(), if
    are_counted().

    Raises DataError if no row is left for a part, or of a source."""
    if part == "validation" and data.validation_file is not None:
        return (Source(Path(data.validation_file), data_format),)
    if counts is None:
        path = Path(data.sources[0].path)
        return (Source(path, data_format),) if part == "train" else ()
    held_out, of_all = held_out_rows(data, counts), list[Source]()
    for index, (source, offsets, num_held_out, num_trained) in enumerate(_divided(data, counts)):
        own, path = data_format.of_source(index), Path(source.path)
        passes: list[EvenChoice | None] = [None] if num_held_out else []
        if part == "train":
            passes = shares(source.weight, num_trained, path)
        of_all += [
            Source(
                path,
                own,
                RowChoice(held_out, part, offsets[0], share),
                offsets,
                number > 0,
            )
            for number, share in enumerate(passes)
        ]
    return tuple(of_all)


def _divided(
    data: DataSection, counts: RowCounts
) -> Iterator[tuple[DataSource, tuple[int, ...], int, int]]:
    """Yield each source of data.train_file, the number of the first row of each file of it, and its
    numbers of rows that are held out and that are not."""
    held_out, begin = held_out_rows(data, counts), 0
    for source, of_files in zip(data.sources, counts, strict=True):
        end = begin + sum(of_files)
        num_held_out = held_out.before(end) - held_out.before(begin)
        offsets = tuple(accumulate(of_files[:-1], initial=begin))
        yield source, offsets, num_held_out, end - begin - num_held_out
        begin = end


def held_out_rows(data: DataSection, counts: RowCounts) -> EvenChoice:
    """The rows of the training file that data.validation_size holds out."""
    total = sum(map(sum, counts))
    if data.validation_size is None:
        return EvenChoice(0, total, "held out")
    return choose_held_out(data.validation_size, total, data.train_names)


def trained_rows(data: DataSection, counts: RowCounts) -> tuple[SourceRows, ...]:
    """The rows of each source that an epoch trains. Raises DataError as of_part() does."""

    def num_rows(source: DataSource, once: int) -> int:
        passes = shares(source.weight, once, source.path)
        return sum(once if share is None else share.chosen for share in passes)

    return tuple(
        SourceRows(source.path, source.weight, num_rows(source, once))
        for source, _, _, once in _divided(data, counts)
    )


def check_apart(data: DataSection) -> None:
    """Raises DataError for a file that two sources name."""
    source_of: dict[Path, str] = {}
    for source in data.sources:
        for file in shards.list_shards(Path(source.path)):
            other = source_of.setdefault(file.resolve(), source.path)
            if other != source.path:
                raise DataError(
                    f"{file}: is in two sources of data.train_file, {other} and {source.path};"
                    " leave it out of one of them"
                )


def trained_and_held_out(data: DataSection) -> Iterator[str]:
    """Yield a line for files of data.validation_file that are files of data.train_file too."""
    if data.validation_file is None:
        return
    trained = {
        file.resolve() for source in data.sources for file in shards.list_shards(Path(source.path))
    }
    if shared := [
        file for file in shards.list_shards(Path(data.validation_file)) if file.resolve() in trained
    ]:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        yield (
            f"{shared[0]}{more} is in data.train_file and in data.validation_file: the held-out"
            " loss is that of rows that are trained"
        )


def format_of(data: DataSection, data_format: DataFormat, file: Path) -> DataFormat:
    """The format in which a file of the data is read."""
    formats = (
        data_format.of_source(index)
        for index, source in enumerate(data.sources)
        if file in shards.list_shards(Path(source.path))
    )
    return next(formats, data_format)
