"""A bound on the bytes that the rows of a table decode to. A dictionary holds a text once for any
number of rows, so a small file may decode to more than the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.data.files.shards import MAX_ROW_BYTES

BATCH_BYTES = 256 << 20  # of a batch of rows, by the sizes that its file gives
PIECE_BYTES = 64 << 20  # that are Python objects at a time
REPEATED_BYTES = 1 << 20  # of a row on average, from dictionaries; a system prompt takes 0.01 MiB
HEADER_BYTES = 32  # of a page, at least as many as its first three numbers take
I32_FIELD = 0x15  # Thrift's compact protocol: the next field, of type i32


class RowGroup:
    """The sizes of a row group of a parquet file, of the columns that are read."""

    def __init__(self, path: Path, number: int, group: Any, columns: Sequence[str]) -> None:
        self.path, self.number, self.num_rows = path, number, group.num_rows
        chunks = [group.column(i) for i in range(group.num_columns)]
        self._chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
        self.stored_bytes = sum(chunk.total_uncompressed_size for chunk in self._chunks)
        self.where = f"{path}: row group {number + 1}"
        if self.stored_bytes > MAX_ROW_BYTES * max(self.num_rows, 1):
            raise DataError(
                f"{self.where} unpacks to {self.stored_bytes:,} bytes for {self.num_rows:,} rows,"
                f" over {MAX_ROW_BYTES >> 20} MiB a row; is it damaged? Write shorter rows"
            )

    @cached_property
    def _row_bytes(self) -> float:
        """Bytes that a row decodes to on average, if every value is as long as the dictionary of
        its column."""
        row_bytes = 0.0
        for chunk in self._chunks:
            row_bytes += chunk.total_uncompressed_size / max(self.num_rows, 1)
            if _has_dictionary(chunk):
                values = chunk.num_values / max(self.num_rows, 1)
                row_bytes += values * self._dictionary_bytes(chunk)
        return row_bytes

    def rows_at_once(self, most: int) -> int:
        """The rows of a batch that decodes to BATCH_BYTES at most; at least one."""
        return int(min(max(BATCH_BYTES / max(self._row_bytes, 1), 1), most))

    @property
    def kept_dictionaries(self) -> list[str]:
        """The columns that are read as dictionaries, because a row alone may decode to more than
        BATCH_BYTES."""
        if self._row_bytes <= BATCH_BYTES:
            return []
        return [
            chunk.path_in_schema
            for chunk in self._chunks
            if _has_dictionary(chunk) and chunk.physical_type == "BYTE_ARRAY"
        ]

    def _dictionary_bytes(self, chunk: Any) -> int:
        """Bytes of a column's dictionary, from the header of its page: type, unpacked bytes, packed
        bytes. If there is no such header, the column's bytes, which are not fewer."""
        if chunk.dictionary_page_offset is None:
            return chunk.total_uncompressed_size
        with self.path.open("rb") as file:
            file.seek(chunk.dictionary_page_offset)
            header = iter(file.read(HEADER_BYTES))
        try:
            if (next(header), _number(header), next(header)) != (I32_FIELD, 2, I32_FIELD):
                return chunk.total_uncompressed_size
            return _number(header)
        except StopIteration:
            return chunk.total_uncompressed_size


def _has_dictionary(chunk: Any) -> bool:
    return any("DICTIONARY" in encoding for encoding in chunk.encodings)


def _number(header: Iterator[int]) -> int:
    """A zigzag varint."""
    value, shift, byte = 0, 0, 0x80
    while byte & 0x80:
        byte = next(header)
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1)


def rows_of(
    batch: Any, where: str, first: int, stored_bytes: int
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a batch, PIECE_BYTES of them at a time. `first` is the number of its first row.

    Raises DataError for rows that decode to far more than is stored, and for a row that is longer
    than MAX_ROW_BYTES."""
    decoded_bytes = _decoded_bytes(batch)
    if decoded_bytes <= PIECE_BYTES:
        yield batch.to_pylist()
        return
    rows = f"rows {first + 1:,} to {first + batch.num_rows:,}"
    limit = stored_bytes + REPEATED_BYTES * batch.num_rows
    if decoded_bytes > max(limit, PIECE_BYTES):
        raise DataError(
            f"{where}: {rows} decode to {decoded_bytes:,} bytes from {stored_bytes:,}, over"
            f" {limit:,}: a dictionary repeats long texts, more than {REPEATED_BYTES >> 20} MiB a"
            " row; shorten or remove these rows, or write the file without dictionaries"
        )
    size = max(batch.num_rows * PIECE_BYTES // decoded_bytes, 1)
    for start in range(0, batch.num_rows, size):
        piece = batch.slice(start, size)
        if _decoded_bytes(piece) > MAX_ROW_BYTES:
            for i in range(piece.num_rows):
                _check_row(piece.slice(i, 1), where, first + start + i + 1)
        yield piece.to_pylist()


def _check_row(row: Any, where: str, number: int) -> None:
    row_bytes = _decoded_bytes(row)
    if row_bytes > MAX_ROW_BYTES:
        raise DataError(
            f"{where}: row {number:,} decodes to {row_bytes:,} bytes, over"
            f" {MAX_ROW_BYTES >> 20} MiB; write shorter rows"
        )


def _decoded_bytes(batch: Any) -> int:
    return sum(map(_array_bytes, batch.columns))


def _array_bytes(array: Any) -> int:
    """Bytes of the values of an array, of each use of a dictionary's value."""
    from pyarrow import types

    kind = array.type
    if types.is_dictionary(kind) and _is_text(kind.value_type):
        return _sum(_lengths(array.dictionary).take(array.indices))
    if _is_text(kind):
        return _sum(_lengths(array))
    if types.is_struct(kind):
        return sum(map(_array_bytes, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _array_bytes(array.flatten())
    return array.nbytes


def _lengths(texts: Any) -> Any:
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_string_view(texts.type):
        texts = texts.cast("large_string")
    return pc.binary_length(texts)  # pyright: ignore[reportAttributeAccessIssue]


def _sum(lengths: Any) -> int:
    import pyarrow.compute as pc

    return pc.sum(lengths).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )
