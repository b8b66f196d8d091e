"""Every data format is found by its columns; columns that cannot be used are named."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import ConfigError, DataError
from launch.data import columns as data_columns
from launch.data.rows import read_samples
from launch.schema.data_section import DataSection
from tests import cost
from tests.data_files import SHAREGPT, TURNS, WRITERS, detect, table, write

pytestmark = pytest.mark.unit

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
    ("messages", {"messages": json.dumps(TURNS)}, "messages", {"messages": "messages"}),
    (
        "prompt/response",
        {"Prompt": "a", "Response": "b"},
        "prompt_response",
        {"prompt": "Prompt", "response": "Response"},
    ),
    *(
        (
            "prompt and response",
            dict.fromkeys([*others, prompt, response], "a"),
            "prompt_response",
            {"prompt": prompt, "response": response},
        )
        for prompt, response, others in [
            ("question", "answer", []),  # gsm8k, orca-math
            ("question", "response", ["id", "system_prompt"]),  # OpenOrca
            ("query", "response", ["type", "original_question"]),  # MetaMathQA
            ("Question", "Response", ["Complex_CoT"]),  # medical-o1
            ("instruction", "response", ["id"]),  # Magpie
            ("problem", "solution", ["level", "type"]),  # MATH
        ]
    ),
    (
        "prompt and response",
        {"context": "c", "question": "a", "answer": "b"},
        "prompt_response",
        {"prompt": "question", "context": "context", "response": "answer"},
    ),
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
        ({"question": "a", "answer": "b", "text": "ab"}, ["text"]),
        ({"Messages": TURNS, "prompt": "a", "response": "b"}, ["prompt", "response"]),
        ({"Text": "a", "text": "b"}, ["text"]),
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


@pytest.mark.parametrize("ending", WRITERS)
def test_keys_of_messages_in_json_text_that_are_not_read_are_named(tmp_path, ending):
    turns = json.dumps([{**turn, "mood": "glad"} for turn in TURNS])
    path = write(tmp_path, f"data.{ending}", [{"talk": turns}])
    assert detect(path, messages_column="talk").notes == ("columns that are not read: talk.mood",)


# ---- columns that cannot be used
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"id": "1", "question": "a", "answer": "b", "response": "c"},
            (
                r"each of the columns answer, response may be the response; add"
                r" --data\.prompt_column=question --data\.response_column=answer"
            ),
        ),
        (
            {"question": "a", "query": "b", "answer": "c"},
            r"each of the columns question, query may be the prompt; add --data\.prompt_column",
        ),
        (
            {"theme": "a", "answer": "b"},
            r"found columns theme, answer; add --data\.prompt_column=theme --data\.response_col",
        ),
        ({"question": "a", "answer": 3}, r"column 'answer' holds .*; the response must be text"),
        ({"content": "a", "id": 1}, r"found columns content, id; add --data\.text_column=content"),
        ({"dialog": TURNS, "id": "a"}, r"add --data\.messages_column=dialog"),
        ({"id": 1, "label": 2}, r"found columns id, label; none of them holds text"),
        ({"prompt": "a"}, r"found columns prompt; "),
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
            r"column 'messages': found an empty list, expected a list of mess",
        ),
        (
            {"messages": "good morning"},
            r"column 'messages' \(a list of messages, or its JSON text\): cannot be read",
        ),
        (
            {"messages": '{"role": "user"}'},
            r"column 'messages': found dict, expected a list of mess",
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
            {"prompt_column": "promt", "response_column": "respons"},
            DataError,
            r"(?s)no column 'promt' .*nearest: prompt\n.*no column 'respons' .*nearest: response$",
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
            r"column 'prompt' \(a list of messages, or its JSON text\): cannot",
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


# ---- flags that an error suggests
# ---------------------------------------------------------------------------

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
