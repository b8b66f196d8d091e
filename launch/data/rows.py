"""Read a data file: its rows, and the conversations or texts that they make. A bad row is named by
file and line, or counted. The launcher reads the first rows here, the tokeniser all of them."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from launch.base.errors import DataError, ResourceError
from launch.data import threads, untrained
from launch.data.conversation import Sample
from launch.data.files import folders, shards, text_files
from launch.data.normalise import OPENAI, SHAREGPT, RowReader, unique_keys
from launch.schema.plan import DataFormat

_ROWS_AT_ONCE = 1000  # rows read from a table in one batch
UNLIMITED = 1 << 60  # bad rows
_AT_BEGIN = "cannot be read after row 0"  # fault of a table that cannot be opened
_JSON_KINDS = {
    **{str: "string", type(None): "null", bool: "true or false", dict: "an object"},
    **dict.fromkeys((int, float), "a number"),
}


class BadRows:
    """Rows that cannot be read: left out and counted up to `limit` (data.max_bad_rows), one more
    ends the reading.

    `num_parts`: the limit is for each part of the data, and the row may be of any of so many."""

    def __init__(self, limit: int = 0, num_parts: int = 1) -> None:
        self.limit, self.num_parts = limit, num_parts
        self.errors: list[str] = []

    @property
    def count(self) -> int:
        return len(self.errors)

    def none_yet(self) -> Self:
        """The same limit, with no bad row counted."""
        return type(self)(self.limit, self.num_parts)

    def add(self, error: DataError, number: int | None = None) -> None:
        """Count a bad row; `number` is that of the row in its slice, if it is known."""
        self.errors.append(str(error))
        if self.count > self.limit * self.num_parts:
            if not self.limit:
                raise error
            of_each = f" in each of {self.num_parts} parts" if self.num_parts > 1 else ""
            raise DataError(
                f"{error}; it is bad row {self.count}, data.max_bad_rows allows"
                f" {self.limit}{of_each}"
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
    """The place of a row, as an error names it. The lines before a slice are counted only then."""

    of: Slice
    number: int | str  # number from 1 in the slice; the key of a WebDataset's sample
    is_line: bool = False

    def __str__(self) -> str:
        if not self.is_line or not self.of.start:
            return f"{self.of.path}:{self.number}"
        return f"{self.of.path}:{_lines_before(self.of) + int(self.number)}"


def _lines_before(of: Slice) -> int:
    remaining_bytes, count, last = of.start, 0, b""
    with of.path.open("rb") as file:
        while chunk := file.read(min(remaining_bytes, 1 << 20)):
            remaining_bytes -= len(chunk)
            count += chunk.count(b"\n")
            last = chunk[-1:]
    # a line that begins before the slice and ends in it belongs to the one before
    return count + (last != b"\n")


Rows = Iterator[tuple[Place, dict[str, Any]]]
NumberedRows = Iterator[tuple[int, Place, dict[str, Any]]]
_Items = Iterator[tuple[Place, dict[str, Any] | DataError | None]]  # None: a blank line
Takes = Callable[[int], bool]  # the number of a row in its slice -> True if it is read
_ColumnChoice = Callable[[Any], list[str]]  # the Arrow schema of a table -> the columns to read


def read_rows(
    of: Slice,
    file_type: str,
    bad: BadRows,
    choice: _ColumnChoice,
    at_once: int = _ROWS_AT_ONCE,
    takes: Takes | None = None,
) -> NumberedRows:
    """(number in the slice from 0, place, columns) of the rows of a slice; bad rows have a number
    too. Of a table, `at_once` rows are in memory at a time, and only the columns of `choice` are
    read.

    Rows that `takes` does not take are passed over, also as bad rows."""
    items = (item for item in _items(of, file_type, choice, at_once) if item[1] is not None)
    for number, (place, row) in enumerate(items):
        if takes is not None and not takes(number):
            continue
        if isinstance(row, DataError):
            bad.add(row, number)
        elif row is not None:
            yield number, place, row


def _items(of: Slice, file_type: str, choice: _ColumnChoice, at_once: int) -> _Items:
    """The rows of a slice: columns, or the reason why they cannot be read."""
    if file_type in shards.TABLES:
        return _table_rows(of, file_type, choice, at_once)
    if file_type == "webdataset":
        return ((Place(of, key), row) for key, row in shards.tar_samples(of.path))
    if file_type in text_files.DELIMITERS:
        lines = text_files.read_delimited(of.path, file_type, partial(_cells, of))
        return _unpacked(of, ((Place(of, number, is_line=True), row) for number, row in lines))
    if file_type == "json":
        rows = (
            (Place(of, number), _object(each, f"{of.path}: element {number}"))
            for number, each in text_files.json_elements(of.path, of.end)
        )
        return _unpacked(of, rows)
    if file_type in ("paragraphs", "whole_text"):
        return _texts(of, file_type == "paragraphs")
    return ((place, _line_row(place, line, file_type)) for place, line, _ in _lines(of))


def count(of: Slice, data_format: DataFormat, goes_on: Callable[[], None] = lambda: None) -> int:
    """The number of rows that placed_samples() numbers in a slice. `goes_on` is called every
    thousand rows."""
    file_type = data_format.file_type
    if data_format.kind == "oasst":  # several rows make a sample
        items = samples_of(of, data_format, BadRows(UNLIMITED))
    elif file_type in shards.TABLES:
        with shards.opened_table(of.path, file_type, _AT_BEGIN) as (_, groups):
            return sum(group.num_rows for group in islice(groups, of.start, of.end))
    elif file_type in ("jsonl", "text"):
        items = (line for place, line, _ in _lines(of) if not _is_blank(place, line))
    else:
        items = (row for _, row in _items(of, file_type, lambda schema: [], 1) if row is not None)
    number = 0
    for number, _ in enumerate(items, 1):
        if number % _ROWS_AT_ONCE == 0:
            goes_on()
    return number


def _is_blank(place: Place, line: bytes) -> bool:
    # most lines begin with a visible ASCII character
    is_plain = b"!" <= line[:1] <= b"~"
    return not is_plain and _line_row(place, line, "text") is None


def json_kind(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if not isinstance(value, list):
        return _JSON_KINDS[type(value)]
    faults = ((number, _message_fault(turn)) for number, turn in enumerate(value, 1))
    number, fault = next((pair for pair in faults if pair[1]), (0, ""))
    if not fault:
        return "messages" if value else "an empty list"
    is_of_objects = any(isinstance(turn, dict) for turn in value)
    return f"a list whose message {number} {fault}" if is_of_objects else "a list"


def _message_fault(value: Any) -> str:
    """The reason why a value is no message, "" for text in role and something that may be content;
    normalise.py reads it."""
    if not isinstance(value, dict):
        return "is a list" if isinstance(value, list) else f"is {json_kind(value)}"
    fault = f"has the keys {', '.join(map(str, [*value][:5]))}"
    for speaker, content in (OPENAI, SHAREGPT):
        if isinstance(value.get(speaker), str) and (content in value or "tool_calls" in value):
            if isinstance(value.get(content), str | list | None):
                return ""
            fault = f"has {json_kind(value[content])} as {content}"
    return fault


def _object(value: Any, where: object) -> dict[str, Any] | DataError:
    if isinstance(value, dict):
        return value
    return DataError(
        f'{where}: holds {json_kind(value)}; each row must be an object, e.g. {{"text": "..."}}'
    )


# ---- parquet and Arrow
# ---------------------------------------------------------------------------


def _table_rows(of: Slice, file_type: str, choice: _ColumnChoice, at_once: int) -> Rows:
    import pyarrow as pa  # not at the top: a plan needs none of it

    with shards.opened_table(of.path, file_type, _AT_BEGIN) as (schema, groups):
        columns = choice(schema)
        number = sum(group.num_rows for group in islice(groups, of.start))
        try:
            for group in islice(groups, None if of.end is None else of.end - of.start):
                # rows that are Python objects at a time
                most = shards.BATCH_BYTES * group.num_rows // max(group.num_bytes, 1)
                parts = group.parts(columns, max(min(most, at_once), 1))
                for row in _rows_of_parts(of.path, number, parts):
                    number += 1
                    yield Place(of, number), row
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable(of, number, error) from error


def _rows_of_parts(path: Path, number: int, parts: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The rows of parts of a table, of which the first is behind row `number`. Raises DataError for
    a row that is longer than MAX_ROW_BYTES."""

    def lists() -> Iterator[list[dict[str, Any]]]:
        first = number
        for part in parts:
            if part.nbytes > shards.MAX_ROW_BYTES:
                for row in range(part.num_rows):
                    num_bytes = sum(
                        # a slice of a dictionary column contains the whole dictionary; the row is
                        # one value
                        (each.dictionary_decode() if hasattr(each, "dictionary") else each).nbytes
                        for each in part.slice(row, 1).columns
                    )
                    if num_bytes > shards.MAX_ROW_BYTES:
                        raise DataError(
                            f"{path}: row {first + row + 1:,} has {num_bytes:,} bytes, over"
                            f" {shards.MAX_ROW_BYTES >> 20} MiB; write shorter rows"
                        )
            first += part.num_rows
            yield part.to_pylist()

    return chain.from_iterable(shards.within_memory(path, lists()))


