"""Every data format is found by its columns; every file that cannot be used is named before
anything slow starts."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import ConfigError, DataError
from launch.data import columns as data_columns
from launch.data.conversation import Conversation
from launch.data.files import shards
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows, read_samples
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat
from tests import cost

pytestmark = pytest.mark.unit

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
WRITERS = ["parquet", "jsonl", "ndjson", "json", "lines.json"]


def table(rows: list[dict]) -> pa.Table:
    """With the columns of all rows, not of the first alone."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({column: [row.get(column) for row in rows] for column in columns})


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(table(rows), path)
    elif name.endswith(".json") and not name.endswith("lines.json"):
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    else:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
    return path


def detect(path: Path, validation: Path | None = None, **columns: Any) -> DataFormat:
    section = DataSection(
        train_file=str(path), validation_file=str(validation) if validation else None, **columns
    )
    return data_columns.detect(section, path.parent)


# ---- formats
# ---------------------------------------------------------------------------

FORMATS = [
    ("messages", {"messages": TURNS}, "messages", {"messages": "messages"}),
    ("conversations", {"conversations": SHAREGPT}, "messages", {"messages": "conversations"}),
    ("conversations", {"conversations": TURNS}, "messages", {"messages": "conversations"}),
    (
        "alpaca",
        {"instruction": "Add", "input": "1 1", "output": "2"},
        "prompt_response",
        {"prompt": "instruction", "context": "input", "response": "output"},
    ),
    (
        "belle",
        {"instruction": "加", "output": "二"},
        "prompt_response",
        {"prompt": "instruction", "response": "output"},
    ),
    (
        "firefly",
        {"kind": "sum", "input": "a", "target": "b"},
        "prompt_response",
        {"prompt": "input", "response": "target"},
    ),
    (
        "dolly",
        {"instruction": "a", "context": "", "response": "b", "category": "c"},
        "prompt_response",
        {"prompt": "instruction", "context": "context", "response": "response"},
    ),
    (
        "oasst",
        {"text": "a", "role": "prompter", "rank": 1},
        "oasst",
        {"text": "text", "role": "role"},
    ),
    (
        "prompt/response",
        {"prompt": "a", "response": "b"},
        "prompt_response",
        {"prompt": "prompt", "response": "response"},
    ),
    (
        "input/output",
        {"input": "a", "output": "b"},
        "prompt_response",
        {"prompt": "input", "response": "output"},
    ),
    ("text", {"text": "a", "url": "b", "score": 0.5}, "text", {"text": "text"}),
]


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize(("name", "row", "kind", "columns"), FORMATS)
def test_a_format_is_found_by_its_columns_in_every_file_type(
    tmp_path, ending, name, row, kind, columns
):
    path = write(tmp_path, f"data.{ending}", [row, row])
    found = detect(path)
    file_type = {"parquet": "parquet", "json": "json"}.get(ending, "jsonl")
    assert (found.kind, found.columns, found.file_type) == (kind, columns, file_type)
    assert found.reason.startswith(f"{name}: data.train_file has the columns ")
    assert data_columns.row_count(path) == 2


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": TURNS, "prompt": "a", "response": "b"}, ["messages"]),
        ({"conversations": TURNS, "text": "a"}, ["conversations"]),
        (
            {"instruction": "a", "input": "b", "output": "c", "text": "abc"},
            ["instruction", "input", "output"],
        ),
        ({"input": "a", "output": "b", "target": "c"}, ["input", "target"]),
        (
            {"instruction": "a", "output": "b", "context": "c", "response": "d"},
            ["instruction", "output"],
        ),
        ({"prompt": "a", "response": "b", "text": "ab"}, ["prompt", "response"]),
    ],
    ids=str,
)
def test_where_two_formats_fit_the_first_of_the_list_is_taken(tmp_path, row, columns):
    assert list(detect(write(tmp_path, "a.jsonl", [row])).columns.values()) == columns


def test_a_text_file_is_one_text_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n第一行\n\nsecond\n", encoding="utf-8")
    found = detect(path)
    assert (found.kind, found.columns, found.file_type) == ("text", {"text": "text"}, "text")
    assert data_columns.row_count(path) == 2


