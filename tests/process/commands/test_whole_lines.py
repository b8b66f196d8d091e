"""Lines of commands: shortened for a terminal, whole in a file or a pipe."""

from __future__ import annotations

import re
import sys

import pytest

from launch.base import files
from launch.run_folder.layout import RunDir
from launch.schema.result import AttemptEnd, Failure
from tests import builders
from tests.process import forked_starts

pytestmark = pytest.mark.process

NAME = "a-long-name-of-a-file-" * 9
LOST = "the disk is full: " + "no space left on device, " * 9


def test_the_plan_is_shortened_on_a_terminal_alone(tmp_path):
    recipe = builders.recipe(tmp_path)
    (tmp_path / f"{NAME}.parquet").write_bytes((tmp_path / "train.parquet").read_bytes())
    words = ["plan", str(recipe), f"--data.train_file={tmp_path}/{NAME}.parquet"]
    words.append("--launch.mode=cpu")
    done = forked_starts.launch(tmp_path / "workspace", *words)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}.parquet: 45 rows" in done.stdout
    assert f"validation_file {tmp_path}/valid.parquet -> null (these are held-out" in done.stdout
    assert "..." not in done.stdout
    program = [sys.executable, "-m", "launch", *words]
    screen = builders.on_terminal(program, tmp_path / "workspace").splitlines()
    assert max(map(len, screen)) <= 100
    assert [line for line in screen if "..." in line and line.startswith("  data ")]


def test_a_verdict_in_the_table_of_runs_is_one_line_in_a_pipe(tmp_path):
    run = RunDir(tmp_path / "runs/tiny/20260101-000000")
    run.root.mkdir(parents=True)
    run.new_attempt()
    files.write_json(run.plan_file, builders.plan(builders.recipe_of()))
    failure = Failure("disk_full", 6, LOST, "proof", "fix")
    files.write_json(run.attempts()[-1].supervisor_file, AttemptEnd(6, failure, 1.0))
    done = forked_starts.launch(tmp_path, "runs")
    assert f"{LOST} (exit code 6: out of host RAM)" in done.stdout
    screen = builders.on_terminal([sys.executable, "-m", "launch", "runs"], tmp_path)
    assert max(map(len, re.sub(r"\x1b\[\S*?m", "", screen).splitlines())) <= 100
