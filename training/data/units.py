"""Divide a corpus into units: consecutive rows of its shards, which are tokenised independently.

The content of a unit depends on the files alone, so the rows are the same for any number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from launch.base.errors import DataError
from launch.data import rows
from launch.data.files import folders, shards
from launch.data.files.delimited import DELIMITERS
from launch.data.rows import Slice
from launch.data.sources import Source
from launch.schema.plan import DataFormat

Unit = tuple[Slice, ...]


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
    numbers: dict[Slice, int] = {}
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
    units: list[Unit] = []
    unit: list[Slice] = []
    unit_bytes = 0
    for piece, piece_bytes in _pieces(files, data_format, size):
        if unit and unit_bytes + piece_bytes > size:
            units.append(tuple(unit))
            unit, unit_bytes = [], 0
        unit.append(piece)
        unit_bytes += piece_bytes
    return [*units, tuple(unit)]


def _pieces(
    files: Sequence[Path], data_format: DataFormat, size: int
) -> Iterator[tuple[Slice, int]]:
    """Yield (slice, its bytes) in order."""
    for file in files:
        file_bytes = file.stat().st_size
        is_packed = file.suffix.lower() in folders.COMPRESSIONS
        is_whole = (
            is_packed
            or data_format.kind == "oasst"
            or data_format.file_type in ("json", *DELIMITERS, "webdataset", "whole_text")
        )
        if is_whole or file_bytes <= size:
            yield Slice(file), file_bytes
        elif data_format.file_type in ("parquet", "arrow"):
            yield from _tables(file, data_format.file_type, size)
        else:
            count = -(-file_bytes // size)
            for start, end in pairwise([file_bytes * i // count for i in range(count + 1)]):
                yield Slice(file, start, end), end - start


def _tables(file: Path, file_type: str, size: int) -> Iterator[tuple[Slice, int]]:
    """Join row groups of a parquet file, or batches of an Arrow file, up to `size` bytes."""
    start, joined_bytes, group = 0, 0, -1
    for group, group_bytes in enumerate(_group_bytes(file, file_type)):
        if joined_bytes and joined_bytes + group_bytes > size:
            yield Slice(file, start, group), joined_bytes
            start, joined_bytes = group, 0
        joined_bytes += group_bytes
    yield Slice(file, start, group + 1), joined_bytes


def _group_bytes(file: Path, file_type: str) -> list[int]:
    try:
        if file_type == "arrow":
            with shards.arrow_batches(file) as (_, batches):
                return [batch.nbytes for batch in batches]
        with pq.ParquetFile(file) as opened:
            metadata = opened.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            return [
                sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                for group in groups
            ]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: cannot be read ({str(error).splitlines()[0]}); write or copy it again"
        ) from error
