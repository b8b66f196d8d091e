"""oasst: rows that are messages become conversations, and each answer is trained once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import DataError
from launch.data import columns, sources
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows, read_samples
from launch.plan import resolve
from launch.probe import described
from launch.schema.data_section import DataSection
from tests import builders

pytestmark = pytest.mark.unit


def write(folder: Path, *messages: tuple[str | None, str | None, str, str | None]) -> Path:
    """A file of messages: (message_id, parent_id, role, text)."""
    names = ("message_id", "parent_id", "role", "text")
    rows = [dict(zip(names, message, strict=True)) for message in messages]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def talks(file: Path, max_bad_rows: int = 0) -> list[list[Any]]:
    """The messages of each conversation, as (text, True if it has a loss)."""
    data_format = columns.detect(
        DataSection(train_file=str(file), max_bad_rows=max_bad_rows), file.parent
    )
    return [
        [
            (message["content"], message["role"] == "assistant" and message.get("weight") != 0)
            for message in sample.messages
        ]
        for sample in read_samples(file, data_format, BadRows(max_bad_rows))
        if not isinstance(sample, str)
    ]


TREE = (
    *(
        ("1", None, "prompter", "who?"),
        ("2", "1", "assistant", "Ann."),
        ("3", "1", "assistant", "Bob."),
    ),
    *(
        ("4", "2", "prompter", "sure?"),
        ("5", "4", "assistant", "Yes."),
        ("6", "4", "assistant", "No."),
    ),
    ("7", "3", "prompter", "and?"),
)


def test_each_thread_of_a_tree_is_a_conversation_and_each_answer_is_trained_once(tmp_path):
    second = (("8", None, "prompter", "when?"), ("9", "8", "assistant", "Now."))
    assert talks(write(tmp_path, *TREE, *second)) == [
        [("who?", False), ("Ann.", True), ("sure?", False), ("Yes.", True)],
        [("who?", False), ("Ann.", False), ("sure?", False), ("No.", True)],
        [("who?", False), ("Bob.", True)],
        [("when?", False), ("Now.", True)],
    ]


@pytest.mark.parametrize("size", [0, 1])
def test_a_plan_counts_threads(tmp_path, size):
    file = write(tmp_path, *TREE)
    keys = [f"--data.train_file={file}", "--data.validation_file=null"]
    keys += [f"--data.validation_size={size}"] if size else []
    on = described.from_file(builders.CODE / "configs/machines/cpu.yaml")
    assert resolve.resolve("sft_small", keys, on, trace=False).plan.rows == 3 - size


def test_a_thread_is_held_out_as_a_whole(tmp_path):
    trees = [
        tuple(f"{t}{part}" if part else None for part in (*row[:2],)) for t in "ab" for row in TREE
    ]
    file = write(tmp_path, *((*ids, *row[2:]) for ids, row in zip(trees, TREE * 2, strict=True)))
    data = DataSection(train_file=str(file), validation_size=3)
    data_format = columns.detect(data, tmp_path)
    counts = sources.count_rows(data, data_format, FileFacts())
    parts = [
        [
            sample
            for source in sources.of_part(data, data_format, counts, part)
            for sample in source.read(BadRows())
        ]
        for part in ("train", "validation")
    ]
    assert [len(part) for part in parts] == [3, 3]
    every = list(read_samples(file, data_format))
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, every))


def test_a_message_whose_parent_is_not_before_it_is_a_bad_row(tmp_path):
    file = write(tmp_path, *TREE[:2], ("9", "8", "assistant", "Now."))
    with pytest.raises(DataError, match=r"rows\.jsonl:3: .*parent_id '8'; sort the rows"):
        talks(file)
    assert len(talks(file, 1)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((None, "1", "assistant", "Ann."), "2: has no message_id, as other rows have"),
        (("1", "1", "assistant", "Ann."), "2: message_id '1' is that of an earlier row"),
    ],
)
def test_a_message_without_an_id_of_its_own_is_a_bad_row(tmp_path, row, message):
    file = write(tmp_path, TREE[0], row, ("3", "1", "assistant", "Bob."))
    with pytest.raises(DataError, match=message):
        talks(file)
    assert talks(file, 1) == [[("who?", False), ("Bob.", True)]]


def test_a_message_of_a_tree_behind_pairs_is_a_bad_row(tmp_path):
    pair = ((None, None, "prompter", "who?"), (None, None, "assistant", "Ann."))
    assert talks(write(tmp_path, *pair)) == [[("who?", False), ("Ann.", True)]]
    with pytest.raises(DataError, match="3: has message_id or parent_id, the first row none"):
        talks(write(tmp_path, *pair, ("3", None, "prompter", "when?")))


def test_a_thread_through_a_bad_row_is_left_out(tmp_path):
    unread = ("2", "1", "assistant", None)
    file = write(tmp_path, TREE[0], unread, *TREE[2:])
    assert talks(file, 1) == [[("who?", False), ("Bob.", True)]]


def test_an_unknown_role_is_no_answer(tmp_path):
    file = write(tmp_path, TREE[0], ("2", "1", "moderator", "Stop."))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: found role 'moderator', expected one of"):
        talks(file)
