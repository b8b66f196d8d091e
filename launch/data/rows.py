"""From a data file to samples: rows, conversations, texts; a row that is none is named by file and
line, or counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.data import shards, untrained
from launch.data.shards import MAX_ROW_BYTES
from launch.schema.plan import DataFormat

Message = dict[str, str]
Sample = list[Message] | str  # a conversation, or a text

ROLE_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


class BadRows:
    """Rows that cannot be read: left out and counted up to `limit` (data.max_bad_rows), one more
    ends the reading."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.errors: list[str] = []

    @property
    def count(self) -> int:
        return len(self.errors)

    def add(self, error: DataError) -> None:
        self.errors.append(str(error))
        if self.count > self.limit:
            if not self.limit:
                raise error
            raise DataError(
                f"{error}; it is bad row {self.count}, data.max_bad_rows allows {self.limit}"
            ) from error


@dataclass(frozen=True)
class Slice:
    """A file, or the rows of it that begin in a range of bytes (lines), row groups (parquet) or
    batches (Arrow)."""

    path: Path
    start: int = 0
    end: int | None = None  # None: to its end


@dataclass(frozen=True)
class Place:
    """Where a row is, as an error names it: counting the lines before a slice can wait until there
    is one."""

    of: Slice
    number: int | str  # from 1 in the slice; of a WebDataset the sample's key
    is_line: bool = False

    def __str__(self) -> str:
        if not self.is_line or not self.of.start:
            return f"{self.of.path}:{self.number}"
        return f"{self.of.path}:{_lines_before(self.of) + int(self.number)}"


def _lines_before(of: Slice) -> int:
    left, count, last = of.start, 0, b""
    with of.path.open("rb") as file:
        while chunk := file.read(min(left, 1 << 20)):
            left -= len(chunk)
            count += chunk.count(b"\n")
            last = chunk[-1:]
    # a line that begins before the slice and ends in it belongs to the one before
    return count + (last != b"\n")


Rows = Iterator[tuple[Place, dict[str, Any]]]


def read_rows(of: Slice, data_format: DataFormat, bad: BadRows) -> Rows:
    """(place, columns) of the rows of a slice, one batch in memory at a time.

    Of a table they are the columns of the format, and those that may carry content which it would
    drop."""
    file_type = data_format.file_type
    if file_type == "parquet":
        yield from _parquet_rows(of, data_format)
    elif file_type == "arrow":
        yield from _arrow_rows(of, data_format)
    elif file_type == "webdataset":
        for key, sample in shards.tar_samples(of.path):
            if isinstance(sample, DataError):
                bad.add(sample)
            else:
                yield Place(of, key), sample
    elif file_type == "json":
        for number, row in enumerate(_array(of.path), start=1):
            if isinstance(row, dict):
                yield Place(of, number), row
            else:
                bad.add(
                    DataError(
                        f"{of.path}: element {number}: found {type(row).__name__}, expected an"
                        " object"
                    )
                )
    else:
        for number, raw in _lines(of):
            place = Place(of, number, is_line=True)
            try:
                row = _row(place, raw, file_type)
            except DataError as error:
                bad.add(error)
                continue
            if row is not None:
                yield place, row


def _columns_to_read(names: Sequence[str], data_format: DataFormat) -> list[str]:
    used = list(data_format.columns.values())
    others = [name for name in names if name not in used and name not in data_format.ignored]
    return [*used, *(name for name in others if untrained.is_column(name))]


def _parquet_rows(of: Slice, data_format: DataFormat) -> Rows:
    import pyarrow as pa  # not at the top: a plan needs none of it
    import pyarrow.parquet as pq

    number, path = 0, of.path
    try:
        # the buffer would keep every row group that was read
        with pq.ParquetFile(path, pre_buffer=False) as file:
            columns = _columns_to_read(file.schema_arrow.names, data_format)
            groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)][
                : of.end
            ]
            number = sum(group.num_rows for group in groups[: of.start])
            for at, group in enumerate(groups[of.start :], start=of.start):
                chunks = [group.column(i) for i in range(group.num_columns)]
                read = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
                unpacked = sum(chunk.total_uncompressed_size for chunk in read)
                if unpacked > MAX_ROW_BYTES * max(group.num_rows, 1):
                    raise DataError(
                        f"{path}: row group {at + 1} unpacks to {unpacked:,} bytes for"
                        f" {group.num_rows:,} rows, over {MAX_ROW_BYTES >> 20} MiB a row; is it"
                        " damaged? Write shorter rows"
                    )
            wanted = list(range(of.start, len(groups)))
            for batch in file.iter_batches(batch_size=1000, row_groups=wanted, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(of, number), row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(_cut(path, number, error)) from error


def _arrow_rows(of: Slice, data_format: DataFormat) -> Rows:
    """Rows of shards that datasets.save_to_disk has written; only what is read of them is in
    memory."""
    import pyarrow as pa

    number = 0
    try:
        with shards.arrow_batches(of.path) as (schema, batches):
            columns = _columns_to_read(schema.names, data_format)
            for at, batch in enumerate(islice(batches, of.end)):
                if at < of.start:
                    number += batch.num_rows
                    continue
                for begin in range(0, batch.num_rows, 1000):
                    for row in batch.select(columns).slice(begin, 1000).to_pylist():
                        number += 1
                        yield Place(of, number), row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(_cut(of.path, number, error)) from error


def _cut(path: Path, number: int, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{path}: cannot be read after row {number:,} ({reason}); write or copy it again"


def _array(path: Path) -> list[Any]:
    try:
        with shards.opened(path) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except OSError as error:  # packed, and cut
        raise DataError(_cut(path, 0, error)) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg} at character {error.colno}); mend"
            " the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); mend the file") from error