@pytest.mark.parametrize(
    ("given", "kind", "columns"),
    [
        (
            {"prompt_column": "question", "response_column": "answer"},
            "prompt_response",
            {"prompt": "question", "response": "answer"},
        ),
        (
            {"prompt_column": "text", "response_column": "prompt"},
            "prompt_response",
            {"prompt": "text", "response": "prompt"},
        ),
        ({"text_column": "answer"}, "text", {"text": "answer"}),
        ({"messages_column": "turns"}, "messages", {"messages": "turns"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("ending", WRITERS)
def test_columns_that_the_recipe_names_come_before_those_found(
    tmp_path, ending, given, kind, columns
):
    row = {
        "question": "a",
        "answer": "b",
        "turns": SHAREGPT,
        "text": "c",
        "prompt": "d",
        "response": "e",
    }
    found = detect(write(tmp_path, f"data.{ending}", [row]), **given)
    assert (found.kind, found.columns) == (kind, columns)
    assert found.reason == f"the recipe names {', '.join(columns.values())}"


@pytest.mark.parametrize(
    "column_type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_parquet_text_is_text(tmp_path, column_type):
    pq.write_table(
        pa.table({"text": pa.array(["a", "b"]).cast(column_type)}), tmp_path / "a.parquet"
    )
    assert detect(tmp_path / "a.parquet").kind == "text"


@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_a_byte_order_mark_is_accepted(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    content = {"jsonl": '{"text": "你"}\n', "json": ' [{"text": "你"}]', "txt": "你\n"}[ending]
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert detect(path).kind == "text"
    assert data_columns.row_count(path) == 1


def test_blank_lines_and_windows_line_ends_are_no_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\r\n{"text": "a"}\r\n\r\n{"text": "b"}')
    assert detect(path).kind == "text"
    assert data_columns.row_count(path) == 2


def test_a_context_may_be_absent_or_null_in_some_rows(tmp_path):
    row = {"instruction": "a", "output": "b"}
    path = write(tmp_path, "a.jsonl", [row, row | {"input": "c"}, row | {"input": None}])
    assert detect(path).columns["context"] == "input"


def test_a_row_longer_than_a_read_is_read_whole(tmp_path):
    long = "字" * 3_000_000
    for name in ("a.json", "a.jsonl"):
        assert detect(
            write(
                tmp_path,
                name,
                [{"prompt": long, "response": "b"}, {"prompt": "c", "response": "d"}],
            )
        ).kind


def test_only_the_first_rows_of_a_large_file_are_read(tmp_path):
    rows = [{"prompt": f"{i}", "response": "b" * 500} for i in range(60_000)]
    for name in ("a.json", "a.jsonl", "a.parquet"):
        path = write(tmp_path, name, rows)
        if name == "a.parquet":
            pq.write_table(table(rows), path, compression="none", use_dictionary=False)
        assert cost.count_read_bytes(partial(detect, path)) < path.stat().st_size / 2
        assert cost.count_calls(partial(detect, path)) < 20_000


def test_the_rows_of_a_huge_text_file_are_not_counted(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as stream:
        stream.write(b"first\n")
        stream.truncate(data_columns.COUNTED_BYTES + 1)  # sparse
    assert detect(path).kind == "text"
    assert data_columns.row_count(path) is None


def test_both_files_may_differ_in_a_context_that_json_rows_leave_out(tmp_path):
    training = write(tmp_path, "a.jsonl", [{"instruction": "a", "input": "b", "output": "c"}])
    validation = write(tmp_path, "b.jsonl", [{"instruction": "a", "output": "c"}])
    assert detect(training, validation).columns["context"] == "input"


def test_a_path_with_spaces_and_quotes_is_read(tmp_path):
    assert detect(write(tmp_path, "a 'b\" %s\n.jsonl", [{"text": "a"}])).kind == "text"


def test_an_absolute_path_needs_no_base(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"text": "a"}])
    assert data_columns.detect(DataSection(train_file=str(path)), Path("/nowhere")).kind == "text"


# ---- columns that cannot be used
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            (
                r"found columns question, answer; add --data\.prompt_column=question"
                r" --data\.response_column=answer"
            ),
        ),
        (
            {"answer": "a", "query": "b"},
            r"add --data\.prompt_column=query --data\.response_column=answer",
        ),
        (
            {"Prompt": "a", "Response": "b"},
            r"add --data\.prompt_column=Prompt --data\.response_column=Response",
        ),
        ({"content": "a", "id": 1}, r"found columns content, id; add --data\.text_column=content"),
        ({"dialog": TURNS, "id": "a"}, r"add --data\.messages_column=dialog"),
        ({"id": 1, "label": 2}, r"found columns id, label; none of them holds text"),
        ({"prompt": "a"}, r"found columns prompt; "),
        (
            {"instruction": "a", "response": "b"},
            r"found columns instruction, response; add --data\.prompt_column",
        ),
        (
            {"prompt": "a", "response": 3},
            r"column 'response' holds (int64|a number); the response must be text",
        ),
        (
            {"prompt": 1.5, "response": "b"},
            r"column 'prompt' holds (double|a number); the prompt must be text",
        ),
        ({"text": True}, r"column 'text' holds (bool|true or false;)"),
        ({"text": None}, r"column 'text' holds null"),
        ({"text": ["a", "b"]}, r"column 'text' holds (list<|a list;)"),
        ({"text": {"a": "b"}}, r"column 'text' holds (struct<|an object;)"),
        (
            {"instruction": "a", "input": 3, "output": "b"},
            r"column 'input' holds .*; the context must be text",
        ),
        ({"text": "a", "role": 1}, r"column 'role' holds .*; the role must be text"),
        (
            {"messages": "[]"},
            r"column 'messages' holds string; the messages must be a list of \{role, content\}",
        ),
        ({"messages": ["a"]}, r"column 'messages' holds (list<|a list;)"),
        (
            {"messages": [{"speaker": "a", "words": "b"}]},
            r"column 'messages' holds (list<|a list whose message 1 has the keys speaker, words;)",
        ),
        (
            {"messages": [{"role": "a", "content": 3}]},
            r"column 'messages' holds (list<|a list whose message 1 has a number as content;)",
        ),
        (
            {"messages": [{"from": "a", "content": "b"}]},
            r"column 'messages' holds (list<|a list whose message 1 has the keys from, content;)",
        ),
        ({"conversations": 7}, r"column 'conversations' holds (int64|a number)"),
    ],
    ids=str,
)
def test_columns_that_make_no_sample_are_named_with_what_was_found(tmp_path, ending, row, message):
    path = write(tmp_path, f"data.{ending}", [row])
    with pytest.raises(DataError, match=rf"data\.{ending}:(1:)? .*{message}"):
        detect(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "a", "response": "b"}, {"prompt": "a"}],
            r":2: column 'response' holds nothing;",
        ),
        (
            [{"prompt": "a"}, {"prompt": "a", "response": "b"}],
            r":1: column 'response' holds nothing;",
        ),
        (
            [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": None}],
            r":2: column 'response' holds null;",
        ),
        ([{"text": "a"}, {"text": "b"}, {"text": 3}], r"jsonl:3: column 'text' holds a number;"),
        ([{"text": None}, {"text": "b"}, {"text": 3}], r"jsonl:3: column 'text' holds a number;"),
        ([{"messages": TURNS}, {"messages": []}], r":2: column 'messages' holds an empty list;"),
        (
            [{"messages": TURNS}, {"messages": "a"}],
            r":2: column 'messages' holds messages in line 1 and string;",
        ),
        ([{}, {}], r"found columns ; none of them holds text"),
    ],
    ids=str,
)
def test_a_row_out_of_line_is_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        detect(write(tmp_path, "a.jsonl", rows))


