"""Read a JSON file that is one array, an element at a time."""

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.data.files import shards, utf8

_BLANKS = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()
_CHUNK = 1 << 20  # characters


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


def elements(path: Path, end: int | None = None) -> Iterator[tuple[int, Any]]:
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
                    _check_end(path, window.text[window.text.index("]", window.position) + 1 :])
                    while more := file.read(_CHUNK):
                        _check_end(path, more)
                    return
                value, window.position = element
                number += 1
                yield number, value
    except UnicodeDecodeError as error:
        raise utf8.wrong_byte(path) from error
    except (ValueError, RecursionError) as error:
        # a number of 5,000 digits, brackets 100,000 deep
        raise DataError(f"{path}: cannot be read as JSON ({error}); mend the file") from error


def _check_end(path: Path, text: str) -> None:
    if text.strip():
        raise DataError(f"{path}: has text after its array; mend the file")


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
    value, end = DECODER.raw_decode(text, position)
    if end == len(text):  # a number may be incomplete: 1 of 12
        raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
    return value, end


def _past_blanks(text: str, position: int) -> int:
    matched = _BLANKS.match(text, position)
    return matched.end() if matched else position
