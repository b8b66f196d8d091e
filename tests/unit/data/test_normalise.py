"""A row of each documented format becomes the conversation that was written, with nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import DataError
from launch.data import columns as data_columns
from launch.data.conversation import Conversation, Sample
from launch.data.normalise import RowReader
from launch.data.rows import read_samples
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat

pytestmark = pytest.mark.unit

CALL = {"name": "add", "arguments": {"a": 1, "b": None}}
WRAPPED = {"type": "function", "function": CALL}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
ANSWER = {"role": "assistant", "content": "b"}
OFFERED = [{"type": "function", "function": TOOL}]


def user(content: str, **keys: Any) -> dict:
    return {"role": "user", "content": content, **keys}


def assistant(content: str | None, **keys: Any) -> dict:
    return {"role": "assistant", "content": content, **keys}


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def format_of(row: dict, file_type: Any = "jsonl", ignored: tuple[str, ...] = ()) -> DataFormat:
    """The format that the names of a row's columns make."""
    for _, kind, roles, optional in data_columns.KNOWN:
        if all(column in row for column in roles.values()):
            columns = dict(roles)
            if optional in row and optional is not None:
                columns["context"] = optional
            return DataFormat(kind, columns, file_type, "", ignored)
    raise AssertionError(f"{list(row)} are of no format")


def read(row: dict, **of: Any) -> Sample:
    return RowReader(format_of(row, **of)).sample(row)


def read_turns(*turns: dict, **of: Any) -> list[dict]:
    sample = read({"messages": list(turns)}, **of)
    assert isinstance(sample, Conversation)
    return sample.messages


ROWS = [
    ({"text": "a", "score": 0.5}, "a"),
    ({"instruction": "a", "output": "b"}, [user("a"), assistant("b")]),
    ({"instruction": "a", "input": "c", "output": "b"}, [user("a\nc"), assistant("b")]),
    ({"instruction": "", "input": "c", "output": "b"}, [user("c"), assistant("b")]),
    ({"instruction": "a", "output": "b", "tools": "null"}, [user("a"), assistant("b")]),
    ({"instruction": "a", "input": None, "output": "b"}, [user("a"), assistant("b")]),
    (
        {"instruction": "a", "output": "b", "system": "s", "history": [["q", "r"], ["t", "u"]]},
        [system("s"), user("q"), assistant("r"), user("t"), assistant("u"), user("a"), ANSWER],
    ),
    (
        {"instruction": "a", "output": "b", "history": '[["q", "r"]]'},
        [user("q"), assistant("r"), user("a"), assistant("b")],
    ),
    (
        {"instruction": "a", "output": "b", "system": "", "history": None, "tools": "[]"},
        [user("a"), assistant("b")],
    ),
    ({"instruction": "a", "context": "c", "response": "b"}, [user("a\nc"), assistant("b")]),
    ({"kind": "k", "input": "a", "target": "b"}, [user("a"), assistant("b")]),
    ({"prompt": "a", "response": "b", "system_prompt": "s"}, [system("s"), user("a")]),
    ({"prompt": "a", "completion": "b"}, [user("a"), assistant("b")]),
    ({"prompt": [user("a")], "completion": [assistant("b")]}, [user("a"), assistant("b")]),
    (
        {"prompt": [system("s"), user("a"), assistant("b"), user("c")], "completion": []}
        | {"completion": [assistant("d")]},
        [system("s"), user("a"), assistant("b", weight=0), user("c"), assistant("d")],
    ),
    ({"messages": [user("a"), assistant("b")]}, [user("a"), assistant("b")]),
    ({"messages": [user("a"), assistant("")]}, [user("a"), assistant("")]),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
        | {"system": "s"},
        [system("s"), user("a"), assistant("b")],
    ),
]


@pytest.mark.parametrize(("row", "expected"), ROWS, ids=str)
def test_a_row_of_each_format_becomes_its_turns(row, expected):
    sample = read(row)
    if isinstance(expected, str):
        assert sample == expected
    else:
        assert isinstance(sample, Conversation)
        assert sample.messages[: len(expected)] == expected
        assert sample.messages[-1]["role"] == "assistant"
        assert sample.tools is None


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("user", "human", "prompter", "User"), "user"),
        (("assistant", "gpt", "bot", "model", "chatgpt", "GPT"), "assistant"),
        (("system", "developer"), "system"),
        (("observation", "tool", "function", "tool_response"), "tool"),
    ],
)
def test_the_names_of_speakers_become_roles(names, role):
    for name in names:
        expected = [{"role": role, "content": "a"}]
        assert read_turns({"role": name, "content": "a"}) == expected
        assert read_turns({"from": name, "value": "a"}) == expected
        assert read_turns({"from": name, "value": "a", "role": None, "content": None}) == expected


