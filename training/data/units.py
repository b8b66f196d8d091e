"""Divide a corpus into units: consecutive rows of its shards, which are tokenised independently.

The content of a unit depends on the files alone, so the rows are the same for any number of
processes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from launch.data import rows
from launch.data.files import folders, shards
from launch.data.files.text_files import DELIMITERS
from launch.data.sources import Source
from launch.schema.plan import DataFormat

Unit = tuple[rows.Slice, ...]


def of_sources(sources: Sequence[Source], size: int) -> list[tuple[Source, Unit]]:
    """The units of sources; a unit has slices of one source."""
    return [
        (source, unit)
        for source in sources
        for unit in divide(shards.list_shards(source.path), source.data_format, size)
    ]


def row_offsets(
    units: Sequence[tuple[Source, Unit]], goes_on: Callable[[], None]
) -> tuple[tuple[int, ...], ...]:
    """The number of the first row of each slice of each unit. Rows are counted only in files that
    are split, and once."""
    numbers: dict[rows.Slice, int] = {}
    before = None
    for source, unit in units:
        of_files = dict(zip(shards.list_shards(source.path), source.row_offsets, strict=True))
        for of in unit:
            if of not in numbers:
                numbers[of] = of_files[of.path]
                if before is not None and before.path == of.path:
                    numbers[of] = numbers[before] + rows.count(before, source.data_format, goes_on)
            before = of
    return tuple(tuple(numbers[of] for of in unit) for _, unit in units)


def divide(files: Sequence[Path], data_format: DataFormat, size: int) -> list[Unit]:
    """Divide files into units of about `size` bytes on the disk. Small shards share a unit, large
    shards are split.

    A file that can only be read from its beginning (compressed, tar, JSON array, CSV) is not split,
    nor is a file of turns."""
    pieces = list(_pieces(files, data_format, size))
    joined = _joined((piece_bytes for _, piece_bytes in pieces), size)
    return [tuple(piece for piece, _ in pieces[begin:end]) for begin, end, _ in joined]


def _joined(sizes: Iterable[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, sum) of as many sizes in a row as `most` takes; a larger one is alone."""
    begin, total, number = 0, 0, -1
    for number, size in enumerate(sizes):
        if total and total + size > most:
            yield begin, number, total
            begin, total = number, 0
        total += size
    yield begin, number + 1, total


def _pieces(
    files: Sequence[Path], data_format: DataFormat, size: int
) -> Iterator[tuple[rows.Slice, int]]:
    """Yield (slice, its bytes) in order."""
    for file in files:
        file_bytes = file.stat().st_size
        is_whole = (
            file.suffix.lower() in folders.COMPRESSIONS
            or data_format.kind == "oasst"
            or data_format.file_type in ("json", *DELIMITERS, "webdataset", "whole_text")
        )
        if is_whole or file_bytes <= size:
            yield rows.Slice(file), file_bytes
        elif data_format.file_type in ("parquet", "arrow"):
            for begin, end, joined_bytes in _joined(
                _group_bytes(file, data_format.file_type), size
            ):
                yield rows.Slice(file, begin, end), joined_bytes
        else:
            count = -(-file_bytes // size)
            for start, end in pairwise([file_bytes * i // count for i in range(count + 1)]):
                yield rows.Slice(file, start, end), end - start


def _group_bytes(file: Path, file_type: str) -> list[int]:
    """The bytes of the row groups of a parquet file, or of the batches of an Arrow file."""
    with shards.opened_table(file, file_type) as (_, groups):
        return [group.stored_bytes() for group in groups]
