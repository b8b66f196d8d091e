"""Which columns of the data make a sample, and whether both files read the same way, before
anything slow starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launch.base.errors import ConfigError, DataError
from launch.base.text import nearest
from launch.data import shards, sniff, untrained
from launch.data.shards import FileFacts
from launch.data.sniff import Found
from launch.schema.plan import DataFormat
from launch.schema.recipe import DataSection

Kind = Literal["prompt_response", "messages", "text", "oasst"]

# rows of a larger text file are not counted: reading it takes longer than planning may
COUNTED_BYTES = 256 << 20

# (name, kind, role -> column, optional column)
KNOWN: tuple[tuple[str, Kind, dict[str, str], str | None], ...] = (
    ("messages", "messages", {"messages": "messages"}, None),
    ("conversations", "messages", {"messages": "conversations"}, None),
    # without input: belle
    ("alpaca", "prompt_response", {"prompt": "instruction", "response": "output"}, "input"),
    ("firefly", "prompt_response", {"prompt": "input", "response": "target"}, None),
    (
        "dolly",
        "prompt_response",
        {"prompt": "instruction", "context": "context", "response": "response"},
        None,
    ),
    ("oasst", "oasst", {"text": "text", "role": "role"}, None),
    ("prompt/response", "prompt_response", {"prompt": "prompt", "response": "response"}, None),
    ("input/output", "prompt_response", {"prompt": "input", "response": "output"}, None),
    ("text", "text", {"text": "text"}, None),
)
# for hints only
ANSWER_NAMES = ("answer", "response", "output", "completion", "target", "reply", "chosen", "label")


def detect(data: DataSection, base: Path, known: FileFacts | None = None) -> DataFormat:
    """Which columns of the training file make a sample; its other shards and the validation file
    must read the same.

    Relative paths start at `base`. Raises DataError (a file cannot be used) and ConfigError (half a
    pair of columns).
    """
    explicit, known = _explicit(data), known or FileFacts()
    first, *others = shards.of(base / data.train_file)
    is_corpus = bool(others)
    files = [_read(first, data.max_bad_rows, known, is_corpus)]
    training = _format(files[0], explicit, data.ignore_columns, "data.train_file")
    for shard in others:
        files.append(_read(shard, data.max_bad_rows, known, is_corpus))
        _same(
            training,
            _format(files[-1], explicit, data.ignore_columns, "data.train_file"),
            first,
            shard,
        )
    for shard in shards.of(base / data.validation_file) if data.validation_file is not None else ():
        files.append(_read(shard, data.max_bad_rows, known, is_corpus))
        _same(
            training,
            _format(files[-1], explicit, data.ignore_columns, "data.validation_file"),
            first,
            shard,
        )
    known.keep()
    return replace(training, notes=tuple(_notes(files, training)))


def _read(path: Path, max_bad_rows: int, known: FileFacts, is_corpus: bool) -> Found:
    """What a file holds; of a corpus it is remembered."""
    if not is_corpus or max_bad_rows or not path.exists():
        return sniff.read(path, max_bad_rows)

    def read() -> list[Any]:
        found = sniff.read(path)
        return [
            found.file_type,
            dict(found.columns),
            list(found.untrained),
            list(found.message_keys),
        ]

    return Found(path, *known.get(path, "content", read))


def row_count(path: Path, known: FileFacts | None = None) -> int | None:
    """Rows of what detect() accepts: exact, or None where counting would mean reading too much."""
    files, known = shards.of(path), known or FileFacts()
    if len(files) == 1:
        return _row_count(files[0])
    if sniff.file_type_of(files[0]) not in ("parquet", "arrow") and (
        sum(file.stat().st_size for file in files) > COUNTED_BYTES
    ):
        return None
    counts = [known.get(file, "rows", lambda file=file: _row_count(file)) for file in files]
    known.keep()
    return None if None in counts else sum(counts)


def _row_count(path: Path) -> int | None:
    file_type = sniff.file_type_of(path)
    if file_type in ("parquet", "arrow"):
        return sniff.table(path, file_type)[0]
    is_packed = file_type == "webdataset" or path.suffix.lower() in shards.COMPRESSIONS
    if is_packed or path.stat().st_size > COUNTED_BYTES:
        return None
    if file_type == "json":
        try:
            return len(json.loads(path.read_text(encoding="utf-8-sig")))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: is not a JSON array ({error}); mend the file") from error
    with path.open("rb") as stream:
        return sum(bool(line.removeprefix(b"\xef\xbb\xbf").strip()) for line in stream)


# ---- formats
# ---------------------------------------------------------------------------


def _explicit(data: DataSection) -> tuple[Kind, dict[str, str]] | None:
    """The columns the recipe names, if it names any."""
    if (data.prompt_column is None) != (data.response_column is None):
        given, missing = "prompt_column", "response_column"
        if data.prompt_column is None:
            given, missing = missing, given
        raise ConfigError(
            f"data.{given} is given but data.{missing} is not; add --data.{missing}=<column>"
        )
    choices: list[tuple[Kind, dict[str, str]]] = []
    if data.prompt_column is not None and data.response_column is not None:
        choices.append(
            ("prompt_response", {"prompt": data.prompt_column, "response": data.response_column})
        )
    if data.messages_column is not None:
        choices.append(("messages", {"messages": data.messages_column}))
    if data.text_column is not None:
        choices.append(("text", {"text": data.text_column}))
    if len(choices) > 1:
        keys = " and ".join(f"data.{role}_column" for _, columns in choices for role in columns)
        raise ConfigError(
            f"{keys} are given together, but a sample has one format; keep those of one"
        )
    if data.prompt_column is not None and data.prompt_column == data.response_column:
        raise ConfigError(
            f"data.prompt_column and data.response_column are both {data.prompt_column!r}; name two"
            " columns"
        )
    for role, column in choices[0][1].items() if choices else ():
        if column in data.ignore_columns:
            raise ConfigError(
                f"data.{role}_column and data.ignore_columns both name {column!r}; read it or"
                " ignore it"
            )
    return choices[0] if choices else None


def _format(
    found: Found, explicit: tuple[Kind, dict[str, str]] | None, ignored: Sequence[str], key: str
) -> DataFormat:
    found = replace(
        found, columns={name: holds for name, holds in found.columns.items() if name not in ignored}
    )
    kind, columns, reason = _chosen(found, explicit, ignored, key)
    _refuse_untrained(found, columns, ignored)
    for role, column in columns.items():
        expected = "messages" if role == "messages" else "string"
        holds = found.columns[column]
        if holds != expected and not (role == "context" and holds.startswith(("null", "nothing"))):
            wanted = (
                "text"
                if expected == "string"
                else "a list of {role, content} or of {from, value}, all text"
            )
            raise DataError(
                f"{found.path}: column {column!r} holds {holds}; the {role} must be {wanted}"
            )
    return DataFormat(kind, columns, found.file_type, reason, tuple(ignored))


def _refuse_untrained(found: Found, columns: dict[str, str], ignored: Sequence[str]) -> None:
    """Raises DataError for content of the first rows that would be dropped."""
    messages, used = columns.get("messages"), set(columns.values())
    names = {
        (column, key): number
        for column, key, number in found.untrained
        if (column == messages if key else column not in used) and (key or column) not in ignored
    }
    if names:
        raise untrained.refusal(f"{found.path}:{next(iter(names.values()))}", list(names))


def _notes(files: Sequence[Found], data_format: DataFormat) -> Iterator[str]:
    """Lines of the plan on what is not read."""
    used, ignored = set(data_format.columns.values()), data_format.ignored
    messages = data_format.columns.get("messages")
    keys = dict.fromkeys(
        key for found in files for column, key in found.message_keys if column == messages
    )
    there = [*dict.fromkeys(name for found in files for name in found.columns)]
    others = [
        name
        for name in there
        if name not in used and name not in ignored and not untrained.is_column(name)
    ]
    others += [
        f"{messages}.{key}"
        for key in keys
        if key not in ignored and key.lower() not in untrained.KEYS
    ]
    if others:
        yield f"columns that are not read: {_shortened(others)}"
    if ignored:
        absent = [name for name in ignored if name not in there and name not in keys]
        words = f" (not in the first rows: {', '.join(absent)})" if absent else ""
        yield f"left out by data.ignore_columns: {', '.join(ignored)}{words}"


def _chosen(
    found: Found, explicit: tuple[Kind, dict[str, str]] | None, ignored: Sequence[str], key: str
) -> tuple[Kind, dict[str, str], str]:
    """(kind, role -> column, reason)."""
    if explicit is not None:
        kind, columns = explicit
        for role, column in columns.items():
            if column not in found.columns:
                hint = "".join(f"; nearest: {near}" for near in nearest(column, found.columns))
                raise DataError(
                    f"{found.path}: has no column {column!r} (data.{role}_column); found columns"
                    f" {_listed(found)}{hint}"
                )
        return kind, dict(columns), f"the recipe names {', '.join(columns.values())}"
    for name, kind, known, optional in KNOWN:
        if all(column in found.columns for column in known.values()):
            columns = dict(known)
            if optional in found.columns:
                columns = {
                    "prompt": known["prompt"],
                    "context": optional,
                    "response": known["response"],
                }
            elif optional is not None:
                name = "belle"
            return kind, columns, f"{name}: {key} has the columns {', '.join(columns.values())}"
    texts = [name for name, holds in found.columns.items() if holds in ("string", "messages")]
    if any(not untrained.is_column(name) for name in texts):
        _refuse_untrained(found, {}, ignored)
    raise DataError(
        f"{found.path}: its columns are of no known format; found columns {_listed(found)};"
        f" {_flags(found)}. Known: {', '.join('/'.join(row[2].values()) for row in KNOWN)}"
    )


def _flags(found: Found) -> str:
    """The flags that name the likeliest columns of a file in no known format."""
    texts = [name for name, holds in found.columns.items() if holds == "string"]
    lists = [name for name, holds in found.columns.items() if holds == "messages"]
    if len(lists) > 1:
        return "of several columns with messages one is read: write the turns of each row into one"
    if lists:
        return f"add --data.messages_column={lists[0]}"
    if len(texts) == 1:
        return f"add --data.text_column={texts[0]}"
    if len(texts) > 1:
        response = next((name for name in texts if name.lower() in ANSWER_NAMES), texts[1])
        prompt = next(name for name in texts if name != response)
        return f"add --data.prompt_column={prompt} --data.response_column={response}"
    return "none of them holds text"


def _same(training: DataFormat, validation: DataFormat, train_path: Path, path: Path) -> None:
    """One format reads both files, so they must agree; only a context may be absent from JSON
    rows."""
    if training.file_type != validation.file_type:
        raise DataError(
            f"{path}: is read as {validation.file_type}, {train_path} as {training.file_type}; "
            "write both in one file type"
        )
    wanted = dict(training.columns)
    if training.file_type not in ("parquet", "arrow") and "context" not in validation.columns:
        wanted.pop("context", None)
    if training.kind != validation.kind or wanted != validation.columns:
        raise DataError(
            f"{path}: reads as {_words(validation)}, but {train_path} as {_words(training)}; "
            "give both files the same columns"
        )


def _words(data_format: DataFormat) -> str:
    return f"{data_format.kind} with columns {', '.join(data_format.columns.values())}"


def _listed(found: Found) -> str:
    return _shortened(list(found.columns))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