def test_a_parquet_column_of_bytes_is_refused(tmp_path):
    pq.write_table(pa.table({"text": pa.array([b"a"])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'text' holds binary"):
        detect(tmp_path / "a.parquet")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'text' holds two columns of this name"):
        detect(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"prompt_column": "prompt"},
            ConfigError,
            r"prompt_column is given but data\.response_column is not; add --data",
        ),
        (
            {"response_column": "response"},
            ConfigError,
            r"response_column is given but data\.prompt_column is not",
        ),
        (
            {"prompt_column": "prompt", "response_column": "response", "text_column": "prompt"},
            ConfigError,
            (
                r"data\.prompt_column and data\.response_column and data\.text_column are given"
                r" together"
            ),
        ),
        ({"text_column": "a", "messages_column": "b"}, ConfigError, r"given together"),
        (
            {"prompt_column": "a", "response_column": "a"},
            ConfigError,
            r"are both 'a'; name two columns",
        ),
        (
            {"prompt_column": "promt", "response_column": "response"},
            DataError,
            (
                r"has no column 'promt' \(data\.prompt_column\); found columns prompt, response,"
                r" turns; nearest: prompt"
            ),
        ),
        (
            {"text_column": "zzz"},
            DataError,
            r"has no column 'zzz' \(data\.text_column\); found columns prompt, [^;]*$",
        ),
        (
            {"text_column": "turns"},
            DataError,
            r"column 'turns' holds messages; the text must be text",
        ),
        (
            {"messages_column": "prompt"},
            DataError,
            r"column 'prompt' holds string; the messages must be a list",
        ),
    ],
    ids=str,
)
def test_columns_that_the_recipe_names_are_checked(tmp_path, given, error, message):
    path = write(tmp_path, "a.jsonl", [{"prompt": "a", "response": "b", "turns": TURNS}])
    with pytest.raises(error, match=message):
        detect(path, **given)


