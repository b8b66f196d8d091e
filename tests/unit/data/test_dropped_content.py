"""Content of a row that would be dropped is refused by name, in every format and file type."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.base.errors import ConfigError, DataError
from launch.data import columns as data_columns
from launch.data.conversation import Conversation
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows, read_samples
from launch.schema.data_section import DataSection
from tests.data_files import SHAREGPT, TURNS, WRITERS, detect, write, write_row

pytestmark = pytest.mark.unit


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
