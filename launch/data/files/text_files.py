"""Read files of text whose rows are not lines: CSV and TSV, and a JSON file that is one array. A
byte that is not UTF-8 is named by an error."""

import csv
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.data.files import shards

DELIMITERS = {"csv": ",", "tsv": "\t"}
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_CHUNK = 1 << 20  # characters, or bytes


# ---- UTF-8
# ---------------------------------------------------------------------------


def decoded(place: object, raw: bytes, is_first: bool) -> str | DataError:
    """The text of a line, without the byte order mark of the first line; an error for bytes that
    are not UTF-8."""
    start = len(BOM_UTF8) if is_first and raw.startswith(BOM_UTF8) else 0
    try:
        return raw[start:].decode()
    except UnicodeDecodeError as error:
        return _not_utf8(f"{place}:{start + error.start}", raw)


def _wrong_byte(path: Path) -> DataError:
    """The error for the first byte that is not UTF-8, in a file where one is not."""
    decoder = getincrementaldecoder("utf-8")()
    line, offset = 1, 0
    with shards.opened(path) as file:
        while True:
            raw = file.readline(_CHUNK)  # a line may be the whole file
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                return _not_utf8(f"{path}:{line}:{offset - pending + error.start}", raw)
            line, offset = (line + 1, 0) if raw.endswith(b"\n") else (line, offset + len(raw))


def _not_utf8(wrong: str, raw: bytes) -> DataError:
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return DataError(
            f"{wrong}: is UTF-16; convert the file to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
        )
    if raw.startswith(b"\x1f\x8b"):
        return DataError(f"{wrong}: is compressed with gzip; unpack the file with gunzip")
    return DataError(
        f"{wrong}: this byte is not UTF-8; convert the file to UTF-8, e.g. iconv -f GB18030 -t"
        " UTF-8"
    )


# ---- CSV and TSV: a header, then rows of as many cells, which may hold quoted newlines
# ---------------------------------------------------------------------------


def read_delimited(
    path: Path, file_type: str, decode: Callable[[int, bytes], str]
) -> Iterator[tuple[int, dict[str, str] | DataError]]:
    """(number of its first line, row, or the error of a row of another width) of each row.

    Raises DataError for a header or quotes that leave the rows after them unclear."""
    csv.field_size_limit(shards.MAX_ROW_BYTES)
    start = number = row_bytes = 0

    def lines() -> Iterator[str]:
        nonlocal number, row_bytes
        with shards.opened(path) as file:
            while raw := file.readline(shards.MAX_ROW_BYTES):
                number, row_bytes = number + 1, row_bytes + len(raw)
                if row_bytes > shards.MAX_ROW_BYTES:
                    raise DataError(
                        f"{path}:{start + 1}: a row longer than {shards.MAX_ROW_BYTES >> 20} MiB;"
                        " is a quote missing?"
                    )
                yield decode(number, raw)

    header: list[str] | None = None
    rows = csv.reader(lines(), delimiter=DELIMITERS[file_type], strict=True)
    while True:
        start, row_bytes = number, 0
        try:
            cells = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{start + 1}: cannot be read as {file_type.upper()} ({error}); quote each"
                ' cell that holds a quote, a delimiter or a line end, and write a quote in it as ""'
            ) from error
        if cells is None:
            return
        if not any(cells) and len(cells) < 2:  # a blank line
            continue
        if header is None:
            header = cells
            if twice := [name for name, count in Counter(cells).items() if count > 1]:
                raise DataError(f"{path}:{start + 1}: two columns have the name {twice[0]!r}")
        elif len(cells) != len(header):
            yield (
                start + 1,
                DataError(
                    f"{path}:{start + 1}: found {len(cells)} cells, expected {len(header)} as in"
                    " the header; mend or remove the row"
                ),
            )
        else:
            yield start + 1, dict(zip(header, cells, strict=True))


# ---- a JSON array, an element at a time
# ---------------------------------------------------------------------------


class _Window:
    """The part of a file's text that is in memory: from the element that is read next."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file
        self.text, self.position, self.dropped = "", 0, 0
        self._lines, self._columns = 0, 0  # lines before the text; columns of its first line

    def grow(self) -> bool:
        """Drop what was read, and read as much again as is left; False at the file's end."""
        before, newline, last = self.text[: self.position].rpartition("\n")
        self._lines += before.count("\n") + len(newline)
        self._columns = len(last) + (0 if newline else self._columns)
        self.dropped += self.position
        self.text, self.position = self.text[self.position :], 0
        more = self._file.read(
            min(max(len(self.text), _CHUNK), shards.MAX_ROW_BYTES + _CHUNK - len(self.text))
        )
        self.text += more
        return bool(more)

    def place(self, position: int) -> tuple[int, int]:
        """(line, column) of a position of the text, from 1."""
        begin = self.text.rfind("\n", 0, position)
        column = position - begin + (self._columns if begin < 0 else 0)
        return self._lines + self.text.count("\n", 0, position) + 1, column


def json_elements(path: Path, end: int | None = None) -> Iterator[tuple[int, Any]]:
    """(number from 1, element) of the elements that begin before the `end` (in characters). No
    more than an element and a chunk of the text are in memory."""
    number = 0
    try:
        with TextIOWrapper(shards.opened(path), "utf-8-sig", newline="") as file:
            window = _Window(file)
            while end is None or window.dropped + window.position < end:
                try:
                    element = _next(window.text, window.position, "," if number else "[")
                except json.JSONDecodeError as error:
                    length = len(window.text) - window.position
                    line, column = window.place(error.pos)
                    if length <= shards.MAX_ROW_BYTES and window.grow():
                        continue
                    too_long = (
                        f", or longer than {shards.MAX_ROW_BYTES >> 20} MiB: element {number + 1:,}"
                        f" has no end in {length:,} characters"
                    )
                    raise DataError(
                        f"{path}:{line}: is not JSON ({error.msg.removesuffix(' at')} at character"
                        f" {column})"
                        f"{too_long if length > shards.MAX_ROW_BYTES else ''}; mend the file"
                    ) from error
                if element is None:
                    behind = window.text[window.text.index("]", window.position) + 1 :]
                    if any(map(str.strip, chain([behind], iter(partial(file.read, _CHUNK), "")))):
                        raise DataError(f"{path}: has text after its array; mend the file")
                    return
                value, window.position = element
                number += 1
                yield number, value
    except UnicodeDecodeError as error:
        raise _wrong_byte(path) from error
    except (ValueError, RecursionError) as error:
        # a number of 5,000 digits, brackets 100,000 deep
        raise DataError(f"{path}: cannot be read as JSON ({error}); mend the file") from error


def _next(text: str, position: int, mark: str) -> tuple[Any, int] | None:
    """(the element behind the mark, its end); None at the end of the array. Raises JSONDecodeError
    where the text is malformed, or ends before the element does."""
    position = _past_blanks(text, position)
    if mark == "," and text[position : position + 1] == "]":
        return None
    if text[position : position + 1] != mark:
        raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", text, position)
    position = _past_blanks(text, position + 1)
    if mark == "[" and text[position : position + 1] == "]":
        return None
    value, end = _DECODER.raw_decode(text, position)
    if end == len(text):  # a number may be incomplete: 1 of 12
        raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
    return value, end


def _past_blanks(text: str, position: int) -> int:
    matched = _BLANKS.match(text, position)
    return matched.end() if matched else position