def test_a_text_file_has_no_column_to_name(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(
        DataError, match=r"has no column 'body' \(data\.text_column\); found columns text"
    ):
        detect(tmp_path / "a.txt", text_column="body")


# ---- content that would be dropped
# ---------------------------------------------------------------------------

PAIR = {"prompt": "a", "response": "b"}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
ROWS_OF = {  # of every format one row without any other content
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": SHAREGPT},
    "openai in conversations": {"conversations": TURNS},
    "alpaca": {"instruction": "a", "input": "b", "output": "c"},
    "belle": {"instruction": "a", "output": "c"},
    "firefly": {"kind": "k", "input": "a", "target": "b"},
    "dolly": {"instruction": "a", "context": "", "response": "b", "category": "c"},
    "oasst": {"text": "a", "role": "prompter"},
    "prompt/response": PAIR,
    "input/output": {"input": "a", "output": "b"},
    "text": {"text": "a"},
}
CONTENT = {  # column -> (its content, the same without any, what becomes of it)
    "chosen": ("good", "", "another kind of training .preference pairs"),
    "rejected": (
        [{"role": "assistant", "content": "bad"}],
        None,
        "another kind of training .preference pairs",
    ),
    "label": (False, None, "another kind of training .KTO"),
    "images": (["a.png"], [], "not trained yet"),
    "audio": ({"path": "a.wav"}, {"path": None}, "not trained yet"),
    "videos": (["a.mp4"], None, "not trained yet"),
    "tool_calls": ([CALL], [], "read as a key of a message, not as a column"),
    "reasoning_content": ("because", " ", "read as a key of a message, not as a column"),
    "weight": (0.0, None, "read as a key of a message, not as a column"),
}
MESSAGE_CONTENT = {  # key of a message -> (its content, the same without any)
    "images": (["a.png"], []),
    "tools": ('[{"name": "add"}]', "[]"),
    "mask": (True, None),
}


def in_answer(row: dict, column: str, **fields) -> dict:
    """The row, whose last message has these keys as well."""
    *before, last = row[column]
    return {**row, column: [*before, {**last, **fields}]}


def place(path: Path, number: int) -> str:
    return re.escape(f"{path}:{number}: ")


def write_row(folder: Path, ending: str, rows: list[dict]) -> Path:
    """write(), and the file types that have another writer."""
    path = folder / f"data.{ending}"
    if ending == "tar":
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(rows, 1):
                content = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{number}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    elif ending == "arrow":
        content = table(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
            writer.write_table(content, max_chunksize=700)
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write(folder, path.name, rows)
    return path


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("of", ROWS_OF)
def test_a_column_whose_content_would_be_dropped_is_refused_by_name_in_every_format(
    tmp_path, of, name
):
    content, nothing, why = CONTENT[name]
    rows = [ROWS_OF[of], {**ROWS_OF[of], name: nothing}, {**ROWS_OF[of], name: content}]
    path = write(tmp_path, "a.jsonl", rows)
    with pytest.raises(
        DataError, match=place(path, 3) + f".*column '{name}' is (for )?{why}.*=\\[{name}\\]"
    ):
        detect(path)
    assert (
        detect(path, ignore_columns=[name]).columns
        == detect(write(tmp_path, "b.jsonl", rows[:1])).columns
    )
    assert detect(write(tmp_path, "c.jsonl", rows[:2])).notes == detect(tmp_path / "b.jsonl").notes


@pytest.mark.parametrize("ending", [*WRITERS, "tar", "arrow", "jsonl.gz"])
@pytest.mark.parametrize("name", CONTENT)
def test_a_column_whose_content_would_be_dropped_is_refused_by_name_in_every_file_type(
    tmp_path, name, ending
):
    content, nothing, _ = CONTENT[name]
    path = write_row(tmp_path, ending, [{**PAIR, name: nothing}, {**PAIR, name: content}])
    with pytest.raises(DataError, match=place(path, 2) + f".*column '{name}'"):
        detect(path)
    assert list(read_samples(path, detect(path, ignore_columns=[name])))
    empty = write_row(tmp_path, ending, [{**PAIR, name: nothing}] * 2)
    assert len(list(read_samples(empty, detect(empty)))) == 2


@pytest.mark.parametrize("ending", [*WRITERS, "tar", "arrow", "jsonl.gz"])
@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("key", MESSAGE_CONTENT)
def test_a_key_of_a_message_whose_content_would_be_dropped_is_refused_by_name(
    tmp_path, ending, column, key
):
    content, nothing = MESSAGE_CONTENT[key]
    row = {column: TURNS if column == "messages" else SHAREGPT}
    path = write_row(
        tmp_path,
        ending,
        [in_answer(row, column, **{key: nothing}), in_answer(row, column, **{key: content})],
    )
    with pytest.raises(DataError, match=place(path, 2) + f".*'{key}'.*=\\[{key}\\]"):
        detect(path)
    ignoring = detect(path, ignore_columns=[key])
    assert list(read_samples(path, ignoring)) == [Conversation(TURNS)] * 2
    assert ignoring.notes == (f"left out by data.ignore_columns: {key}",)
    empty = write_row(tmp_path, ending, [in_answer(row, column, **{key: nothing})] * 2)
    assert list(read_samples(empty, detect(empty))) == [Conversation(TURNS)] * 2


@pytest.mark.parametrize("ending", [*WRITERS, "tar", "arrow", "jsonl.gz"])
@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (PAIR, {**PAIR, "chosen": "good"}, "column 'chosen'"),
        (
            {"messages": TURNS},
            in_answer({"messages": TURNS}, "messages", mask=True),
            "'mask'",
        ),
        (
            {"text": "a", "role": "prompter"},
            {"text": "a", "role": "bot", "label": 0},
            "column 'label'",
        ),
        ({"text": "a"}, {"text": "a", "images": ["a.png"]}, "column 'images'"),
    ],
    ids=["pair", "messages", "oasst", "text"],
)
def test_content_that_appears_in_row_5000_only_is_refused_with_its_place(
    tmp_path, ending, first, last, words
):
    path = write_row(tmp_path, ending, [*[first] * 4999, last, first])
    found = detect(path)
    with pytest.raises(DataError, match=place(path, 5000) + f".*{words}"):
        list(read_samples(path, found, BadRows(10)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "'chosen', column 'rejected' is for another kind",
        ),
        (
            {"chosen": TURNS, "rejected": TURNS, "id": "a"},
            "'chosen', column 'rejected' is for another kind",
        ),
        ({"chosen": TURNS, "rejected": TURNS}, "'chosen', column 'rejected' is for another kind"),
        ({"chosen": "a", "rejected": "b"}, "'chosen', column 'rejected' is for another kind"),
        (
            {"prompt": "q", "chosen": TURNS, "rejected": TURNS, "messages": TURNS},
            "'chosen', column 'rejected'",
        ),
        (
            {"prompt": "q", "completion": "a", "label": True},
            "column 'label' is for another kind of training .KTO",
        ),
        (
            {"question": "q", "label": "a"},
            r"add --data\.prompt_column=question --data\.response_column=label$",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("ending", WRITERS)
def test_data_of_another_kind_of_training_is_named_as_such_in_no_known_format_too(
    tmp_path, row, words, ending
):
    with pytest.raises(DataError, match=words):
        detect(write(tmp_path, f"a.{ending}", [row]))


def test_of_two_columns_of_messages_none_is_offered_alone(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"before": TURNS, "after": TURNS}])
    with pytest.raises(DataError, match="of several columns with messages one is read") as refused:
        detect(path)
    assert "--data.messages_column" not in str(refused.value)