def _unreadable(of: Slice, number: int, error: Exception) -> DataError | ResourceError:
    return shards.unreadable(of.path, f"cannot be read after row {number:,}", error)


# ---- CSV, JSON and text
# ---------------------------------------------------------------------------


def _unpacked(of: Slice, items: _Items) -> _Items:
    """The rows of a file that may be packed, and cut."""
    number = 0
    try:
        for place, row in items:
            number = int(place.number)
            yield place, row
    except OSError as error:
        raise _unreadable(of, number, error) from error


def _cells(of: Slice, number: int, raw: bytes) -> str:
    """The text of a line of cells. Raises DataError."""
    line = text_files.decoded(Place(of, number), raw, is_first=number == 1)
    if isinstance(line, DataError):
        raise line
    return line


def _lines(of: Slice, goes_on: bool = False) -> Iterator[tuple[Place, bytes, bool]]:
    """The lines that begin in the slice, or if it `goes_on` those behind it too, each numbered from
    1, and True if it begins in the slice."""
    number = 0
    try:
        with shards.opened(of.path) as file:
            offset = of.start
            if offset:
                file.seek(offset - 1)
                # A line that begins before the slice belongs to the slice before.
                offset += len(file.readline(shards.MAX_ROW_BYTES)) - 1
            while (is_inside := of.end is None or offset < of.end) or goes_on:
                if not (raw := file.readline(shards.MAX_ROW_BYTES)):
                    return
                number, offset = number + 1, offset + len(raw)
                place = Place(of, number, is_line=True)
                if len(raw) == shards.MAX_ROW_BYTES and not raw.endswith(b"\n"):
                    raise DataError(
                        f"{place}: longer than {shards.MAX_ROW_BYTES >> 20} MiB; write one row a"
                        " line"
                    )
                yield place, raw, is_inside
    except OSError as error:  # packed, and cut
        raise _unreadable(of, number, error) from error


