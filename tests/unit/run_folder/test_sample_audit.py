"""The rows that a run has trained, beside those of its epochs."""

from __future__ import annotations

import json
from array import array
from datetime import datetime
from pathlib import Path

import pytest

from launch.base import files
from launch.base.errors import CheckpointError, ConfigError
from launch.data import token_cache
from launch.run_folder import layout, sample_audit
from launch.run_folder.layout import RunDir
from launch.schema.result import UsedTokens

pytestmark = pytest.mark.unit


def trained(place: Path, *steps: list[int], rows: int = 4) -> RunDir:
    """A run on tokenised rows of this number, and the rows of its steps."""
    tokens = place / "tokens"
    tokens.mkdir()
    (tokens / token_cache.TOKENS_READY).write_text(json.dumps({"train": {"rows": rows}}))
    token_cache.write_hashes(tokens)
    run = RunDir.create(place, "wish", datetime(2026, 1, 1))
    files.write_json(run.tokens_file, UsedTokens(tokens))
    samples = run.new_attempt().root / "ranks" / "0" / layout.SAMPLES
    samples.parent.mkdir(parents=True)
    numbers = [[step, len(taken), *taken] for step, taken in enumerate(steps, 1)]
    samples.write_bytes(array("i", [number for taken in numbers for number in taken]).tobytes())
    return run


def test_each_epoch_has_all_rows_once_or_says_how_many(tmp_path):
    run = trained(tmp_path, [3, 0], [1, 2], [0], [3, 1])
    assert sample_audit.lines(run) == [
        "epoch 1: all of 4 rows, each once",
        "epoch 2: 3 of 4 rows, each once",
    ]


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (([0, 1], [1, 2]), r"epoch 1 has row 1 2 times \(1 of 4 rows more than once\)"),
        (([0, 1], [2, 7]), r"epoch 1 has row 7, which there is not \(0 of 4 rows"),
        (([0, 1], [2, 3], [4]), r"epoch 2 has row 4, which there is not"),
    ],
)
def test_a_row_that_came_twice_or_does_not_exist_is_named(tmp_path, steps, wrong):
    with pytest.raises(CheckpointError, match=wrong):
        sample_audit.lines(trained(tmp_path, *steps))


def test_a_run_that_has_trained_nothing_yet_and_one_without_its_rows_say_so(tmp_path):
    run = trained(tmp_path)
    assert sample_audit.lines(run) == ["no step has been recorded"]
    (tmp_path / "tokens" / token_cache.TOKENS_READY).unlink()
    with pytest.raises(ConfigError, match="found no run of ours with its tokenised rows"):
        sample_audit.lines(run)