def test_a_column_that_is_named_is_read_and_the_other_of_its_pair_refused(tmp_path):
    path = write(tmp_path, "a.parquet", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    named = {"prompt_column": "prompt", "response_column": "chosen"}
    with pytest.raises(DataError, match=r"column 'rejected' .*--data\.ignore_columns=\[rejected\]"):
        detect(path, **named)
    found = detect(path, **named, ignore_columns="rejected")
    (sample,) = read_samples(path, found)
    assert sample == Conversation(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    )


@pytest.mark.parametrize("weight", [1, 1.0, True])
def test_a_weight_that_says_what_training_does_is_accepted(tmp_path, weight):
    path = write(tmp_path, "a.jsonl", [in_answer({"messages": TURNS}, "messages", weight=weight)])
    assert list(read_samples(path, detect(path))) == [Conversation(TURNS)]
    asked = {"messages": [{**TURNS[0], "weight": weight}, TURNS[1]]}
    with pytest.raises(DataError, match="a message of role 'user' has 'weight'"):
        detect(write(tmp_path, "b.jsonl", [asked]))


def test_lists_that_are_very_deep_are_content_and_no_traceback(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIR)[:-1] + f', "history": {"[" * 900}{"]" * 900}}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'history': expected"):
        detect(path)


def test_the_columns_that_are_not_read_are_named_in_one_line(tmp_path):
    row = {"messages": [{**TURNS[0], "id": 1}, TURNS[1]], "url": "a", "rank": 1, "label": 0}
    found = detect(write(tmp_path, "a.jsonl", [row]), ignore_columns=["label", "lable"])
    assert found.notes == (
        "columns that are not read: url, rank, messages.id",
        "left out by data.ignore_columns: label, lable (not in the first rows: lable)",
    )


def test_a_column_without_a_name_is_named_by_quotes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,,response\na,b,c\n")
    assert detect(path).notes == ("columns that are not read: ''",)


def test_a_column_that_is_ignored_makes_no_format(tmp_path):
    path = write(
        tmp_path, "a.jsonl", [{"messages": TURNS, "instruction": "a", "input": "b", "output": "c"}]
    )
    assert detect(path, ignore_columns=["messages"]).columns["prompt"] == "instruction"
    assert "context" not in detect(path, ignore_columns=["messages", "input"]).columns
    with pytest.raises(
        ConfigError, match=r"data\.text_column and data\.ignore_columns both name 'input'"
    ):
        detect(path, text_column="input", ignore_columns=["input"])


def test_content_in_any_shard_and_in_the_validation_file_is_refused(tmp_path):
    (tmp_path / "shards").mkdir()
    for name, row in (("a", PAIR), ("b", {**PAIR, "label": 0})):
        write(tmp_path / "shards", f"{name}.jsonl", [row])
    known = FileFacts(tmp_path / "files.json", racy_s=-60)
    section = DataSection(train_file="shards")
    for _ in range(2):  # the second time from what is remembered
        with pytest.raises(DataError, match=r"b\.jsonl:1: .*column 'label'"):
            data_columns.detect(section, tmp_path, known)
        known.keep()
        known = FileFacts(tmp_path / "files.json")
    with pytest.raises(DataError, match=r"b\.jsonl:1: .*column 'label'"):
        detect(tmp_path / "shards/a.jsonl", tmp_path / "shards/b.jsonl")


# ---- files that cannot be used
# ---------------------------------------------------------------------------


def raw(content: bytes):
    return lambda path: path.write_bytes(content)


PARQUET = [{"prompt": "a" * 100, "response": f"{i}"} for i in range(50)]


def cut_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PARQUET), path)
    os.truncate(path, path.stat().st_size - 20)


