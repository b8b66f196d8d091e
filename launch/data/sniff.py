"""The columns of a data file and what they hold, told by its schema or first rows; columns.py
chooses among them."""

from __future__ import annotations

import itertools
import json
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.base.text import nearest
from launch.data import shards
from launch.data import untrained as data_untrained
from launch.data.shards import MAX_ROW_BYTES, SUFFIXES, FileType

SAMPLE_ROWS = 100  # of a JSON file; parquet has a schema
BLANKS = re.compile(r"[ \t\n\r]*")
MESSAGE_KEYS = (("role", "content"), ("from", "value"))


class _Spare:
    """How many bad rows may still be passed over (data.max_bad_rows)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def use(self, error: DataError) -> None:
        if not self.count:
            raise error
        self.count -= 1


@dataclass(frozen=True)
class Found:
    """A file's columns: name -> "string", "messages", or what else they hold, in words ("int64",
    "null in line 3")."""

    path: Path
    file_type: FileType
    columns: Mapping[str, str]
    # (column, key of its messages or None, number of the first row): content that is not trained
    untrained: Sequence[tuple[str, str | None, str]] = ()
    message_keys: Sequence[tuple[str, str]] = ()  # (column, key) besides role and content


def read(path: Path, max_bad_rows: int = 0) -> Found:
    """The columns of one file, told by the rows that can be read. Raises DataError where it has
    none."""
    try:
        file_type = file_type_of(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path}: 0 rows: the file is empty")
        if file_type in ("parquet", "arrow"):
            num_rows, columns = table(path, file_type)
            if num_rows == 0:
                raise DataError(
                    f"{path}: 0 rows: the file has columns ({', '.join(columns) or 'none'}) but no"
                    " data"
                )
            return Found(path, file_type, columns, *_content_of(_table_rows(path, file_type)))
        if file_type == "text":
            if not any(_lines(path, _Spare(max_bad_rows))):
                raise DataError(f"{path}: 0 rows: every line is blank")
            return Found(path, file_type, {"text": "string"})
        if file_type == "webdataset":
            rows = list(_tar_rows(path, _Spare(max_bad_rows)))
        else:
            rows = list(
                _array_rows(path) if file_type == "json" else _line_rows(path, _Spare(max_bad_rows))
            )
    except OSError as error:
        # the system's own word, or a decompressor's
        what = error.strerror or f"{error}; write or copy it again"
        raise DataError(f"{path}: cannot be read: {what}") from error
    if not rows:
        why = {"json": "the array is empty", "webdataset": "no sample is in it"}.get(
            file_type, "every line is blank"
        )
        raise DataError(f"{path}: 0 rows: {why}")
    return Found(path, file_type, _columns_of(rows, max_bad_rows), *_content_of(rows))


def file_type_of(path: Path) -> FileType:
    """By the ending, once it is sure that a file is there. A .json file that is not one array is
    read as lines."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: there is no such file{_neighbours(path)}") from error
    except (OSError, ValueError) as error:  # a name too long, a loop of links, a NUL
        raise DataError(f"{path}: cannot be opened: {error}") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not an ordinary file"
        raise DataError(f"{path}: is {what}; give a file")
    file_type = SUFFIXES.get(shards.suffix(path))
    if file_type is None:
        raise DataError(
            f"{path}: {path.suffix or 'no ending'} is not a known file type; known:"
            f" {', '.join(SUFFIXES)}"
        )
    if path.suffix.lower() in shards.COMPRESSIONS and file_type not in ("jsonl", "json", "text"):
        raise DataError(f"{path}: a {file_type} file is not read from {path.suffix}; unpack it")
    return "jsonl" if file_type == "json" and not _is_array(path) else file_type


def _neighbours(path: Path) -> str:
    folder = path.parent
    try:
        if not folder.is_dir():
            return f"; nor is there a folder {folder}"
        names = sorted(entry.name for entry in folder.iterdir() if shards.suffix(entry) in SUFFIXES)
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file_type == "arrow":
            with shards.arrow_batches(path) as (schema, batches):
                num_rows = sum(batch.num_rows for batch in batches)
        else:
            with pq.ParquetFile(path) as file:
                num_rows, schema = file.metadata.num_rows, file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: is cut, damaged or no {file_type} file ({reason}); write or copy it again"
        ) from error
    columns: dict[str, str] = {}
    for column in schema:
        columns[column.name] = (
            "two columns of this name" if column.name in columns else _arrow_kind(column.type)
        )
    return num_rows, columns


