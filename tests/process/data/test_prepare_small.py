"""scripts/prepare_small_sft_data.py: a sample of a large file, in two parts that sft_fast reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scripts import make_sample_data
from tests import builders
from tests.process import forked_starts

SCRIPT = "scripts/prepare_small_sft_data.py"


def prepare(
    folder: Path, rows: list[dict], *words: str, is_forked: bool = True
) -> subprocess.CompletedProcess[str]:
    source = folder / "big.jsonl"
    source.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    words = ("--input", "big.jsonl", "--output", "small/my.parquet", *words)
    if is_forked:
        return forked_starts.start(words, os.environ, SCRIPT, folder=folder)
    argv = [sys.executable, str(builders.CODE / SCRIPT), *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)


def parts(folder: Path) -> tuple[list[dict], list[dict]]:
    return tuple(
        pq.read_table(folder / f"small/my_{part}.parquet").to_pylist()
        for part in ("train", "valid")
    )


def alpaca(count: int) -> list[dict]:
    return [
        {"instruction": f"问 {i}", "input": "x" if i % 2 else "", "output": f"答 {i}"}
        for i in range(count)
    ]


def test_as_many_rows_as_asked_for_and_none_in_both_parts(tmp_path):
    words = ("--num_samples", "100", "--valid_ratio", "0.1")
    done = prepare(tmp_path, alpaca(500), *words, is_forked=False)
    assert done.returncode == 0, done.stderr
    train, valid = parts(tmp_path)
    assert (len(train), len(valid)) == (100, 10)
    rows = [(row["prompt"], row["response"]) for row in train + valid]
    assert len(set(rows)) == 110
    assert all(
        prompt.removesuffix("\nx") == f"问 {answer.removeprefix('答 ')}" for prompt, answer in rows
    )
    numbers = sorted(int(answer.removeprefix("答 ")) for _, answer in rows)
    assert numbers[0] < 50 and numbers[-1] > 450  # from all of the file, not its beginning
    prepare(tmp_path, alpaca(500), *words, "--overwrite")
    assert parts(tmp_path) == (train, valid)  # the same seed


@pytest.mark.parametrize(
    ("count", "sizes"), [(2, (1, 1)), (3, (2, 1)), (11, (10, 1)), (110, (100, 10))]
)
def test_neither_part_is_empty_however_few_rows_there_are(tmp_path, count, sizes):
    done = prepare(tmp_path, alpaca(count), "--num_samples=5000")
    assert done.returncode == 0, done.stderr
    assert tuple(map(len, parts(tmp_path))) == sizes
    assert f"5,500 rows were requested, there are {count}" in done.stdout


def test_rows_without_an_answer_and_rows_that_are_there_twice_are_left_out_and_counted(tmp_path):
    rows = [*alpaca(20), *alpaca(5), {"instruction": "q", "input": "", "output": "  "}]
    done = prepare(tmp_path, rows)
    assert "1 left out: without an answer" in done.stdout
    assert "5 left out: there twice" in done.stdout
    assert sum(map(len, parts(tmp_path))) == 20


def test_conversations_and_named_columns(tmp_path):
    talk = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")]
    turns = [{"from": speaker, "value": text} for speaker, text in talk]
    prepare(tmp_path, [{"conversations": turns}, {"conversations": turns[:2]}])
    train, valid = parts(tmp_path)
    assert sorted((row["prompt"], row["response"]) for row in train + valid) == [
        ("a", "b"),
        ("a\nb\nc", "d"),
    ]
    done = prepare(tmp_path, [{"q": f"{i}", "a": "y"} for i in range(4)], "--overwrite")
    assert done.returncode == 4
    assert "--data.prompt_column=q --data.response_column=a" in done.stderr
    named = ["--data.prompt_column=q", "--response-column=a", "--overwrite"]
    assert prepare(tmp_path, [{"q": f"{i}", "a": "y"} for i in range(4)], *named).returncode == 0


def test_a_column_that_would_be_dropped_is_refused_unless_it_is_ignored(tmp_path):
    rows = [{**row, "score": 1, "label": 1} for row in alpaca(20)]
    done = prepare(tmp_path, rows)
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
    assert "big.jsonl:1: has content that would be dropped" in done.stderr
    assert "--data.ignore_columns=[score,label]" in done.stderr
    assert prepare(tmp_path, rows, "--data.ignore_columns=[score,label]").returncode == 0


def test_content_that_two_columns_of_text_cannot_hold_is_refused_unless_it_is_ignored(tmp_path):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
    ]
    rows = [{"messages": turns}, {"messages": [{**turns[0], "content": "c"}, turns[1]]}]
    done = prepare(tmp_path, rows)
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
    assert "reasoning_content" in done.stderr
    assert prepare(tmp_path, rows, "--data.ignore_columns=[reasoning_content]").returncode == 0


@pytest.mark.parametrize(
    ("rows", "words", "code", "said"),
    [
        (alpaca(1), [], 4, "found 1 different rows with an answer, expected 2 or more"),
        ([{"text": "x"}] * 3, [], 4, "SFT needs a prompt and a response"),
        (alpaca(3), ["--num_samples=0"], 2, "expected at least 1"),
        (alpaca(3), ["--valid_ratio=1"], 2, "between 0 and 1"),
        (alpaca(3), ["--output=x.json"], 2, "ends in .parquet"),
        (alpaca(3), ["--input=none.jsonl"], 4, "none.jsonl"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, rows, words, code, said):
    done = prepare(tmp_path, rows, *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)
    assert said in done.stderr
    assert not (tmp_path / "small").exists()


def test_the_users_files_are_not_replaced_but_the_sample_is(tmp_path):
    builders.write_parquet(
        tmp_path / "small/my_train.parquet", [{"prompt": "mine", "response": "mine"}]
    )
    done = prepare(tmp_path, alpaca(5))
    assert done.returncode == 2
    assert "is not the sample data; add --overwrite" in done.stderr
    sample = [
        sys.executable,
        str(builders.CODE / "scripts/make_sample_data.py"),
        "--train-rows=5",
        "--valid-rows=5",
    ]
    subprocess.run([*sample, "--out-dir", "small"], cwd=tmp_path, check=True, capture_output=True)
    words = [
        "--input=small/sft_train_small_train.parquet",
        "--output=small/sft_train_small.parquet",
    ]
    refused = prepare(tmp_path, alpaca(5), *words)
    assert "would be replaced by the rows drawn from it" in refused.stderr
    replaced = prepare(tmp_path, alpaca(5), "--output=small/sft_train_small.parquet")
    assert replaced.returncode == 0, replaced.stderr


@pytest.mark.parametrize("is_link", [False, True])
def test_sample_data_replaces_no_file_of_the_users(tmp_path, is_link):
    own = tmp_path / "own.parquet"
    own.write_bytes(b"mine")
    path = tmp_path / "data" / make_sample_data.VALID_FILE
    path.parent.mkdir()
    path.symlink_to(own) if is_link else own.rename(path)
    with pytest.raises(ValueError, match="is not the sample data; move it away"):
        make_sample_data.write(path.parent, 50, 5, 1)
    assert path.read_bytes() == b"mine"
    assert [*path.parent.iterdir()] == [path]
