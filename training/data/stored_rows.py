"""Rows of the token cache as Arrow columns: 2 bytes a token, or 3 of a larger vocabulary, and the
spans of a decoder's targets in place of its labels. No torch.

    input_ids       list<uint16>  the lower 16 bits of each token id
    input_ids_high  list<uint8>   the upper 8 bits, if an id of the vocabulary has more than 16
    targets         list<int32>   begin and end of each span of tokens that are targets, by turns
    labels, labels_high           of T5, whose target is a text of its own: as input_ids
    lengths, documents            list<int32>, of packed sequences
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from launch.data.rows import IGNORED

_HIGH = "_high"  # ends the name of a column of upper bits
_LOW_BITS = 16


def schema(largest_id: int, has_labels: bool, is_packed: bool) -> pa.Schema:
    """The columns for token ids up to `largest_id`. `has_labels`: T5's."""
    types = {}
    for name in ("input_ids", "labels") if has_labels else ("input_ids",):
        types[name] = pa.list_(pa.uint16())
        if largest_id >> _LOW_BITS:
            types[name + _HIGH] = pa.list_(pa.uint8())
    if not has_labels:
        types["targets"] = pa.list_(pa.int32())
    if is_packed:
        types |= dict.fromkeys(("lengths", "documents"), pa.list_(pa.int32()))
    return pa.schema(list(types.items()))


def batch(rows: Sequence[Mapping[str, Any]], columns: pa.Schema) -> pa.RecordBatch:
    """Rows of input_ids and labels (and lengths, documents) as columns of that schema."""
    return pa.RecordBatch.from_arrays([_column(rows, field) for field in columns], schema=columns)


def _column(rows: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    name = field.name.removesuffix(_HIGH)
    lists = [np.asarray(row["labels" if name == "targets" else name], np.int64) for row in rows]
    if name == "targets":
        # the places where targets begin and end, by turns
        lists = [
            np.flatnonzero(np.diff(labels != IGNORED, prepend=False, append=False))
            for labels in lists
        ]
    ends = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    values = np.concatenate(lists) if lists else np.empty(0, np.int64)
    if field.name != name:
        values = values >> _LOW_BITS
    elif pa.types.is_uint16(field.type.value_type):
        values = values & ((1 << _LOW_BITS) - 1)
    return pa.ListArray.from_arrays(_array(ends, pa.int32()), _array(values, field.type.value_type))


def _array(values: np.ndarray, value_type: pa.DataType) -> pa.Array:
    """Integers as an Arrow array. pa.array() would import pandas, which takes 0.4 s and 40 MiB."""
    stored = values.astype(value_type.to_pandas_dtype())
    return pa.Array.from_buffers(value_type, len(stored), [None, pa.py_buffer(stored)])


def mapped(files: Sequence[Path]) -> pa.Table:
    """The rows of files, memory-mapped."""
    streams = [pa.ipc.open_stream(pa.memory_map(str(file))) for file in files]
    batches = [batch for stream in streams for batch in stream]
    return pa.Table.from_batches(batches, streams[0].schema)


def lengths(table: pa.Table) -> np.ndarray:
    """The numbers of tokens of every row's input and labels, (rows, 2) int32. Only the file's
    offsets are read, not its tokens."""
    import pyarrow.compute as pc

    labels = "labels" if "labels" in table.column_names else "input_ids"
    columns = [
        np.from_dlpack(pc.call_function("list_value_length", [table.column(name)]).combine_chunks())
        for name in ("input_ids", labels)
    ]
    return np.stack(columns, axis=1)


def targets(table: pa.Table) -> np.ndarray:
    """The number of positions of every row that predict a token with a loss, (rows,) int32: nothing
    predicts a decoder's first token."""
    if "labels" in table.column_names:
        return lengths(table)[:, 1]
    return np.concatenate([np.empty(0, np.int32), *map(_targets, table.column("targets").chunks)])


def _targets(spans: pa.ListArray) -> np.ndarray:
    # The offsets of a slice count from the beginning of the whole array
    ends = np.from_dlpack(spans.offsets)
    borders = np.from_dlpack(spans.values)[ends[0] : ends[-1]].astype(np.int64)
    starts = np.maximum(borders[::2], 1)
    until = np.cumsum([0, *(np.maximum(borders[1::2], 1) - starts)])
    return np.diff(until[(ends - ends[0]) // 2]).astype(np.int32)


def read(table: pa.Table) -> list[dict[str, np.ndarray]]:
    """The rows of a table as integer arrays: input_ids and labels, and of packed sequences lengths
    and documents."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    names = [name for name in columns if not name.endswith(_HIGH)]
    rows = []
    for index in range(len(table)):
        row = {name: _values(columns, name, index) for name in names}
        if (spans := row.pop("targets", None)) is not None:
            row["labels"] = np.full(len(row["input_ids"]), IGNORED, np.int32)
            for begin, end in spans.reshape(-1, 2):
                row["labels"][begin:end] = row["input_ids"][begin:end]
        rows.append(row)
    return rows


def _values(columns: Mapping[str, pa.ListArray], name: str, index: int) -> np.ndarray:
    values: Any = np.from_dlpack(columns[name][index].values)  # to_numpy() would import pandas
    if name + _HIGH not in columns:
        return values
    high = np.from_dlpack(columns[name + _HIGH][index].values).astype(np.int32)
    return values | high << _LOW_BITS
