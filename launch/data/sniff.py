"""The columns of a data file and the kinds of their values, by its schema or its first rows;
columns.py chooses among them."""

import contextlib
import itertools
import json
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.base.text import nearest
from launch.data.files import folders, shards
from launch.data.files.text_files import DELIMITERS
from launch.data.normalise import OPENAI, SHAREGPT
from launch.data.rows import BadRows, NumberedRows, Slice, json_kind, read_rows
from launch.schema.plan import FileType

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # begins a file that stands for another
SAMPLE_ROWS = 100  # rows whose content is looked at; the columns of a table are in its schema
_SAMPLE_GROUPS = 8  # row groups, or batches, that they are looked for in
_PACKABLE = ("jsonl", "json", *DELIMITERS, "text")  # types read from their beginning
# names of a row in messages, where it is not a line
_ROW_NAMES = {"json": "element", "webdataset": "sample"}
_NO_ROWS = {
    **{"json": "the array is empty", "webdataset": "no sample is in it"},
    **dict.fromkeys(DELIMITERS, "the file has no row below its header"),
}
# number of a row, and the kind of each of its values: the values may take much more memory
_RowKinds = tuple[int | str, Mapping[str, str]]


@dataclass(frozen=True)
class FileColumns:
    """A file's columns: name -> "string", "messages", or what else they hold, in words ("int64",
    "null in line 3")."""

    path: Path
    file_type: FileType
    columns: Mapping[str, str]
    message_keys: Sequence[tuple[str, str]] = ()  # (column, key of its messages)


def read(
    path: Path, bad: BadRows | None = None, messages_columns: Collection[str] = ()
) -> FileColumns:
    """The columns of one file, by the rows that can be read; `messages_columns` may hold messages
    as JSON text. Raises DataError where it has none."""
    bad = bad or BadRows()
    try:
        file_type = file_type_of(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path}: 0 rows: the file is empty")
        with path.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise DataError(
                    f"{path}: is a Git LFS pointer, not the data; fetch the data with git lfs pull"
                )
        num_rows, columns = table(path, file_type) if file_type in shards.TABLES else (None, {})
        if num_rows == 0:
            raise DataError(
                f"{path}: 0 rows: the file has columns ({', '.join(columns) or 'none'}) but no data"
            )
        choice = partial(_columns_of_messages, names=messages_columns)
        rows = itertools.islice(
            read_rows(beginning(path, file_type), file_type, bad, choice, SAMPLE_ROWS),
            1 if file_type == "text" else SAMPLE_ROWS,
        )
        kinds, message_keys = _sampled(rows, file_type in shards.TABLES, messages_columns)
    except OSError as error:
        # the reason of the system, or of a decompressor
        reason = error.strerror or f"{error}; write or copy it again"
        raise DataError(f"{path}: cannot be read: {reason}") from error
    if not kinds and file_type not in shards.TABLES:
        raise DataError(f"{path}: 0 rows: {_NO_ROWS.get(file_type, 'every line is blank')}")
    columns = columns or _columns_of(
        kinds, _ROW_NAMES.get(file_type, "line"), bad.limit * bad.num_parts
    )
    return FileColumns(path, file_type, columns, sorted(message_keys))


def beginning(path: Path, file_type: str) -> Slice:
    """The part of a file whose first rows are looked at."""
    return Slice(path, end=_SAMPLE_GROUPS if file_type in shards.TABLES else shards.MAX_ROW_BYTES)


def _sampled(
    rows: NumberedRows, is_table: bool, messages_columns: Collection[str]
) -> tuple[list[_RowKinds], set[tuple[str, str]]]:
    """The kinds of values in rows, and (column, key) of their messages; of a table the keys
    alone."""
    kinds: list[_RowKinds] = []
    message_keys: set[tuple[str, str]] = set()
    for _, place, row in rows:
        of_row = {} if is_table else {column: json_kind(value) for column, value in row.items()}
        kinds.append((place.number, of_row))
        message_keys.update(
            (column, key)
            for column, value in row.items()
            for turn in _turns(value, column in messages_columns)
            if isinstance(turn, dict)
            for key in turn
        )
    return kinds, message_keys


def _turns(value: Any, may_be_json: bool) -> list[Any]:
    """The messages of a value; none if it is no list of them."""
    if may_be_json and isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):  # reading the rows says so
            value = json.loads(value)
    return value if isinstance(value, list) else []


def _columns_of_messages(schema: Any, names: Collection[str]) -> list[str]:
    kinds = [(column.name, _arrow_kind(column.type)) for column in schema]
    return [
        name for name, kind in kinds if kind == "messages" or (kind == "string" and name in names)
    ]


