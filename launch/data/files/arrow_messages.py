"""A bound on the bytes that the compressed batches of an Arrow file unpack to: a batch is unpacked
as a whole when it is read.

The sizes stand in the flatbuffer of each message (Message.fbs of Apache Arrow) and before each
compressed buffer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.base.errors import DataError

UNPACKED_BYTES = 256 << 20  # of a batch; fewer are unpacked from any
UNPACKED_RATIO = 100  # text is packed to a tenth
# numbers of fields in Message.fbs
HEADER_TYPE, HEADER = 1, 2
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # header types
DATA_OF_DICTIONARY = 1
BUFFERS, COMPRESSION = 2, 3  # of a RecordBatch
BUFFER_BYTES = 16  # its offset and its length
NOT_COMPRESSED = -1  # as the length of an unpacked buffer


def check(path: Path, mapped: Any) -> None:
    """Raise DataError for a batch that unpacks to far more bytes than are stored. `mapped` is the
    file, at the beginning of its messages. Other damage is met when the batches are read."""
    import pyarrow as pa

    with suppress(pa.ArrowException, OSError):
        _check_messages(path, pa.ipc.MessageReader.open_stream(mapped))


def _check_messages(path: Path, messages: Iterable[Any]) -> None:
    number = 0
    for message in messages:
        unpacked_bytes = _unpacked_bytes(memoryview(message.metadata), message.body)
        number += message.type == "record batch"
        stored_bytes = message.body.size if message.body else 0
        if unpacked_bytes > max(UNPACKED_BYTES, UNPACKED_RATIO * stored_bytes):
            raise DataError(
                f"{path}: batch {max(number, 1)}: its {stored_bytes:,} bytes unpack to"
                f" {unpacked_bytes:,}; is it damaged? If it is meant so, write smaller batches, or"
                " do not compress them"
            )


def _unpacked_bytes(metadata: memoryview, body: Any) -> int:
    """Bytes of the buffers of a message, if they are compressed; else 0."""
    message = _Table(metadata, _number(metadata, 0, 4))
    kind = message.place(HEADER_TYPE)
    kind = metadata[kind] if kind else 0
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH) or not body:
        return 0
    batch = message.table(HEADER)
    if kind == DICTIONARY_BATCH:
        batch = batch.table(DATA_OF_DICTIONARY)
    buffers = batch.place(BUFFERS)
    if not batch.place(COMPRESSION) or not buffers:
        return 0
    start = buffers + _number(metadata, buffers, 4)
    total, stored = 0, memoryview(body)
    for i in range(_number(metadata, start, 4)):
        place = start + 4 + i * BUFFER_BYTES
        offset, length = _number(metadata, place, 8), _number(metadata, place + 8, 8)
        if length:
            unpacked = _number(stored, offset, 8)
            total += length if unpacked == NOT_COMPRESSED else unpacked
    return total


class _Table:
    """A table of a flatbuffer. pyarrow has verified it."""

    def __init__(self, data: memoryview, start: int) -> None:
        self._data, self._start = data, start
        self._fields = start - _number(data, start, 4)

    def place(self, field: int) -> int:
        """The place of a field; 0 if it is absent."""
        slot = 4 + 2 * field
        if slot >= _number(self._data, self._fields, 2):
            return 0
        offset = _number(self._data, self._fields + slot, 2)
        return self._start + offset if offset else 0

    def table(self, field: int) -> _Table:
        place = self.place(field)
        return _Table(self._data, place + _number(self._data, place, 4))


def _number(data: memoryview, start: int, size: int) -> int:
    return int.from_bytes(data[start : start + size], "little", signed=size > 2)
