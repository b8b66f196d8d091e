"""Each file between processes is a noun with one reader, which names a damaged file and its key."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.base import files
from launch.base.errors import CheckpointError
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.recipe import Recipe
from launch.schema.result import (
    AttemptEnd,
    Continues,
    ExportedModel,
    Failure,
    Outcome,
    RankError,
    SecondStep,
    UsedTokens,
)
from launch.supervise import heartbeats, oom_record
from tests.builders import plan, recipe_of
from training.data.encode import CacheCounts
from training.data.tokenise import TokenisedUnit


def attempt_in(folder: Path) -> AttemptDir:
    attempt = AttemptDir(folder / "run" / "attempts" / "01")
    attempt.root.mkdir(parents=True)
    return attempt


NOUNS: list[Any] = [
    SecondStep(1, 2, 3, 4),
    RankError(1, "ValueError", "boom", 2.0, 3, "fix", "trace"),
    Outcome(complete=True, ended="complete", loss=math.inf, bleu_after=1.5),
    UsedTokens(Path("/tokens"), {"limits": [], "validation": "held.jsonl"}),
    Continues(Path("/run/checkpoints/checkpoint-000004"), 32, 8),
    ExportedModel("tiny-1", "tiny", 4, quantization={"load_in_4bit": True}),
    AttemptEnd(6, Failure("host_oom", 6, "cause", "proof", "fix", "step"), 1.5, 7),
    AttemptEnd(0, None, 1.5),
    TokenisedUnit(CacheCounts(rows=2, lengths=[(3, 4)]), ["a row"], "failed"),
    plan(),
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_a_noun_is_read_as_it_was_written(tmp_path, noun):
    files.write_json(tmp_path / "noun.json", noun)
    assert files.read(tmp_path / "noun.json", type(noun)) == noun


def test_a_file_that_is_not_there_is_none(tmp_path):
    assert files.read(tmp_path / "no.json", SecondStep) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "EOF"),
        ("{", "EOF"),
        ("[]", "Input should be an object"),
        ("3", "Input should be an object"),
        ('{"allocated_bytes": 1}', "reserved_bytes: Field required"),
        (
            '{"allocated_bytes": "many", "reserved_bytes": 1, "host_pss_bytes": 1}',
            "allocated_bytes: Input should be a valid integer",
        ),
        ("[" * 5000, "recursion limit"),
        ("\x00", "expected value"),
    ],
)
def test_a_damaged_file_is_named_with_its_key(tmp_path, content, words):
    path = tmp_path / "second_step.json"
    path.write_text(content)
    with pytest.raises(CheckpointError) as error:
        files.read(path, SecondStep)
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert files.read_or_none(path, SecondStep) is None


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "folder", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            files.read(path, SecondStep)


BROKEN = ["{", "[]", '"text"', '{"rank": "x", "complete": "q", "samples_seen": [], "folder": 3}']
READERS: list[tuple[str, Callable[[RunDir, AttemptDir], Any]]] = [
    ("run/plan.json", lambda run, attempt: run.read_plan()),
    ("run/recipe.json", lambda run, attempt: run.read_recipe()),
    ("run/tokens.json", lambda run, attempt: run.read_tokens()),
    ("run/continues.json", lambda run, attempt: run.read_continues()),
    ("run/attempts/01/plan.json", lambda run, attempt: attempt.read_plan()),
    ("run/attempts/01/machine.json", lambda run, attempt: attempt.read_machine()),
    ("run/attempts/01/outcome.json", lambda run, attempt: run.outcome()),
    ("run/attempts/01/supervisor.json", lambda run, attempt: attempt.read_end()),
    ("run/attempts/01/second_step.json", lambda run, attempt: attempt.read_second_step()),
]


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_every_file_of_a_run_is_refused_by_name_where_it_is_damaged(tmp_path, name, read, content):
    attempt = attempt_in(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="missing or damaged") as error:
        read(RunDir(tmp_path / "run"), attempt)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("content", BROKEN)
def test_what_can_be_done_without_is_ignored_where_it_is_damaged(tmp_path, content):
    attempt, run = attempt_in(tmp_path), RunDir(tmp_path / "run")
    attempt.error_file(0).write_text(content)
    attempt.leave_word(1, ValueError("boom"))
    assert [error.message for error in attempt.rank_errors()] == ["boom"]
    attempt.heartbeat_file(0).write_text(content)
    assert heartbeats.read_all(attempt) == []
    run.evidence_file.write_text(content)
    assert oom_record.read(run) == ()


def test_a_recipe_goes_through_its_file(tmp_path):
    run = RunDir(tmp_path)
    run.write_plan(recipe_of(), plan())
    assert run.read_recipe() == recipe_of()
    assert asdict(run.read_plan()) == asdict(plan())
    assert isinstance(run.read_recipe(), Recipe)