def test_an_unknown_speaker_is_refused_and_no_turn_without_loss():
    with pytest.raises(DataError, match=r"'asistant', expected one of user.* mean assistant"):
        read_turns(user("a"), {"role": "asistant", "content": "b"})


# ---- calls and tools
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([WRAPPED], [WRAPPED]),
        ([{**WRAPPED, "id": "1"}], [{**WRAPPED, "id": "1"}]),
        ([{**CALL, "id": "1"}], [{**WRAPPED, "id": "1"}]),
        ([{**CALL, "type": "function", "id": "1"}], [{**WRAPPED, "id": "1"}]),
        ([CALL, CALL], [WRAPPED, WRAPPED]),
        (json.dumps([WRAPPED]), [WRAPPED]),
        (CALL, [WRAPPED]),
        ([{**CALL, "arguments": json.dumps(CALL["arguments"])}], [WRAPPED]),
        (
            [{"name": "now", "arguments": ""}],
            [{"type": "function", "function": {"name": "now", "arguments": {}}}],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("content", [None, "", "I add."])
def test_tool_calls_become_objects_with_arguments_as_objects(written, expected, content):
    turn = {"role": "assistant", "content": content, "tool_calls": written}
    assert read_turns(user("a"), turn)[1] == assistant(content, tool_calls=expected)


MINIMIND = [  # turns as minimind writes them
    {"role": "system", "content": "# Tools", "tools": json.dumps([TOOL])},
    user("1+1?"),
    assistant("", tool_calls=json.dumps([CALL])),
    {"role": "tool", "content": "2"},
    assistant("It is 2."),
]


@pytest.mark.parametrize("turns", [MINIMIND, json.dumps(MINIMIND)], ids=["list", "JSON text"])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_in_a_system_message_are_those_of_the_conversation(turns, key):
    if isinstance(turns, str):
        turns = turns.replace('"tools"', f'"{key}"')
    else:
        turns = [{key if name == "tools" else name: turn[name] for name in turn} for turn in turns]
    expected = [
        *(system("# Tools"), user("1+1?"), assistant("", tool_calls=[WRAPPED])),
        *({"role": "tool", "content": "2"}, assistant("It is 2.")),
    ]
    assert read({"conversations": turns}) == Conversation(expected, OFFERED)
    assert read({"conversations": turns, "tools": [TOOL]}) == Conversation(expected, OFFERED)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": MINIMIND, "tools": [{"name": "now"}]},
            "column 'tools' and a message of role 'system' offer different tools; keep one",
        ),
        (
            {"messages": [{**MINIMIND[0], "functions": [{"name": "now"}]}, *MINIMIND[1:]]},
            "role 'system' has 'functions' beside another key of the same meaning; keep one",
        ),
        (
            {"messages": [user("a", tools=[TOOL]), ANSWER]},
            "key 'tools' of a message in column 'messages' is read as a column, or as a key",
        ),
        (
            {"messages": [{**MINIMIND[0], "tools": "a hammer"}, *MINIMIND[1:]]},
            "role 'system': its tools: cannot be read as JSON",
        ),
    ],
    ids=str,
)
def test_tools_in_two_places_or_of_another_role_are_refused(row, words):
    with pytest.raises(DataError, match=words):
        read(row)


def test_turns_of_functions_become_calls_and_results():
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": json.dumps([CALL, CALL])},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ]
    sample = read({"conversations": turns, "tools": json.dumps([TOOL])})
    called = assistant(None, tool_calls=[WRAPPED, WRAPPED])
    result = {"role": "tool", "content": "2"}
    assert sample == Conversation([user("1+1?"), called, result, assistant("It is 2.")], OFFERED)


def test_a_legacy_call_of_a_function_and_its_result_are_read():
    turns = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "content": "2", "name": "f"}
    assert read_turns(*turns) == [assistant(None, tool_calls=[call]), result]


@pytest.mark.parametrize("tools", [[TOOL], OFFERED, json.dumps([TOOL]), json.dumps(OFFERED)])
@pytest.mark.parametrize("name", ["tools", "functions"])
@pytest.mark.parametrize("row", [{"messages": [user("a")]}, {"prompt": "a", "response": "b"}])
def test_tools_are_a_list_or_its_json_text(row, name, tools):
    sample = read({**row, name: tools})
    assert isinstance(sample, Conversation)
    assert sample.tools == OFFERED


