"""Columns and keys of messages that carry content which is not trained: refused by name, or left
out on purpose.

Both sides read it: the launcher for the first rows, the tokeniser for every row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from launch.base.errors import DataError

MESSAGE_KEYS = frozenset({"role", "content", "from", "value"})
PREFERENCES = "is for another kind of training (preference pairs, as DPO and ORPO use them)"
LABELS = "is for another kind of training (KTO, classification)"
NOT_YET = "is not trained yet"
TOOL_ROLES = frozenset(
    {"function_call", "tool_call", "observation", "function", "tool", "tool_response"}
)
FILES = (  # endings of a WebDataset's members
    *("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("wav", "flac", "mp3", "ogg", "opus", "m4a"),
    *("mp4", "mkv", "avi", "mov", "webm"),
)
COLUMNS: Mapping[str, str] = {  # name in lower case -> what becomes of its content
    **dict.fromkeys(("chosen", "rejected", "rejected_response"), PREFERENCES),
    **dict.fromkeys(("label", "kto_tag", "cls"), LABELS),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos", *FILES), NOT_YET),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), NOT_YET),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "weight"), NOT_YET),
    **dict.fromkeys(("system", "system_prompt", "system_message", "history"), NOT_YET),
}
KEYS: Mapping[str, str] = {  # of a message
    **COLUMNS,
    **dict.fromkeys(("name", "tool_call_id", "train", "training", "mask", "loss_mask"), NOT_YET),
}
WEIGHTS = ("weight", "train", "training")  # 1 or true on an answer is what training does
EMPTY_JSON = ("", "[]", "{}")
MAX_DEPTH = 16  # of lists in lists; what is deeper counts as content

Name = tuple[str, str | None]  # a column, and a key of its messages


def is_column(name: str) -> bool:
    """True for a column that is known to carry content."""
    return _plain(name) in COLUMNS


def _plain(name: str) -> str:
    ending = name.lower().rpartition(".")[2]
    return ending if ending in FILES else name.lower()  # left.jpg of a WebDataset


def columns(row: Mapping[str, Any], passed: Collection[str] = ()) -> Iterator[str]:
    """Columns of a row whose content would be dropped, but for those `passed`, which are read or
    ignored."""
    for column, value in row.items():
        if is_column(column) and column not in passed and not is_empty(value):
            yield column


def message_keys(turns: Any, ignored: Collection[str] = ()) -> Iterator[str]:
    """Keys of a row's messages whose content would be dropped."""
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict) or turn.keys() <= MESSAGE_KEYS:
            continue
        for key, value in turn.items():
            if key.lower() not in KEYS or key in ignored or is_empty(value):
                continue
            if not (key.lower() in WEIGHTS and value == 1 and _is_answer(turn)):
                yield key


def _is_answer(turn: Mapping[str, Any]) -> bool:
    return (turn.get("role") or turn.get("from")) in ("assistant", "gpt", "bot", "model")


def is_empty(value: Any, levels: int = MAX_DEPTH) -> bool:
    """True for a value without content: null, NaN, "", [], {}, or nothing but such values. False
    and 0 are content."""
    if isinstance(value, str):
        return value.strip() in EMPTY_JSON
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return levels > 0 and all(is_empty(item, levels - 1) for item in items)
    return value is None or value != value or value == b""


def refusal(place: str, names: Sequence[Name]) -> DataError:
    """The error for content of these names in the row at `place`."""
    places_by_reason: dict[str, list[str]] = {}
    for column, key in names:
        of_message = "" if key is None else f"key {key!r} of a message in "
        places = places_by_reason.setdefault(KEYS[_plain(key or column)], [])
        places.append(f"{of_message}column {column!r}")
    dropped = "; ".join(
        f"{', '.join(places)} {reason}" for reason, places in places_by_reason.items()
    )
    flags = ",".join(dict.fromkeys(key or column for column, key in names))
    return DataError(
        f"{place}: has content that would be dropped: {dropped}. To train on the rest of each row,"
        f" add --data.ignore_columns=[{flags}]"
    )