def _texts(of: Slice, are_paragraphs: bool) -> _Items:
    """The text of a file, or its paragraphs, each with the place of its first line. A paragraph is
    of the slice in which the blank line before it begins."""
    raws: list[bytes] = []
    first, num_bytes, is_known = Place(of, 1, is_line=True), 0, not of.start
    for place, raw, is_inside in chain(_lines(of, goes_on=True), [(first, b"", False)]):
        if not raw or (are_paragraphs and _is_blank(place, raw)):
            if raws:
                yield first, _line_row(first, b"".join(raws).replace(b"\r\n", b"\n"), "text")
            if not is_inside:
                return
            raws, num_bytes, is_known = [], 0, True
        elif is_known:  # lines before the first blank line belong to the slice before
            first = first if raws else place
            raws.append(raw)
            num_bytes += len(raw)
            if num_bytes > shards.MAX_ROW_BYTES:
                raise DataError(
                    f"{first}: a text longer than {shards.MAX_ROW_BYTES >> 20} MiB, the most of a"
                    " row; divide it, e.g. with blank lines and data.text_rows: paragraphs"
                )


def _line_row(place: Place, raw: bytes, file_type: str) -> dict[str, Any] | DataError | None:
    """The row of a line, or the error of a bad line; None for a blank line."""
    line = text_files.decoded(place, raw, is_first=place.number == 1 and not place.of.start)
    if isinstance(line, DataError):
        return line
    if not (line := line.strip()):
        return None
    if file_type == "text":
        return {"text": line}
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        return DataError(
            f"{place}: is not JSON ({error.msg.removesuffix(' at')} at character"
            f" {error.pos + 1}); mend or remove the line: each line must be one object, a .json"
            " file may be one array of objects"
        )
    except (ValueError, RecursionError) as error:
        # a key twice, a number of 5,000 digits, brackets 100,000 deep
        return DataError(f"{place}: cannot be read as JSON ({error}); mend the line or remove it")
    if isinstance(row, list) and folders.suffix(place.of.path) != ".json":
        return DataError(
            f"{place}: holds a list; a file that is one array of objects must end in .json"
        )
    return _object(row, place)