def test_a_null_of_a_table_means_absent_and_of_json_is_a_value(tmp_path):
    other = {"role": "tool", "content": "2", "tool_call_id": "1", "tool_calls": None}
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turns = [user("a"), assistant(None, tool_calls=[call], name=None), other]
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert read_turns(*turns)[1]["tool_calls"][0]["function"] == CALL
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    expected = [user("a"), assistant(None, tool_calls=[called]), result]
    assert read_turns(*row["messages"], file_type="parquet") == expected


# ---- other keys of messages
# ---------------------------------------------------------------------------


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    assert read_turns({"role": "user", "content": parts}) == [user("ab")]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_stands_beside_the_answer(key):
    assert read_turns(assistant("b", **{key: "r"})) == [assistant("b", reasoning_content="r")]


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss_mask"])
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_a_weight_of_0_takes_the_loss_off_an_answer(key, value):
    assert read_turns(user("a", **{key: value}), assistant("b", **{key: value})) == [
        user("a"),
        assistant("b", weight=0),
    ]
    assert read_turns(assistant("b", **{key: 1})) == [assistant("b")]
    assert read_turns(assistant("b", **{key: 0}), ignored=(key,)) == [assistant("b")]


def test_the_name_of_a_speaker_and_the_id_of_a_call_are_read():
    result = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "1"}
    assert read_turns(user("a", name="Bob"), result) == [user("a", name="Bob"), result]


def test_values_without_content_are_absent():
    empty = {"tool_calls": [], "name": "", "reasoning_content": None, "weight": None, "images": []}
    assert read_turns({**assistant("b"), **empty}) == [assistant("b")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([assistant(None)], "role 'assistant' has no content; write text"),
        ([{"role": "user"}], "role 'user' has no content"),
        ([{"role": "tool", "content": None}], "role 'tool' has no content"),
        ([assistant(None, reasoning_content="r")], "has no content"),
        (
            [assistant(None, tool_calls=[{"function": {"name": "", "arguments": {}}}])],
            "the call in 'tool_calls' has no name",
        ),
        ([{"role": "user", "content": 3}], "found int as content, expected text"),
        ([{"role": "user", "content": {}}], "found dict as content"),
        ([{"role": "user", "content": ["a"]}], "only parts"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "only parts"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], "only parts"),
        ([{"role": "user", "content": "a", "value": "b"}], "has content and value; keep one"),
        ([{"content": "a"}], "a message needs text in role and content"),
        (["a"], "a message needs text"),
        ([], "found an empty list, expected a list of messages"),
        ([assistant("\ud800")], "half a character"),
        ([assistant("a", reasoning="\ud800")], "half a character"),
        ([assistant(None, tool_calls=[{**CALL, "name": "\ud800"}])], "cannot be read as JSON"),
        ([user("a", tool_calls=[CALL])], "'tool_calls', which belongs to role assistant"),
        ([user("a", tool_call_id="1")], "'tool_call_id', which belongs to role tool"),
        ([assistant("a", name=3)], "found int as 'name', expected text"),
        ([assistant("a", tool_calls="add(1)")], "cannot be read as JSON"),
        ([assistant("a", tool_calls=[{"name": "f", "arguments": "a=1"}])], "be read as JSON"),
        ([assistant("a", tool_calls=[{"name": "f", "arguments": "[1]"}])], "expected a call"),
        ([assistant("a", tool_calls=[{"function": 3}])], "expected a call"),
        ([assistant("a", tool_calls='{"name": "f", "name": "g"}')], "the key 'name' twice"),
        ([{"role": "function_call", "content": "add(1)"}], "cannot be read as JSON"),
        ([{"role": "function_call", "content": None}], "expected a call"),
        ([{"role": "function_call", "content": "[]"}], "expected a call"),
        ([assistant("a", tool_calls=[{**WRAPPED, "type": "custom"}])], "expected a call"),
        ([assistant("a", tool_calls=[{"name": "", "arguments": {"a": 1}}])], "expected a call"),
        ([assistant("a", weight=0.5)], "found 0.5 as 'weight', expected 0 or 1"),
        ([assistant("a", weight="0")], "found '0' as 'weight'"),
        ([assistant("a", weight=1, train=False)], "'train' beside another key of the same"),
        ([user("a", weight=1)], "the loss is on answers only"),
        ([assistant("a", mask=1)], "key 'mask' of a message .* may mean trained or not"),
        ([assistant("a", images=["a.png"])], "key 'images' of a message .* is not trained yet"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_read_is_named_by_role_and_key(row, message):
    with pytest.raises(DataError, match=f"column 'messages'.*{message}|{message}"):
        read({"messages": row})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"history": [["q"]]}, r"'history': expected a list of \[question, answer\]"),
        ({"history": [["q", None]]}, "'history': expected"),
        ({"history": {"q": "a"}}, "'history': expected"),
        ({"history": "q: a"}, "'history': cannot be read as JSON"),
        ({"tools": "add"}, "'tools': cannot be read as JSON"),
        ({"tools": "7"}, "'tools': expected a list of tools"),
        ({"tools": [3]}, "'tools': expected a list of tools"),
        ({"tools": [{"type": "retrieval"}]}, "'tools': expected a list of tools"),
        ({"tools": [TOOL], "functions": [TOOL]}, "columns 'tools', 'functions' both have"),
        ({"system": 3}, "'system': found int, expected text"),
        ({"system": "\ud800"}, "half a character"),
        ({"response": None}, "'response': found null"),
    ],
    ids=str,
)
def test_a_column_that_cannot_be_read_is_named(more, message):
    with pytest.raises(DataError, match=message):
        read({"prompt": "a", "response": "b", **more})