def torn_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PARQUET), path)
    content = bytearray(path.read_bytes())
    content[-60:-20] = b"\xff" * 40  # in the footer, its magic kept
    path.write_bytes(content)


def empty_parquet(path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())}), path
    )


BROKEN = [
    ("a.parquet", raw(b""), r": 0 rows: the file is empty"),
    ("a.jsonl", raw(b""), r": 0 rows: the file is empty"),
    ("a.txt", raw(b""), r": 0 rows: the file is empty"),
    ("a.json", raw(b""), r": 0 rows: the file is empty"),
    ("a.jsonl", raw(b"\n \n\r\n"), r": 0 rows: every line is blank"),
    ("a.txt", raw(b"\xef\xbb\xbf\n"), r": 0 rows: every line is blank"),
    ("a.json", raw(b" \n"), r": 0 rows: every line is blank"),
    ("a.json", raw(b" [ ] "), r": 0 rows: the array is empty"),
    (
        "a.parquet",
        empty_parquet,
        r": 0 rows: the file has columns \(prompt, response\) but no data",
    ),
    ("a.parquet", cut_parquet, r": is cut, damaged or no parquet file"),
    ("a.parquet", torn_parquet, r": is cut, damaged or no parquet file"),
    ("a.parquet", raw(b"PAR1"), r": is cut, damaged or no parquet file"),
    (
        "a.parquet",
        raw(b'{"prompt": "a", "response": "b"}\n'),
        r": is cut, damaged or no parquet file",
    ),
    ("a.parquet", raw(b"\0" * 5000), r": is cut, damaged or no parquet file"),
    (
        "a.jsonl",
        raw(b'{"text": "a"\n'),
        r":1: is not JSON \(Expecting ',' delimiter at character 13\)",
    ),
    ("a.jsonl", raw(b"{'text': 'a'}\n"), r":1: is not JSON"),
    ("a.jsonl", raw(b'\n\n{"text": "a"}\n{"text": \n'), r":4: is not JSON"),
    ("a.jsonl", raw(b"prompt,response\na,b\n"), r":1: is not JSON"),
    ("a.jsonl", raw(b'"just text"\n'), r":1: holds string; each row must be an object"),
    (
        "a.jsonl",
        raw(b'{"text": "a\tb"}\n'),
        r":1: is not JSON \(Invalid control character at charac",
    ),
    (
        "a.csv",
        raw(b"prompt;response\na;b\n"),
        ": its columns .*; its header has semicolons between the names: write commas",
    ),
    (
        "a.tsv",
        raw(b"prompt,response\na,b\n"),
        ": its columns .*; its header has commas between the names: write tabs",
    ),
    *(
        (
            name,
            raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"),
            ": is a Git LFS pointer, not the data; fetch the data with git lfs pull",
        )
        for name in ("a.parquet", "a.jsonl", "a.jsonl.gz")
    ),
    ("a.jsonl", raw(b"3\n"), r":1: holds a number; each row must be an object"),
    ("a.jsonl", raw(b"null\n"), r":1: holds null; each row must be an object"),
    (
        "a.jsonl",
        raw(b'[{"text": "a"}]\n'),
        r":1: holds a list; a file that is one array of objects must end in \.json",
    ),
    ("a.jsonl", raw(b'[\n{"text": "a"}]\n'), r":1: is not JSON"),
    ("a.jsonl", raw(b'{"text": ' + b"[" * 100_000 + b"\n"), r":1: (cannot be read as|is not) JSON"),
    (
        "a.jsonl",
        raw(b'{"text": ' + b"1" * 10_000 + b"}\n"),
        r":1: cannot be read as JSON .* mend the line",
    ),
    (
        "a.jsonl",
        raw('{"text": "你好"}\n'.encode("gb18030")),
        r":1:10: this byte is not UTF-8; convert the file",
    ),
    ("a.jsonl", raw(b'{"text": "a"}\n{"text": "\xff"}\n'), r":2:10: this byte is not UTF-8"),
    (
        "a.jsonl",
        raw('{"text": "a"}\n'.encode("utf-16")),
        r":1:0: is UTF-16; convert the file to UTF-8",
    ),
    ("a.json", raw('[{"text": "a"}]\n'.encode("utf-16")), r":1:0: is UTF-16"),
    ("a.jsonl", raw(b"\x1f\x8b\x08\0\0\0\0\0\0\xff"), r":1:1: is compressed with gzip; unpack"),
    ("a.txt", raw(b"\xef\xbb\xbfab\xe4\xbd\n"), r":1:5: this byte is not UTF-8"),
    ("a.txt", raw(b"\n\n\x80\n"), r":3:0: this byte is not UTF-8"),
    (
        "a.json",
        raw(b'{\n "data": []\n}'),
        r":1: is not JSON .*a \.json file may be one array of objects",
    ),
    (
        "a.json",
        raw(b'[{"text": "a"}, {"text": ]'),
        r":1: is not JSON \(Expecting value at character 26\); mend the file",
    ),
    (
        "a.json",
        raw(b'[\n{"text": "a"}\n{"text": "b"}]'),
        r":3: is not JSON \(Expecting ',' delimiter",
    ),
    ("a.json", raw(b'[{"text": "a"}'), r":1: is not JSON"),
    ("a.json", raw(b'[{"text": "a"},'), r":1: is not JSON"),
    ("a.json", raw(b'[{"text": "a'), r":1: is not JSON"),
    ("a.json", raw(b"["), r":1: is not JSON"),
    ("a.json", raw(b'["a", "b"]'), r": element 1: holds string; each row must be an object"),
    ("a.json", raw(b'[{"text": "a"}, 3]'), r": element 2: holds a number"),
    ("a.json", raw(b"[" * 100_000), r"(: cannot be read as|:1: is not) JSON"),
    ("a.json", raw(b"[" + b"1" * 10_000 + b"]"), r": cannot be read as JSON"),
    (
        "a.json",
        raw(b'\xef\xbb\xbf[{"text": "a"},\n{"text": "\xff"}]'),
        r":2:10: this byte is not UTF-8",
    ),
    ("a.xlsx", raw(b"a,b\n"), r": \.xlsx is not a known file type; known: \.parquet, \.jsonl"),
    ("a.jsonl.gz", raw(b"\x1f\x8b"), r": cannot be read after row 0 \(Truncated compressed stream"),
    ("a.parquet.gz", raw(b"\x1f\x8b"), r": a parquet file is not read from \.gz; unpack it"),
    ("a.tar", raw(b"a"), r": is cut, damaged or no tar file"),
    ("a.tar", raw(bytes(10240)), r": 0 rows: no sample is in it"),
    ("a.arrow", raw(b"a"), r": is cut, damaged or no arrow file"),
    ("data", raw(b"a"), r": no ending is not a known file type"),
    ("a.jsonl", lambda path: path.mkdir(), r": no data file lies in this folder"),
    ("a.jsonl", os.mkfifo, r": is not an ordinary file; give a file"),
    ("a.jsonl", lambda path: path.symlink_to("gone.jsonl"), r": there is no such file"),
    ("a.jsonl", lambda path: path.symlink_to(path), r": cannot be opened"),
]