def file_type_of(path: Path) -> FileType:
    """The type by the ending, once the file is found to be there. A .json file that is not one
    array is read as lines."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: there is no such file{_neighbours(path)}") from error
    except (OSError, ValueError) as error:  # a name too long, a loop of links, a NUL
        raise DataError(f"{path}: cannot be opened: {error}") from error
    if not stat.S_ISREG(mode):
        mode_name = "a folder" if stat.S_ISDIR(mode) else "not an ordinary file"
        raise DataError(f"{path}: is {mode_name}; give a file")
    file_type = folders.SUFFIXES.get(folders.suffix(path))
    if file_type is None:
        raise DataError(
            f"{path}: {path.suffix or 'no ending'} is not a known file type; known:"
            f" {', '.join(folders.SUFFIXES)}"
        )
    if path.suffix.lower() in folders.COMPRESSIONS and file_type not in _PACKABLE:
        raise DataError(f"{path}: a {file_type} file is not read from {path.suffix}; unpack it")
    return "jsonl" if file_type == "json" and not _is_array(path) else file_type


def _neighbours(path: Path) -> str:
    folder = path.parent
    try:
        if not folder.is_dir():
            return f"; nor is there a folder {folder}"
        names = sorted(
            entry.name for entry in folder.iterdir() if folders.suffix(entry) in folders.SUFFIXES
        )
    except OSError:
        return ""  # a folder that may not be listed: nothing to suggest
    if not names:
        return f"; there is no data file in {folder}"
    close = nearest(path.name, names, 3)
    return (
        f"; nearest in that folder: {', '.join(close)}"
        if close
        else f"; in that folder: {', '.join(names[:8])}"
    )


# ---- parquet and Arrow
# ---------------------------------------------------------------------------


def table(path: Path, file_type: FileType) -> tuple[int, dict[str, str]]:
    """(rows, columns) of a parquet file, from its footer, or of an Arrow file."""
    with shards.opened_table(path, file_type) as (schema, groups):
        counts = Counter(schema.names)
        return sum(group.num_rows for group in groups), {
            column.name: "two columns of this name"
            if counts[column.name] > 1
            else _arrow_kind(column.type)
            for column in schema
        }


def _arrow_kind(arrow_type: Any) -> str:
    import pyarrow as pa

    def is_text(candidate: Any) -> bool:
        if pa.types.is_dictionary(candidate):
            candidate = candidate.value_type
        return (
            pa.types.is_string(candidate)
            or pa.types.is_large_string(candidate)
            or pa.types.is_string_view(candidate)
        )

    if is_text(arrow_type):
        return "string"

    def is_list(candidate: Any) -> bool:
        return (
            pa.types.is_list(candidate)
            or pa.types.is_large_list(candidate)
            or pa.types.is_fixed_size_list(candidate)
        )

    if is_list(arrow_type) and pa.types.is_struct(arrow_type.value_type):
        parts = {part.name: part.type for part in arrow_type.value_type}
        for speaker, content in (OPENAI, SHAREGPT):
            content_type = parts.get(content, pa.null() if "tool_calls" in parts else pa.int8())
            if is_text(parts.get(speaker, pa.null())) and (
                is_text(content_type) or pa.types.is_null(content_type) or is_list(content_type)
            ):
                return "messages"
    return str(arrow_type)


# ---- JSON and text
# ---------------------------------------------------------------------------


def _is_array(path: Path) -> bool:
    with shards.opened(path) as stream:
        while chunk := stream.read(1 << 16):
            if text := chunk.removeprefix(b"\xef\xbb\xbf").lstrip():
                return text.startswith(b"[")
    return False


def _columns_of(rows: Sequence[_RowKinds], row_name: str, max_bad_rows: int) -> dict[str, str]:
    """The kind of value of each column: one where all but so many rows agree, else the row that
    differs, worst first."""
    columns: dict[str, str] = {}
    for column in dict.fromkeys(key for _, row in rows for key in row):
        first_of: dict[str, int | str] = {}  # kind -> the number of the first row that has it
        for number, row in rows:
            first_of.setdefault(row.get(column, "nothing"), number)
        odd = [
            kind for kind in first_of if kind not in ("string", "messages", "null", "nothing")
        ] or [kind for kind in first_of if kind in ("null", "nothing")]
        most_common, count = Counter(row.get(column, "null") for _, row in rows).most_common(1)[0]
        if most_common in ("string", "messages") and len(rows) - count <= max_bad_rows:
            columns[column] = most_common
        elif len(first_of) == 1 and not odd:
            columns[column] = next(iter(first_of))
        else:
            columns[column] = " and ".join(
                f"{kind} in {row_name} {first_of[kind]}" for kind in odd[:1] or first_of
            )
    return columns
