"""The files of each part of the data, and the rows of them that the part takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from launch.base.errors import DataError
from launch.data import row_choice, rows
from launch.data.conversation import Sample
from launch.data.files import shards
from launch.schema.data_section import DataSection, DataSource, short_names
from launch.schema.plan import DataFormat, SourceRows

SEVERAL_LINES = ("paragraphs", "whole_text")  # types whose rows are no lines
RowCounts = tuple[tuple[int, ...], ...]  # of each file of each source of data.train_file


@dataclass(frozen=True)
class Source:
    """A file, a folder of shards or a pattern, and the rows of it that a part takes. A source with
    a weight above 1 is several of them, one after another."""

    path: Path
    data_format: DataFormat
    choice: row_choice.RowChoice | None = None  # None: every row
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
    data: DataSection, data_format: DataFormat, counts: RowCounts | None, part: row_choice.Part
) -> tuple[Source, ...]:
    """The sources of a part, none if nothing is held out. `counts` are those of count_rows(), if
    are_counted().

    Raises DataError if no row is left for a part, or of a source."""
    if part == "validation" and data.validation_file is not None:
        return (Source(Path(data.validation_file), data_format),)
    if counts is None:
        path = Path(data.sources[0].path)
        return (Source(path, data_format),) if part == "train" else ()
    held_out, of_all = _held_out(data, counts), list[Source]()
    for index, (source, offsets, num_held_out, num_trained) in enumerate(_divided(data, counts)):
        own, path = data_format.of_source(index), Path(source.path)
        passes: list[row_choice.EvenChoice | None] = [None] if num_held_out else []
        if part == "train":
            passes = row_choice.shares(source.weight, num_trained, path)
        of_all += [
            Source(
                path,
                own,
                row_choice.RowChoice(held_out, part, offsets[0], share),
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
    held_out, begin = _held_out(data, counts), 0
    for source, of_files in zip(data.sources, counts, strict=True):
        end = begin + sum(of_files)
        num_held_out = held_out.before(end) - held_out.before(begin)
        offsets = tuple(accumulate(of_files[:-1], initial=begin))
        yield source, offsets, num_held_out, end - begin - num_held_out
        begin = end


def _held_out(data: DataSection, counts: RowCounts) -> row_choice.EvenChoice:
    total = sum(map(sum, counts))
    if data.validation_size is None:
        return row_choice.EvenChoice(0, total, "held out")
    return row_choice.held_out(data.validation_size, total, data.train_names)


def num_held_out(data: DataSection, counts: RowCounts) -> int:
    """The number of rows that data.validation_size holds out of the training file."""
    return _held_out(data, counts).chosen


def trained_rows(data: DataSection, counts: RowCounts) -> tuple[SourceRows, ...]:
    """The rows of each source that an epoch trains. Raises DataError as of_part() does."""
    result: list[SourceRows] = []
    for source, _, _, once in _divided(data, counts):
        passes = row_choice.shares(source.weight, once, source.path)
        num_rows = sum(once if share is None else share.chosen for share in passes)
        result.append(SourceRows(source.path, source.weight, num_rows))
    return tuple(result)


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


def trained_and_held_out(data: DataSection) -> list[str]:
    """A line for files of data.validation_file that are files of data.train_file too."""
    if data.validation_file is None:
        return []
    trained = {
        file.resolve() for source in data.sources for file in shards.list_shards(Path(source.path))
    }
    held_out = shards.list_shards(Path(data.validation_file))
    shared = [str(file) for file in held_out if file.resolve() in trained]
    if not shared:
        return []
    more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
    return [
        f"{shared[0]}{more} is in data.train_file and in data.validation_file: the held-out loss is"
        " that of rows that are trained"
    ]


def format_of(data: DataSection, data_format: DataFormat, file: Path) -> DataFormat:
    """The format in which a file of the data is read."""
    formats = (
        data_format.of_source(index)
        for index, source in enumerate(data.sources)
        if file in shards.list_shards(Path(source.path))
    )
    return next(formats, data_format)