@pytest.mark.parametrize(("name", "make", "message"), BROKEN)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}{message}"):
        detect(tmp_path / name)


@pytest.mark.parametrize(("name", "make", "message"), BROKEN)
def test_the_validation_file_is_checked_like_the_training_file(tmp_path, name, make, message):
    training = write(tmp_path, "train.jsonl", [{"text": "a"}])
    make(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}{message}"):
        detect(training, tmp_path / name)


def test_a_line_without_end_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "')
        stream.truncate(shards.MAX_ROW_BYTES + 100)  # sparse
    with pytest.raises(DataError, match=r":1: longer than 64 MiB; write one row a line"):
        detect(path)


def test_an_array_element_without_end_is_refused_before_all_of_the_file_is_read(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as stream:
        stream.write(b'[{"text": "')
        stream.seek(8 * shards.MAX_ROW_BYTES)  # sparse
        stream.write(b'"}]')
    with pytest.raises(
        DataError,
        match=r":1: is not JSON .*, or longer than 64 MiB: element 1 has no end in [0-9,]+ ",
    ):
        detect(path)


def test_text_after_an_array_is_refused_where_rows_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]\n[]')
    data_format = DataFormat("text", {"text": "text"}, "json", "")
    with pytest.raises(DataError, match="has text after its array; mend the file"):
        list(read_samples(path, data_format))