# ---- samples
# ---------------------------------------------------------------------------


def read_samples(
    path: Path, data_format: DataFormat, bad: BadRows | None = None
) -> Iterator[Sample]:
    """The rows of a file, or of all its shards, as conversations or texts; `bad` (none allowed by
    default) counts rows that are neither."""
    bad = bad or BadRows()
    for shard in shards.list_shards(path):
        yield from samples_of(Slice(shard), data_format, bad)


def samples_of(
    of: Slice,
    data_format: DataFormat,
    bad: BadRows,
    num_rows: int | None = None,
    takes: Takes | None = None,
) -> Iterator[Sample]:
    """read_samples(), of a slice, or of its first rows; with `takes`, of the rows that it takes."""
    return (sample for _, _, sample in placed_samples(of, data_format, bad, num_rows, takes))


def placed_samples(
    of: Slice,
    data_format: DataFormat,
    bad: BadRows,
    num_rows: int | None = None,
    takes: Takes | None = None,
) -> Iterator[tuple[int, Place, Sample]]:
    """The samples of a slice, each with the number of its row, from 0, and its place; threads and
    pairs of turns (oasst) are numbered themselves."""
    columns, reader = data_format.columns, RowReader(data_format)

    def choice(schema: Any) -> list[str]:
        return used + [
            name
            for name in schema.names
            if name not in (*used, *data_format.ignored)
            and (reader.reads(name) or untrained.is_column(name))
        ]

    used = list(columns.values())
    is_threaded = data_format.kind == "oasst"
    rows = read_rows(
        *(of, data_format.file_type, bad, choice, num_rows or _ROWS_AT_ONCE),
        takes=None if is_threaded else takes,
    )
    rows = _without_loss(islice(rows, num_rows), reader.passed)
    if is_threaded:
        for number, talk in enumerate(threads.conversations(rows, columns, bad.add)):
            assert isinstance(talk.place, Place)
            if takes is None or takes(number):
                yield number, talk.place, talk
        return
    for number, place, row in rows:
        try:
            sample = reader.sample(row)
        except untrained.Refused as error:
            raise untrained.Refused(f"{place}: {error}") from error
        except DataError as error:
            bad.add(DataError(f"{place}: {error}"), number)
            continue
        yield number, place, sample if isinstance(sample, str) else replace(sample, place=place)


def _without_loss(rows: NumberedRows, passed: Collection[str]) -> NumberedRows:
    """The rows. A column whose content would be dropped ends the reading, however many bad rows are
    allowed."""
    for number, place, row in rows:
        if names := untrained.columns(row, passed):
            raise untrained.Refused(f"{place}: {untrained.refusal(names)}")
        yield number, place, row


IGNORED = -100  # label of a token that is not a target, torch's own default
