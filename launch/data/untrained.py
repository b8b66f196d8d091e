"""Columns and keys of messages that carry content which is not trained: refused by name, or left
out on purpose."""

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from launch.base.errors import DataError

_PREFERENCES = "is for another kind of training (preference pairs, as DPO and ORPO use them)"
LABELS = "is for another kind of training (KTO, classification)"
_NOT_A_COLUMN = "is read as a key of a message, not as a column"
FILES = (  # endings of a WebDataset's members
    *("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("wav", "flac", "mp3", "ogg", "opus", "m4a"),
    *("mp4", "mkv", "avi", "mov", "webm"),
)
_OF_COLUMNS = ("history", "system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
_OF_BOTH: Mapping[str, str] = {  # name in lower case -> what becomes of its content
    **dict.fromkeys(("chosen", "rejected", "rejected_response"), _PREFERENCES),
    **dict.fromkeys(("label", "kto_tag", "cls"), LABELS),
    **dict.fromkeys(
        ("image", "images", "audio", "audios", "video", "videos", *FILES), "is not trained yet"
    ),
}
COLUMNS: Mapping[str, str] = {
    **_OF_BOTH,
    **dict.fromkeys((*_OF_COLUMNS, *TOOLS), "is not read in this format"),
    **dict.fromkeys(("tool_calls", "function_call", "weight"), _NOT_A_COLUMN),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _NOT_A_COLUMN),
    "score": "is for another kind of training (reward models)",
}
KEYS: Mapping[str, str] = {  # keys of a message -> why they are refused
    **_OF_BOTH,
    **dict.fromkeys(_OF_COLUMNS, "is read as a column, not as a key of a message"),
    **dict.fromkeys(TOOLS, "is read as a column, or as a key of a system message"),
    **dict.fromkeys(
        ("mask", "loss"),
        "may mean trained or not trained (write weight: 0 for a turn without loss)",
    ),
}
_EMPTY_JSON = ("", "[]", "{}", "null")
_SHELL_TEXT = re.compile(r"[\w\[\],.=:/@%+-]+", re.ASCII)  # the names that need no quotes, in []
_YAML_TEXT = re.compile(r"[^\W\d][\w. -]*\w|[^\W\d]")
MAX_DEPTH = 16  # lists in lists that are searched; deeper values count as content


class Refused(DataError):
    """Content that would be dropped. It ends the reading, however many bad rows are allowed."""


@cache
def is_column(name: str) -> bool:
    """True for a column that may carry content which is not trained."""
    return _plain(name) in COLUMNS


def is_other_training(name: str) -> bool:
    """True for a column of preference pairs or labels."""
    return COLUMNS.get(_plain(name)) in (_PREFERENCES, LABELS)


def is_pair(names: Sequence[str]) -> bool:
    """True if a column of preference pairs is among these."""
    return any(COLUMNS.get(_plain(name)) == _PREFERENCES for name in names)


def is_key(name: str) -> bool:
    """True for a key of a message that may carry content which is not trained."""
    return _plain(name) in KEYS


def _plain(name: str) -> str:
    ending = name.lower().rpartition(".")[2]
    return ending if ending in FILES else name.lower()  # left.jpg of a WebDataset


def columns(row: Mapping[str, Any], passed: Collection[str] = ()) -> list[str]:
    """Columns of a row whose content would be dropped, but for those `passed`, which are read or
    ignored."""
    return [
        column
        for column, value in row.items()
        if is_column(column) and column not in passed and not is_empty(value)
    ]


def is_empty(value: Any, levels: int = MAX_DEPTH) -> bool:
    """True for a value without content: null, NaN, "", [], {}, or nothing but such values. False
    and 0 are content."""
    if isinstance(value, str):
        return value.strip() in _EMPTY_JSON
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return levels > 0 and all(is_empty(item, levels - 1) for item in items)
    return value is None or value != value or value == b""


def refusal(names: Sequence[str], messages: str | None = None, hint: str | None = None) -> Refused:
    """The error for content of these columns, or of these keys of the messages in a column. `hint`
    says what to do, if the rest of a row cannot be trained."""
    kind, reason_of, of_message = (
        ("column", COLUMNS, "")
        if messages is None
        else ("key", KEYS, f" of a message in column {messages!r}")
    )
    by_name = {name: reason_of[_plain(name)] for name in names}
    content = "; ".join(
        ", ".join(f"{kind} {name!r}" for name in names if by_name[name] == reason)
        + f"{of_message} {reason}"
        for reason in dict.fromkeys(by_name.values())
    )
    if hint is None:
        hint = f"To train on the rest of each row, add {flag('ignore_columns', names)}"
    return Refused(f"has content that would be dropped: {content}. {hint}".rstrip())


def flag(key: str, value: str | Sequence[str]) -> str:
    """A flag for a key of data:, to be pasted into a shell."""
    text = value if isinstance(value, str) else f"[{','.join(map(yaml_text, value))}]"
    typed = f"--data.{key}={text}"
    return typed if _SHELL_TEXT.fullmatch(typed) else shlex.quote(typed)


def yaml_text(name: str) -> str:
    """A name as it stands in a list or a map of YAML."""
    return name if _YAML_TEXT.fullmatch(name) else json.dumps(name)