def test_two_system_prompts_are_refused_unless_they_are_the_same():
    row = {"messages": [system("s"), user("a"), assistant("b")], "system": "t"}
    with pytest.raises(DataError, match=r"two system prompts; .*=\[system\]"):
        read(row)
    assert read({**row, "system": "s"}) == read(row, ignored=("system",))


def test_a_turn_whose_calls_are_ignored_is_an_empty_answer():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    assert read_turns(call, ignored=("tool_calls",)) == [assistant("")]


def test_columns_that_are_ignored_are_not_read():
    row = {"prompt": "a", "response": "b", "system": "s", "history": 3, "tools": "add"}
    ignored = ("system", "history", "tools")
    assert read(row, ignored=ignored) == Conversation([user("a"), assistant("b")])


# ---- content that is refused
# ---------------------------------------------------------------------------


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def detect(path: Path, **section: Any) -> DataFormat:
    return data_columns.detect(DataSection(train_file=str(path), **section), path.parent)


@pytest.mark.parametrize(
    ("row", "name", "content"),
    [
        ({"text": "a"}, "system", "s"),
        ({"text": "a"}, "tools", "[{}, 1]"),
        ({"text": "a", "role": "user"}, "history", [["q", "a"]]),
        ({"messages": [user("a")]}, "history", [["q", "a"]]),
        ({"messages": [user("a")]}, "score", 1),
        ({"prompt": "a", "response": "b"}, "score", 1),
    ],
    ids=str,
)
def test_a_column_that_its_format_does_not_read_is_refused_by_name(tmp_path, row, name, content):
    path = write(tmp_path / "a.jsonl", row, {**row, name: content})
    reason = "is for another kind" if name == "score" else "is not read in this format"
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*column '{name}' {reason}.*\[{name}\]$"):
        detect(path)
    assert detect(path, ignore_columns=[name]).ignored == (name,)


def test_the_score_of_a_text_is_named_as_not_read(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "a", "score": 3})
    assert detect(path).notes == ("columns that are not read: score",)


def test_the_plan_names_the_columns_that_are_read_besides_the_format(tmp_path):
    row = {"instruction": "a", "output": "b", "id": 1, "system": "s", "history": []}
    made = detect(write(tmp_path / "a.jsonl", row, {**row, "tools": "[]"}))
    assert made.reason.endswith("the columns instruction, output, with system, history, tools")
    assert made.notes == ("columns that are not read: id",)


def test_a_column_that_appears_in_row_200_only_is_read(tmp_path):
    row = {"prompt": "a", "response": "b"}
    path = write(
        tmp_path / "a.jsonl", *[row] * 199, {**row, "system": "s", "history": [["q", "r"]]}
    )
    *_, last = read_samples(path, detect(path))
    assert last == read({**row, "system": "s", "history": [["q", "r"]]})
    assert isinstance(last, Conversation)
    assert [turn["content"] for turn in last.messages] == ["s", "q", "r", "a", "b"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_conversations_are_found_whatever_content_holds(tmp_path, ending):
    parts = [{"type": "text", "text": "a"}]
    for number, turns in enumerate(
        (
            [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}],
            [{"role": "assistant", "content": None, "tool_calls": [WRAPPED]}],
            [{"role": "assistant", "tool_calls": [WRAPPED]}],
        )
    ):
        path = tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist([{"messages": turns}]), path)
        else:
            write(path, {"messages": turns})
        if number == 0:
            (sample,) = read_samples(path, detect(path))
            assert sample == Conversation([user("a"), assistant("a")])
        else:
            assert detect(path).kind == "messages"