def test_a_missing_file_names_the_nearest_in_its_folder(tmp_path):
    write(tmp_path, "sft_train.jsonl", [{"text": "a"}])
    write(tmp_path, "other.txt", [])
    with pytest.raises(
        DataError,
        match=r"sft_trian\.jsonl: there is no such file; nearest in that folder: sft_train\.jsonl",
    ):
        detect(tmp_path / "sft_trian.jsonl")
    with pytest.raises(
        DataError, match=r"there is no such file; in that folder: other\.txt, sft_train\.jsonl"
    ):
        detect(tmp_path / "0.parquet")


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(DataError, match=r"there is no such file; nor is there a folder .*nowhere"):
        data_columns.detect(DataSection(train_file="nowhere/a.jsonl"), tmp_path)
    with pytest.raises(DataError, match=r"there is no such file; there is no data file in"):
        detect(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "a\0.jsonl"])
def test_a_path_that_no_file_system_takes_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match=r"cannot be opened: "):
        data_columns.detect(DataSection(train_file=name), tmp_path)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "b.jsonl",
            {"messages": TURNS},
            r"b\.jsonl \(data\.validation_file\): reads as messages with columns messages, but "
            r".*a\.jsonl as prompt_response with columns instruction, output; give both files the"
            r" same columns, or read each in its own format, with '--data\.train_file=\[.*a\.jsonl",
        ),
        ("b.jsonl", {"text": "a"}, r"reads as text with columns text"),
        (
            "b.jsonl",
            {"prompt": "a", "response": "b"},
            r"columns prompt, response, but .* columns instruction, output",
        ),
        (
            "b.jsonl",
            {"instruction": "a", "input": "b", "output": "c"},
            r"columns instruction, input, output, but",
        ),
        (
            "b.json",
            {"instruction": "a", "output": "c"},
            r"is read as json, .*a\.jsonl as jsonl; write both in one",
        ),
        (
            "b.parquet",
            {"instruction": "a", "output": "c"},
            r"is read as parquet, .*a\.jsonl as jsonl",
        ),
        (
            "b.jsonl",
            {"question": "a", "answer": "b"},
            r"b\.jsonl: its columns are of no known format; found columns question, answer; give it"
            r" the columns of data\.train_file: instruction, output\. Known",
        ),
    ],
    ids=str,
)
def test_both_files_must_read_the_same_way(tmp_path, name, row, message):
    training = write(tmp_path, "a.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match=message):
        detect(training, write(tmp_path, name, [row]))


def test_a_context_missing_from_a_parquet_validation_file_is_an_error(tmp_path):
    training = write(tmp_path, "a.parquet", [{"instruction": "a", "input": "b", "output": "c"}])
    validation = write(tmp_path, "b.parquet", [{"instruction": "a", "output": "c"}])
    with pytest.raises(
        DataError, match=r"columns instruction, output, but .* instruction, input, output"
    ):
        detect(training, validation)


def test_a_missing_validation_file_is_named(tmp_path):
    training = write(tmp_path, "train.jsonl", [{"text": "a"}])
    with pytest.raises(
        DataError,
        match=r"valid\.jsonl: there is no such file; nearest in that folder: train\.jsonl",
    ):
        detect(training, tmp_path / "valid.jsonl")


def test_a_broken_array_cannot_be_counted(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {')
    with pytest.raises(DataError, match=r"a\.json:1: is not JSON"):
        data_columns.row_count(path)


PAIRS = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
    {"chosen": TURNS, "rejected": TURNS, "a source": "x"},
    {"the question": "a", "chosen": "b", "rejected": "c"},
    {"question": "a", "label": "b"},
    {"chosen": TURNS, "rejected": TURNS},
    {"chosen": "a question and its answer", "rejected": "b"},
]


@pytest.mark.parametrize("row", PAIRS)
def test_the_flags_that_an_error_suggests_train_on_the_answers(tmp_path, row):
    path = write(tmp_path, "a.jsonl", [row])
    with pytest.raises(DataError, match="is for another kind of training") as refused:
        detect(path)
    words = shlex.split(str(refused.value).rpartition(", add ")[2])
    flags: dict[str, Any] = dict(word.removeprefix("--data.").split("=", 1) for word in words)
    if "ignore_columns" in flags:
        flags["ignore_columns"] = flags["ignore_columns"].strip("[]").split(",")
    found = detect(path, **flags)
    assert {"chosen", "label"} & set(found.columns.values())
    assert len(list(read_samples(path, found))) == 1


def test_pairs_without_a_preferred_answer_get_no_flag_that_would_not_work(tmp_path):
    with pytest.raises(DataError, match=r"use them\)\.$"):
        detect(write(tmp_path, "a.jsonl", [{"prompt": "a", "rejected": "b"}]))


def test_flags_of_columns_with_blanks_can_be_pasted(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"the question": "a", "my answer": "b"}])
    with pytest.raises(DataError) as refused:
        detect(path)
    command = str(refused.value).partition("; add ")[2].partition(". Known")[0]
    words = shlex.split(command)
    assert words == ["--data.prompt_column=the question", "--data.response_column=my answer"]