def _table_rows(path: Path, file_type: FileType) -> list[tuple[str, Mapping[str, Any]]]:
    """("row 3", the columns that may carry content which is not trained) of the first rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def wanted(schema: Any) -> list[str]:
        return [
            column.name
            for column in schema
            if data_untrained.is_column(column.name) or _has_other_keys(column.type)
        ]

    try:
        if file_type == "arrow":
            with shards.arrow_batches(path) as (schema, batches):
                first = (
                    batch.select(wanted(schema))
                    for batch in batches
                    if wanted(schema) and batch.num_rows
                )
                rows = next((batch.slice(0, SAMPLE_ROWS).to_pylist() for batch in first), [])
        else:
            # pages are read as they are needed: a row group of pictures may be larger than memory
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                names = wanted(file.schema_arrow)
                first = file.iter_batches(SAMPLE_ROWS, columns=names) if names else iter(())
                rows = next((batch.to_pylist() for batch in first), [])
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: its first rows cannot be read ({reason}); write or copy it again"
        ) from error
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _has_other_keys(arrow_type: Any) -> bool:
    """True for messages with more than role and content."""
    if _arrow_kind(arrow_type) != "messages":
        return False
    return any(part.name not in data_untrained.MESSAGE_KEYS for part in arrow_type.value_type)


def _arrow_kind(arrow_type: Any) -> str:
    from pyarrow import types

    def is_text(candidate: Any) -> bool:
        if types.is_dictionary(candidate):
            candidate = candidate.value_type
        return (
            types.is_string(candidate)
            or types.is_large_string(candidate)
            or types.is_string_view(candidate)
        )

    if is_text(arrow_type):
        return "string"
    is_list = (
        types.is_list(arrow_type)
        or types.is_large_list(arrow_type)
        or types.is_fixed_size_list(arrow_type)
    )
    if is_list and types.is_struct(arrow_type.value_type):
        parts = {part.name: part.type for part in arrow_type.value_type}
        if any(
            all(name in parts and is_text(parts[name]) for name in pair) for pair in MESSAGE_KEYS
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


def _lines(path: Path, spare: _Spare) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of the lines that are not blank."""
    with shards.opened(path) as stream:
        number = 0
        while raw := stream.readline(MAX_ROW_BYTES):
            number += 1
            if len(raw) == MAX_ROW_BYTES and not raw.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number}: longer than {MAX_ROW_BYTES >> 20} MiB; write one row a line"
                )
            offset = 3 if number == 1 and raw.startswith(b"\xef\xbb\xbf") else 0
            try:
                text = raw[offset:].decode("utf-8").strip()
            except UnicodeDecodeError as error:
                spare.use(DataError(f"{path}:{number}:{offset + error.start}: {_not_utf8(raw)}"))
                continue
            if text:
                yield number, text


def _not_utf8(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; convert the file to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
    if raw.startswith(b"\x1f\x8b"):
        return "is compressed with gzip; unpack the file with gunzip"
    return "this byte is not UTF-8; convert the file to UTF-8, e.g. iconv -f GB18030 -t UTF-8"


def _line_rows(path: Path, spare: _Spare) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("line 3", row) of the first rows of a file with one object a line."""
    num_characters = 0
    for number, text in itertools.islice(_lines(path, spare), SAMPLE_ROWS):
        if num_characters > MAX_ROW_BYTES:
            return
        num_characters += len(text)
        try:
            row = _line_row(text, f"{path}:{number}", shards.suffix(path) == ".json")
        except DataError as error:
            spare.use(error)
            continue
        yield f"line {number}", row


def _tar_rows(path: Path, spare: _Spare) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("sample KEY", row) of the first samples of a WebDataset shard."""
    for key, row in itertools.islice(shards.tar_samples(path), SAMPLE_ROWS):
        if isinstance(row, DataError):
            spare.use(row)
        else:
            yield f"sample {key}", row


def _line_row(text: str, where: str, in_json_file: bool) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: is not JSON ({error.msg} at character {error.pos + 1}); "
            "each line must be one object, a .json file may be one array of objects"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 100,000 deep
        raise DataError(f"{where}: cannot be read as JSON ({error}); mend the line") from error
    if isinstance(row, list) and not in_json_file:
        raise DataError(
            f"{where}: holds a list; a file that is one array of objects must end in .json"
        )
    return _object(row, where)


def _array_rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """("element 3", row) of the first elements of an array; reads on only as far as they reach."""
    raw, limit = b"", 1 << 20
    with shards.opened(path) as stream:
        while True:
            raw += stream.read(limit - len(raw))
            at_end = len(raw) < limit
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                if at_end or error.end < len(raw):  # not a character cut by the limit
                    line = raw.count(b"\n", 0, error.start) + 1
                    start = error.start - (raw.rfind(b"\n", 0, error.start) + 1)
                    raise DataError(f"{path}:{line}:{start}: {_not_utf8(raw)}") from error
                text = raw[: error.start].decode("utf-8")
            try:
                return _decoded_elements(path, text.removeprefix("\ufeff"))
            except json.JSONDecodeError as error:
                if at_end or limit >= MAX_ROW_BYTES:
                    raise DataError(
                        f"{path}:{error.lineno}: is not JSON ({error.msg} at character"
                        f" {error.colno}); mend the file"
                    ) from error
                limit *= 4
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}: cannot be read as JSON ({error}); mend the file"
                ) from error


