"""Rows that are damaged in any place are read, or named by file and row: never a traceback."""

from __future__ import annotations

import copy
import csv
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import DataError
from launch.data import columns as data_columns
from launch.data.rows import read_samples
from launch.schema.data_section import DataSection
from tests.unit.data.test_normalise import CALL, TOOL, WRAPPED, format_of

pytestmark = pytest.mark.unit

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Bob"},
    {"role": "assistant", "content": None, "tool_calls": [{**WRAPPED, "id": "1"}], "weight": 0},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "b", "reasoning_content": "r"},
]
SHAREGPT = [
    {"from": "human", "value": "a"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "b", "loss_mask": 1},
]
BASES: list[dict[str, Any]] = [
    {"messages": TURNS, "tools": [TOOL]},
    {"conversations": SHAREGPT, "tools": json.dumps([TOOL]), "system": "s"},
    {"instruction": "a", "input": "c", "output": "b", "system": "s", "history": [["q", "r"]]},
    {"prompt": TURNS[:2], "completion": TURNS[-1:]},
    {"prompt": "a", "completion": "b", "tools": json.dumps([TOOL])},
    {"text": "a", "role": "prompter"},
    {"text": "a", "label": ""},
]
VALUES: list[Any] = [
    *(None, "", " ", [], {}, 0, 1, -1.5, True, float("nan"), 10**30, "\ud800", "null", "[]", "{"),
    *([None], [[]], [1, "a"], {"role": 3}, {"type": "image"}, "user", "tool", "function_call"),
    *(json.loads("[" * 400 + "]" * 400), "[" * 100_000, {"name": "f"}, "\x00", '"', "a\nb"),
]
KEYS = ["role", "from", "content", "value", "weight", "mask", "tools", "chosen", "function", "id"]
ROWS = 320


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value in a row."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(rng: random.Random) -> tuple[dict, dict]:
    """(a row of some format, the same with one to three changes)."""
    base = rng.choice(BASES)
    row = copy.deepcopy(base)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice([*places(row)] or [(row, "text")])
        change = rng.random()
        if change < 0.7 or isinstance(container, list):
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif change < 0.85:
            container.pop(key, None)
        else:
            container[rng.choice(KEYS)] = container.pop(key, None)
    return base, row


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes of a file with one change below its first line."""
    offset = rng.randrange(content.index(b"\n") + 1, len(content))
    middle = rng.choice([b"", b'"', b"\xff", b"\n", b"\r", b"{", b"\x00", b",", b"\\"])
    return content[:offset] + middle + content[offset + rng.randint(0, 3) :]


def write(folder: Path, ending: str, base: dict, row: dict, rng: random.Random) -> Path | None:
    """A file with the row; None where the file type cannot hold it."""
    path = folder / f"a.{ending}"
    if ending == "parquet":
        try:
            pq.write_table(pa.Table.from_pylist([row]), path)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return None
        return path
    if ending == "csv":
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.writer(file)
            names = list(base)
            writer.writerows([names, [str(row.get(name, "")) for name in names], list(row)])
    elif ending == "json":
        path.write_text(json.dumps([base, row, base], indent=0))
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in (base, row, base)))
    if rng.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), rng))
    return path


def result_of(path: Path, base: dict) -> str:
    """ "read", or "refused" by an error that names file and row."""
    file_type: Any = path.suffix[1:]
    place = re.escape(str(path)) + r"(:\d+|: .*(row|element|line) \d+)"
    try:
        list(read_samples(path, format_of(base, file_type=file_type)))
    except DataError as error:
        assert re.match(place, str(error)), error
        return "refused"
    return "read"


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_a_mutated_row_is_read_or_named_and_no_other_error_ends_the_reading(tmp_path, ending):
    rng = random.Random(f"rows of {ending}")
    results: Counter[str] = Counter()
    while results["read"] + results["refused"] < ROWS // 4:
        base, row = mutated(rng)
        if (path := write(tmp_path, ending, base, row, rng)) is None:
            continue
        results[result_of(path, base)] += 1
        try:  # as the plan reads it: its columns are found by name and kind
            data_columns.detect(DataSection(train_file=str(path)), tmp_path)
        except DataError as error:
            assert str(path) in str(error)
        else:
            results["planned"] += 1
    assert results["refused"] > 10
    assert results["read"] > 3
    assert results["planned"] > 3
