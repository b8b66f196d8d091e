"""The columns of the data that make a sample. Both files must have them, which is checked before
anything slow starts."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Literal

from launch.base.errors import ConfigError, DataError
from launch.base.text import nearest
from launch.data import column_advice, sniff, sources, untrained
from launch.data.column_advice import Origin
from launch.data.files import folders, shards, text_files
from launch.data.normalise import FIELDS, MESSAGE_ID, OPENAI, PARENT_ID, SHAREGPT, RowReader
from launch.data.rows import BadRows, samples_of
from launch.schema.data_section import DataSection, short_names
from launch.schema.plan import DataFormat

Kind = Literal["prompt_response", "messages", "text", "oasst"]

_KIND_OF_ROLE: dict[str, Kind] = {  # role of a column that a recipe can name -> its format
    **{"prompt": "prompt_response", "response": "prompt_response"},
    **{"messages": "messages", "text": "text"},
}

# rows of a larger text file are not counted: reading it takes longer than planning may
COUNTED_BYTES = 256 << 20
COUNTED_CSV_BYTES = 16 << 20  # its line ends may be quoted: 1 s of one CPU

# (name, kind, role -> column, optional column)
KNOWN: tuple[tuple[str, Kind, dict[str, str], str | None], ...] = (
    ("messages", "messages", {"messages": "messages"}, None),
    ("conversations", "messages", {"messages": "conversations"}, None),
    # belle is alpaca without an input
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
    ("prompt/completion", "prompt_response", {"prompt": "prompt", "response": "completion"}, None),
    ("input/output", "prompt_response", {"prompt": "input", "response": "output"}, None),
    ("text", "text", {"text": "text"}, None),
)
# the place that sniff names in its message on a column's content
LINE = re.compile(r" in (?:line|element) (\d+)$")


def detect(
    data: DataSection,
    base: Path,
    facts: shards.FileFacts | None = None,
    unread_keys: Collection[str] = (),
) -> DataFormat:
    """The columns of the training file that make a sample; its other shards and the validation file
    must read the same.

    Relative paths start at `base`; `unread_keys` are keys of messages that the chat template does
    not read. Raises DataError (a file cannot be used) and ConfigError (half a pair of columns).
    """
    # the rows that validation_size holds out are not known yet
    bad = BadRows(data.max_bad_rows, num_parts=1 if data.validation_size is None else 2)
    read = partial(_of_files, base, facts or shards.FileFacts(), unread_keys)
    data_format = _of_sources(data, bad, read) if data.is_mixed else read(data, bad, Origin())
    types = [own.file_type for own in (data_format, *data_format.of_sources)]
    if data.text_rows != "lines" and folders.TEXT_TYPES[data.text_rows] not in types:
        raise ConfigError(
            f"data.text_rows: {data.text_rows}, but {data.train_names} is read as"
            f" {', '.join(dict.fromkeys(types))}: it is for .txt files; leave it out"
        )
    return data_format


def _of_files(
    base: Path,
    facts: shards.FileFacts,
    unread_keys: Collection[str],
    data: DataSection,
    bad: BadRows,
    origin: Origin,
) -> DataFormat:
    """detect() of a single source, which `origin` names. `bad` counts the bad rows of all training
    files; those of the held-out file are counted apart."""
    explicit = _explicit(data, origin)
    paths = shards.list_shards(base / data.sources[0].path)
    held_out = (
        shards.list_shards(base / data.validation_file) if data.validation_file is not None else ()
    )
    files: list[sniff.FileColumns] = []
    formats: list[DataFormat] = []
    for number, path in enumerate((*paths, *held_out)):
        if number == len(paths):
            origin = replace(_of_held_out(formats[0]), train_file=data.sources[0].path)
            bad = bad.none_yet()
        try:
            files.append(_read(path, bad.none_yet(), facts, len(paths) > 1, data.messages_column))
            data_format = _format(files[-1], explicit, data.ignore_columns, origin)
            if data_format.file_type == "text":
                data_format = replace(
                    data_format,
                    file_type=folders.TEXT_TYPES[data.text_rows],
                    reason=f"text: {data.text_rows} of {origin.key} (data.text_rows)",
                )
            formats.append(data_format)
            _check_same(formats[0], data_format, paths[0], path, origin)
            _check_first_rows(path, data_format, bad, facts, is_corpus=len(paths) > 1)
        except DataError as error:
            error.args = (f"{error}{_without(path, paths)}",)
            raise
    facts.keep()
    notes = [
        f"not read of {path}: {_shortened(names)}"
        for path in (base / name for name in data.paths)
        if (names := folders.left_out(path, shards.list_shards(path)))
    ]
    return replace(
        formats[0],
        notes=(*notes, *_notes(files, formats[0], unread_keys)),
        num_files=len(paths),
    )


def _without(path: Path, paths: Sequence[Path]) -> str:
    """Advice to leave out a shard whose ending differs from that of most others."""
    other_endings = [other for other in paths if folders.ending(other) != folders.ending(path)]
    if path not in paths or 2 * len(other_endings) <= len(paths):
        return ""
    return f"; or give a pattern that leaves it out: {folders.pattern(other_endings)}"


def _of_sources(
    data: DataSection, bad: BadRows, read: Callable[[DataSection, BadRows, Origin], DataFormat]
) -> DataFormat:
    """The format of each source by itself, and of the held-out file."""
    sources.check_apart(data)
    formats: list[DataFormat] = []
    notes: list[str] = []
    names = short_names(source.path for source in data.sources)
    for source in data.sources:
        named = {"train_file": source.path, "validation_file": None}
        if source.columns is not None:
            named |= {f"{role}_column": name for role, name in source.columns.model_dump().items()}
        origin = Origin(is_source=True, names_columns=source.columns is not None)
        data_format = read(data.model_copy(update=named), bad, origin)
        name = names[source.path]
        notes += [f"{name}: {note}" for note in data_format.notes]
        reason = data_format.reason.replace("data.train_file", name)
        formats.append(replace(data_format, reason=reason, notes=()))
    held_out = formats[0]
    if data.validation_file is not None:
        named = {"train_file": data.validation_file, "validation_file": None}
        held_out = read(data.model_copy(update=named), bad.none_yet(), _of_held_out(formats[0]))
    return replace(held_out, notes=tuple(notes), of_sources=tuple(formats))


def _of_held_out(training: DataFormat) -> Origin:
    return Origin("data.validation_file", expected=", ".join(training.columns.values()))


def _read(
    path: Path, bad: BadRows, facts: shards.FileFacts, is_corpus: bool, messages_column: str | None
) -> sniff.FileColumns:
    """The columns of a file; those of a corpus are remembered."""
    names = (messages_column,) if messages_column else ("messages", "conversations")
    if not is_corpus or bad.limit or not path.exists():
        return sniff.read(path, bad, names)
    label = f"columns and messages in {messages_column}" if messages_column else "columns"
    return sniff.FileColumns(
        path, *facts.get(path, label, lambda: astuple(sniff.read(path, None, names))[1:])
    )


def _check_first_rows(
    path: Path, data_format: DataFormat, bad: BadRows, facts: shards.FileFacts, is_corpus: bool
) -> None:
    """Raises DataError for one of the first rows that training would not read."""

    if data_format.file_type == "text":
        return  # every line is a text
    facts = facts if is_corpus and not bad.limit else shards.FileFacts()
    beginning = sniff.beginning(path, data_format.file_type)
    rows = samples_of(beginning, data_format, bad, sniff.SAMPLE_ROWS)
    label = f"rows as {data_format.columns} without {data_format.ignored}"
    facts.get(path, label, lambda: list(deque(rows, maxlen=0)))


def row_count(path: Path, facts: shards.FileFacts | None = None) -> int | None:
    """Rows of what detect() accepts: exact, or None where counting would mean reading too much."""
    files, facts = shards.list_shards(path), facts or shards.FileFacts()
    if len(files) == 1:
        return _row_count(files[0])
    if sniff.file_type_of(files[0]) not in ("parquet", "arrow") and (
        sum(file.stat().st_size for file in files) > COUNTED_BYTES
    ):
        return None
    counts = [facts.get(file, "rows", partial(_row_count, file)) for file in files]
    facts.keep()
    return None if None in counts else sum(counts)


def _row_count(path: Path) -> int | None:
    file_type = sniff.file_type_of(path)
    if file_type in ("parquet", "arrow"):
        return sniff.table(path, file_type)[0]
    is_packed = file_type == "webdataset" or path.suffix.lower() in folders.COMPRESSIONS
    is_csv = file_type in text_files.DELIMITERS
    if is_packed or path.stat().st_size > (COUNTED_CSV_BYTES if is_csv else COUNTED_BYTES):
        return None
    if is_csv:
        return sum(
            1
            for _ in text_files.read_delimited(
                path, file_type, lambda _, raw: raw.decode("latin-1")
            )
        )
    if file_type == "json":
        return sum(1 for _ in text_files.json_elements(path))
    with path.open("rb") as stream:
        return sum(bool(line.removeprefix(b"\xef\xbb\xbf").strip()) for line in stream)


# ---- formats
# ---------------------------------------------------------------------------


def _explicit(data: DataSection, origin: Origin) -> tuple[Kind, dict[str, str]] | None:
    """The columns the recipe names, if it names any."""
    named = {role: getattr(data, f"{role}_column") for role in _KIND_OF_ROLE}
    columns = {role: column for role, column in named.items() if column is not None}
    for role, missing in (("prompt", "response"), ("response", "prompt")):
        if role in columns and missing not in columns:
            raise ConfigError(
                f"data.{role}_column is given but data.{missing}_column is not; add"
                f" --data.{missing}_column=<column>"
            )
    kinds: set[Kind] = {_KIND_OF_ROLE[role] for role in columns}
    if len(kinds) > 1:
        names = " and ".join(f"data.{role}_column" for role in columns)
        raise ConfigError(
            f"{names} are given together, but a sample has one format; keep those of one format"
        )
    if "prompt" in columns and columns["prompt"] == columns["response"]:
        raise ConfigError(
            f"{origin.key_of('prompt')} and {origin.key_of('response')} are both"
            f" {data.prompt_column!r}; name two columns"
        )
    for role, column in columns.items():
        if column in data.ignore_columns:
            raise ConfigError(
                f"{origin.key_of(role)} and data.ignore_columns both name {column!r}; read it or"
                " ignore it"
            )
    return (kinds.pop(), columns) if columns else None


def _format(
    file: sniff.FileColumns,
    explicit: tuple[Kind, dict[str, str]] | None,
    ignored: Sequence[str],
    origin: Origin,
) -> DataFormat:
    file = replace(
        file, columns={name: kind for name, kind in file.columns.items() if name not in ignored}
    )
    kind, columns, reason = _chosen(file, explicit, origin)
    conversational = {"prompt", "response"} <= columns.keys() and all(
        file.columns[columns[role]] == "messages" for role in ("prompt", "response")
    )
    for role, column in columns.items():
        is_messages = role == "messages" or (conversational and role != "context")
        holds = file.columns[column]
        if (
            holds != ("messages" if is_messages else "string")
            and not (role == "messages" and holds == "string")  # the JSON text of a list
            and not (role == "context" and holds.startswith(("null", "nothing")))
        ):
            requirement = "a list of {role, content} or of {from, value}" if is_messages else "text"
            number = LINE.search(holds)
            place = f"{file.path}:{number[1]}" if number else file.path
            holds = LINE.sub("", holds)
            raise DataError(
                f"{place}: column {column!r} holds {holds}; the {role} must be {requirement}: write"
                " it so, or name another column"
            )
    data_format = DataFormat(kind, columns, file.file_type, reason, tuple(ignored))
    if others := [name for name in file.columns if RowReader(data_format).reads(name)]:
        data_format = replace(data_format, reason=f"{reason}, with {', '.join(others)}")
    return data_format


def _notes(
    files: Sequence[sniff.FileColumns], data_format: DataFormat, unread_keys: Collection[str]
) -> Iterator[str]:
    """Lines of the plan on what is not read."""
    reader, ignored, trained_columns = (
        RowReader(data_format),
        data_format.ignored,
        data_format.columns.values(),
    )
    message_keys = dict.fromkeys(
        pair for file in files for pair in file.message_keys if pair[0] in trained_columns
    )
    there = [*dict.fromkeys(name for file in files for name in file.columns)]
    unread = [
        name
        for name in there
        if name not in (*trained_columns, *ignored)
        and not reader.reads(name)
        and (name in reader.passed or not untrained.is_column(name))
    ]
    unread += [
        f"{column}.{key}"
        for column, key in message_keys
        if key not in (*OPENAI, *SHAREGPT, *ignored)
        and (key.lower() not in FIELDS or FIELDS[key.lower()] in unread_keys)
        and not untrained.is_key(key)
    ]
    if data_format.kind == "oasst":
        yield (
            "each thread of a tree is a conversation, each answer is trained once"
            if {MESSAGE_ID, PARENT_ID} <= {*there}
            else "a user's row is trained with the answer in the next row; other rows are not read"
        )
    if unread:
        names = [name or "''" for name in unread]
        yield f"columns that are not read: {_shortened(names)}"
    if ignored:
        present = {*there, *(key for _, key in message_keys)}
        absent = [name for name in ignored if name not in present]
        hint = f" (not in the first rows: {', '.join(absent)})" if absent else ""
        yield f"left out by data.ignore_columns: {', '.join(ignored)}{hint}"


def _chosen(
    file: sniff.FileColumns,
    explicit: tuple[Kind, dict[str, str]] | None,
    origin: Origin,
) -> tuple[Kind, dict[str, str], str]:
    """(kind, role -> column, reason)."""
    if explicit is not None:
        kind, columns = explicit
        problems: list[str] = []
        for role, column in columns.items():
            if column not in file.columns:
                hint = (
                    f"; {column_advice.likely(file, origin)}"
                    if origin.is_source and not origin.names_columns
                    else "".join(f"; nearest: {near}" for near in nearest(column, file.columns))
                )
                problems.append(
                    f"{file.path}: has no column {column!r} ({origin.key_of(role)}); found columns"
                    f" {_shortened([*file.columns])}{hint}"
                )
        if problems:
            raise DataError("\n".join(problems))
        return kind, dict(columns), f"the recipe names {', '.join(columns.values())}"
    exact = {name: name for name in file.columns}
    for by_name in (exact, {name.lower(): name for name in file.columns} | exact):
        for name, kind, roles, optional in KNOWN:
            if all(column in by_name for column in roles.values()):
                columns = {role: by_name[column] for role, column in roles.items()}
                if optional in by_name:
                    columns = {"prompt": "", "context": by_name[optional]} | columns
                elif optional is not None:
                    name = "belle"
                listed = ", ".join(columns.values())
                return kind, columns, f"{name}: {origin.key} has the columns {listed}"
    if pair := _pair(file, origin):
        listed = ", ".join(pair.values())
        return (
            "prompt_response",
            pair,
            f"prompt and response: {origin.key} has the columns {listed}",
        )
    texts = [name for name, holds in file.columns.items() if holds in ("string", "messages")]
    others = [name for name in file.columns if untrained.is_other_training(name)]
    if others and (any(name not in others for name in texts) or untrained.is_pair(others)):
        hint = column_advice.preferred(file, others, origin)
        raise DataError(f"{file.path}: {untrained.refusal(others, hint=hint)}")
    formats = ", ".join("/".join(roles.values()) for _, _, roles, _ in KNOWN)
    raise DataError(
        f"{file.path}: its columns are of no known format; found columns"
        f" {_shortened([*file.columns])}; {column_advice.likely(file, origin)}. Known: {formats},"
        f" or one of {', '.join(column_advice.PROMPT_NAMES)} beside one of"
        f" {', '.join(column_advice.ANSWER_NAMES)}"
    )


def _pair(file: sniff.FileColumns, origin: Origin) -> dict[str, str]:
    """The columns of a question and its answer, by the names that they have in most data sets; none
    if either is missing. Raises DataError where several columns may be either."""
    names_of_roles = {
        "prompt": column_advice.PROMPT_NAMES,
        "context": ("context",),
        "response": column_advice.ANSWER_NAMES,
    }
    by_role = {
        role: [column for column in file.columns if column.lower() in names]
        for role, names in names_of_roles.items()
    }
    if not (by_role["prompt"] and by_role["response"]):
        return {}
    for role, named in by_role.items():
        if len(named) > 1:
            raise DataError(
                f"{file.path}: each of the columns {', '.join(named)} may be the {role};"
                f" {column_advice.likely(file, origin)}"
            )
    return {role: named[0] for role, named in by_role.items() if named}


def _check_same(
    training: DataFormat, other: DataFormat, train_path: Path, path: Path, origin: Origin
) -> None:
    """One format reads all files, so they must agree; only a context may be absent from JSON
    rows."""
    flag = untrained.flag("train_file", [origin.train_file])
    apart = f", or read each in its own format, with {flag}" if origin.train_file else ""
    named = f"{path} ({origin.key})" if origin.expected else str(path)
    if training.file_type != other.file_type:
        raise DataError(
            f"{named}: is read as {other.file_type}, {train_path} as {training.file_type}; write"
            f" both in one file type{apart}"
        )
    expected = dict(training.columns)
    if training.file_type not in ("parquet", "arrow") and "context" not in other.columns:
        expected.pop("context", None)
    if training.kind != other.kind or expected != other.columns:
        raise DataError(
            f"{named}: reads as {_summary(other)}, but {train_path} as {_summary(training)}; give"
            f" both files the same columns{apart}"
        )


def _summary(data_format: DataFormat) -> str:
    return f"{data_format.kind} with columns {', '.join(data_format.columns.values())}"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