def _decoded_elements(path: Path, text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Up to SAMPLE_ROWS elements. Raises JSONDecodeError where the first ones are malformed, or not
    yet read whole."""
    decoder = json.JSONDecoder()
    rows: list[tuple[str, Mapping[str, Any]]] = []

    def past_blanks(position: int) -> int:
        match = BLANKS.match(text, position)
        return match.end() if match else position

    position = past_blanks(text.index("[") + 1)
    if text[position : position + 1] == "]":
        return rows
    while len(rows) < SAMPLE_ROWS:
        value, position = decoder.raw_decode(text, position)
        place = f"element {len(rows) + 1}"
        rows.append((place, _object(value, f"{path}: {place}")))
        position = past_blanks(position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        position = past_blanks(position + 1)
    return rows


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: holds {_json_kind(row)}; each row must be an object, e.g. {{"text": "..."}}'
        )
    return row


def _columns_of(rows: Sequence[tuple[str, Mapping[str, Any]]], max_bad_rows: int) -> dict[str, str]:
    """What each key holds: one word where all but so many rows agree, else the row that is out of
    line, worst first."""
    columns: dict[str, str] = {}
    for column in dict.fromkeys(key for _, row in rows for key in row):
        places: dict[str, str] = {}  # what is held -> the first row that does
        for place, row in rows:
            places.setdefault(_json_kind(row[column]) if column in row else "nothing", place)
        odd = [kind for kind in places if kind not in ("string", "messages", "null", "nothing")]
        odd = odd or [kind for kind in places if kind in ("null", "nothing")]
        usual, count = Counter(_json_kind(row.get(column)) for _, row in rows).most_common(1)[0]
        if usual in ("string", "messages") and len(rows) - count <= max_bad_rows:
            columns[column] = usual
        elif len(places) == 1 and not odd:
            columns[column] = next(iter(places))
        else:
            shown = odd[:1] or places
            columns[column] = " and ".join(f"{kind} in {places[kind]}" for kind in shown)
    return columns


def _content_of(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[list[tuple[str, str | None, str]], list[tuple[str, str]]]:
    """Found.untrained and Found.message_keys."""
    content: dict[data_untrained.Name, str] = {}
    keys: dict[tuple[str, str], None] = {}
    for place, row in rows:
        number = place.partition(" ")[2]
        for column in data_untrained.columns(row):
            content.setdefault((column, None), number)
        for column, turns in row.items():
            for turn in turns if isinstance(turns, list) else ():
                if isinstance(turn, dict):
                    keys |= dict.fromkeys(
                        (column, key) for key in turn.keys() - data_untrained.MESSAGE_KEYS
                    )
            for key in data_untrained.keys(turns):
                content.setdefault((column, key), number)
    return [(*name, number) for name, number in content.items()], sorted(keys)


def _json_kind(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return (
            "messages"
            if value and all(map(_is_message, value))
            else "a list"
            if value
            else "an empty list"
        )
    return "an object"


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any(all(isinstance(value.get(key), str) for key in pair) for pair in MESSAGE_KEYS)
