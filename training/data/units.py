"""A corpus in units: rows that follow each other in its shards, tokenised alone, one after another
or side by side.

What a unit holds depends on the files alone, so the rows are the same however many processes share
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from launch.base.errors import DataError
from launch.data import shards
from launch.data.rows import Slice
from launch.schema.plan import DataFormat

Unit = tuple[Slice, ...]


def cut(files: Sequence[Path], data_format: DataFormat, size: int) -> list[Unit]:
    """Units of about `size` bytes of the files as they are stored. Small shards share one, large
    ones are cut.

    What can be read from its beginning only (packed, tar, JSON array) stays whole, and so does a
    file of turns."""
    units: list[Unit] = []
    unit: list[Slice] = []
    held = 0
    for piece, piece_bytes in _pieces(files, data_format, size):
        if unit and held + piece_bytes > size:
            units.append(tuple(unit))
            unit, held = [], 0
        unit.append(piece)
        held += piece_bytes
    return [*units, tuple(unit)]


def _pieces(
    files: Sequence[Path], data_format: DataFormat, size: int
) -> Iterator[tuple[Slice, int]]:
    """(slice, its bytes), in order."""
    for file in files:
        file_bytes = file.stat().st_size
        is_packed = file.suffix.lower() in shards.COMPRESSIONS
        is_whole = (
            is_packed
            or data_format.kind == "oasst"
            or data_format.file_type in ("json", "webdataset")
        )
        if is_whole or file_bytes <= size:
            yield Slice(file), file_bytes
        elif data_format.file_type in ("parquet", "arrow"):
            yield from _tables(file, data_format.file_type, size)
        else:
            count = -(-file_bytes // size)
            cuts = [file_bytes * at // count for at in range(count + 1)]
            for start, end in pairwise(cuts):
                yield Slice(file, start, end), end - start


def _tables(file: Path, file_type: str, size: int) -> Iterator[tuple[Slice, int]]:
    """Row groups of a parquet file, or batches of an Arrow file, as many as make up `size`."""
    start, held, at = 0, 0, -1
    for at, group_bytes in enumerate(_group_bytes(file, file_type)):
        if held and held + group_bytes > size:
            yield Slice(file, start, at), held
            start, held = at, 0
        held += group_bytes
    yield Slice(file, start, at + 1), held


def _group_bytes(file: Path, file_type: str) -> list[int]:
    try:
        if file_type == "arrow":
            with shards.arrow_batches(file) as (_, batches):
                return [batch.nbytes for batch in batches]
        with pq.ParquetFile(file) as opened:
            found = opened.metadata
            groups = [found.row_group(at) for at in range(found.num_row_groups)]
            return [
                sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                for group in groups
            ]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: cannot be read ({str(error).splitlines()[0]}); write or copy it again"
        ) from error