def _lines(of: Slice) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of those that begin in the slice."""
    number = 0
    try:
        with shards.opened(of.path) as file:
            at = of.start
            if at:
                file.seek(at - 1)
                # what begins before belongs to the slice before
                at += len(file.readline(MAX_ROW_BYTES)) - 1
            while (of.end is None or at < of.end) and (raw := file.readline(MAX_ROW_BYTES)):
                number, at = number + 1, at + len(raw)
                if len(raw) == MAX_ROW_BYTES and not raw.endswith(b"\n"):
                    place = Place(of, number, is_line=True)
                    raise DataError(
                        f"{place}: longer than {MAX_ROW_BYTES >> 20} MiB; write one row a line"
                    )
                yield number, raw
    except OSError as error:  # packed, and cut
        raise DataError(_cut(of.path, number, error)) from error


def _row(place: Place, raw: bytes, file_type: str) -> dict[str, Any] | None:
    """The row of a line; None where it is blank."""
    is_first = place.number == 1 and not place.of.start
    try:
        line = raw.decode("utf-8-sig" if is_first else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}:{error.start}: this byte of the line is not UTF-8; convert the file to UTF-8"
        ) from error
    if not line:
        return None
    if file_type == "text":
        return {"text": line}
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not valid JSON ({error.msg} at character {error.pos}); mend or remove the"
            " line"
        ) from error
    except (ValueError, RecursionError) as error:
        # a key twice, a number of 5,000 digits, brackets 100,000 deep
        raise DataError(
            f"{place}: cannot be read as JSON ({error}); mend or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: found {type(row).__name__}, expected one JSON object a line")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def samples(path: Path, data_format: DataFormat, bad: BadRows | None = None) -> Iterator[Sample]:
    """The rows of a file, or of all its shards, as conversations or texts; `bad` (none allowed by
    default) counts what is neither."""
    bad = bad or BadRows()
    for shard in shards.of(path):
        yield from samples_of(Slice(shard), data_format, bad)


def samples_of(of: Slice, data_format: DataFormat, bad: BadRows) -> Iterator[Sample]:
    """samples(), of a slice."""
    columns = data_format.columns
    rows = _without_loss(read_rows(of, data_format, bad), data_format)
    if data_format.kind == "oasst":
        yield from _paired_turns(rows, columns["text"], columns["role"], bad)
        return
    for place, row in rows:
        try:
            sample = _sample(row, data_format, place)
        except DataError as error:
            bad.add(error)
            continue
        yield sample


def _without_loss(rows: Rows, data_format: DataFormat) -> Rows:
    """The rows. One with content that the format would drop ends the reading, however many bad rows
    are allowed."""
    ignored, messages = data_format.ignored, data_format.columns.get("messages")
    passed = {*data_format.columns.values(), *ignored}
    for place, row in rows:
        names: list[untrained.Name] = [(column, None) for column in untrained.columns(row, passed)]
        if messages is not None:
            names += [
                (messages, key) for key in dict.fromkeys(untrained.keys(row.get(messages), ignored))
            ]
        if names:
            raise untrained.refusal(str(place), names)
        yield place, row


def _sample(row: dict[str, Any], data_format: DataFormat, where: Place) -> Sample:
    columns = data_format.columns
    if data_format.kind == "messages":
        return _messages(row, columns["messages"], where)
    if data_format.kind == "text":
        return _string(row, columns["text"], where)
    prompt = _string(row, columns["prompt"], where)
    if "context" in columns and row.get(columns["context"]):
        prompt += "\n" + _string(row, columns["context"], where)
    response = _string(row, columns["response"], where)
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _string(row: dict[str, Any], column: str, where: Place) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        found = (
            "no such key"
            if column not in row
            else "null"
            if value is None
            else type(value).__name__
        )
        raise DataError(
            f"{where}: column '{column}': found {found}, expected text; mend or remove the row"
        )
    return _text(value, column, where)


def _text(value: str, column: str, where: Place) -> str:
    """The text, which can be written as UTF-8: JSON's \\ud800 alone is half a character."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: column '{column}': found half a character (a surrogate) at"
                f" {error.start}; mend the row"
            ) from error
    return value


def _messages(row: dict[str, Any], column: str, where: Place) -> list[Message]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"{where}: column '{column}': found {type(turns).__name__}, expected a list of messages"
        )
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, dict) else {}
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if "content" in turn else turn.get("value")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{where}: column '{column}': a message needs text in role and content (or from and"
                " value)"
            )
        if role.lower() in untrained.TOOL_ROLES:
            raise DataError(
                f"{where}: column '{column}': a message of role {role!r} is not trained yet,"
                " expected system, user and assistant; leave such rows out, by"
                " --data.max_bad_rows=N where they are few"
            )
        messages.append(
            {
                "role": ROLE_NAMES.get(role, _text(role, column, where)),
                "content": _text(content, column, where),
            }
        )
    return messages


def _paired_turns(rows: Rows, text: str, role: str, bad: BadRows) -> Iterator[list[Message]]:
    """oasst: consecutive rows of a conversation; a row by the user starts a new pair."""
    prompt: str | None = None
    for where, row in rows:
        try:
            speaker, said = _string(row, role, where), _string(row, text, where)
        except DataError as error:
            bad.add(error)
            prompt = None  # what follows answers a row that is not there
            continue
        if ROLE_NAMES.get(speaker, speaker) == "user":
            prompt = said
        elif prompt is not None:
            yield [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
            prompt = None


def text_of(sample: Sample) -> str:
    """All the text of a sample; a tokenizer is trained on it."""
    return (
        sample if isinstance(sample, str) else "\n".join(message["content"] for message in sample)
    )


IGNORED = -100  # label of a token that is not a target, torch's own default
