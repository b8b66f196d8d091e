"""A killed run continues from its last whole checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launch.base import files as base_files
from launch.run_folder import manifest
from tests import builders

pytestmark = pytest.mark.modes


def kill_after(
    workspace: Path,
    words: list[str],
    step: int,
    program: Sequence[str] = ("-m", "launch"),
    within_s: float = 120,
    **extra: str,
) -> None:
    """Start a run and kill -9 every process of it once it has logged `step`."""
    child = subprocess.Popen(
        [sys.executable, *program, *words],
        env=builders.environment(workspace, **extra),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + within_s
    while True:
        assert child.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run never reached the step"
        runs = list((workspace / "runs" / "tiny").glob("*/attempts/01/events.jsonl"))
        if runs and len(runs[0].read_text().splitlines()) >= step:
            break
        time.sleep(0.02)
    family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
    for process in family:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()
    psutil.wait_procs(family, timeout=10)


def watched(workspace: Path) -> dict[str, Any]:
    """The only run of a workspace, as `watch --json` has it."""
    done = builders.launch(workspace, "watch", "--json")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    return run


def test_a_complete_run_says_so_and_resume_never_starts_over_with_another_learning_rate(tmp_path):
    recipe = str(builders.recipe(tmp_path, training={"max_steps": 3, "warmup_steps": 0}))
    assert builders.launch(tmp_path / "workspace", "run", recipe).returncode == 0
    first = {name: tensor.clone() for name, tensor in builders.weights(tmp_path / "model").items()}
    second = builders.launch(tmp_path / "workspace", "run", recipe)
    assert second.returncode == 0
    assert "is complete; to start over: --resume never" in second.stdout
    assert len(list((tmp_path / "workspace/runs/tiny").glob("*/plan.json"))) == 1
    shutil.rmtree(tmp_path / "model")
    again = builders.launch(tmp_path / "workspace", "run", recipe)
    assert "does not hold its model: writing it again from checkpoint-000003" in again.stdout
    assert again.returncode == 0
    written = builders.weights(tmp_path / "model")
    assert all(torch.equal(first[name], tensor) for name, tensor in written.items())
    third = builders.launch(
        tmp_path / "workspace", "run", recipe, "--resume", "never", "--training.learning_rate=2e-3"
    )
    assert third.returncode == 0
    assert "starting a new run" in third.stdout
    assert len(list((tmp_path / "workspace/runs/tiny").glob("*/attempts/01/outcome.json"))) == 2
    assert any(
        not torch.equal(first[name], tensor)
        for name, tensor in builders.weights(tmp_path / "model").items()
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, str]:
    """(house, recipe) of a run killed at step 13 or a little later; tests work on copies of the
    house."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = str(builders.recipe(folder, training={"num_train_epochs": 8, "save_steps": 5}))
    kill_after(folder / "workspace", ["run", recipe], step=13)
    return folder / "workspace", recipe


@pytest.fixture
def copied(killed, tmp_path) -> tuple[Path, str]:
    workspace, recipe = killed
    return shutil.copytree(workspace, tmp_path / "workspace"), recipe


@pytest.mark.shows("F44", "another effective batch; refused, and continued where allowed")
def test_another_batch_continues_at_the_same_sample(copied):
    """Where it is allowed: stop, change the batch, start again; no sample is skipped or
    repeated."""
    workspace, recipe = copied
    refused = builders.launch(workspace, "run", recipe, "12")
    assert refused.returncode == 5
    assert "effective batch 8 -> 12" in refused.stderr
    assert "--resume.allow=[effective_batch_size]" in refused.stderr
    again = builders.launch(workspace, "run", recipe, "12", "--resume.allow=[effective_batch_size]")
    assert again.returncode == 0, again.stderr
    assert "effective batch 8 -> 12" in again.stdout
    taken, continued = sorted((workspace / "runs/tiny").glob("*/plan.json"))
    checkpoint = sorted((taken.parent / "checkpoints").glob("checkpoint-*"))[-1]
    epoch, in_epoch = divmod(int(checkpoint.name.split("-")[1]), 6)  # 45 rows in batches of 8
    seen = epoch * 45 + min(in_epoch * 8, 45)
    steps = builders.events(continued.parent)
    assert steps[0]["samples_seen"] == min(seen + 12, (epoch + 1) * 45)
    assert sum(event["samples"] for event in steps) == 8 * 45 - seen
    assert steps[-1]["samples_seen"] == 8 * 45
    shown = builders.launch(workspace, "samples", str(continued.parent))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        f"epoch {epoch}: all of 45 rows, each once" for epoch in range(1, 9)
    ]


def test_a_run_whose_learning_rate_changed_is_refused_with_the_difference(copied):
    workspace, recipe = copied
    changed = builders.launch(workspace, "run", recipe, "--training.learning_rate=2e-3")
    assert changed.returncode == 5
    assert changed.stderr.count("\n") == 1
    assert "training.learning_rate 0.001 -> 0.002" in changed.stderr


@pytest.mark.shows("F44", "another seed, length or dtype; the difference is shown")
@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("--training.seed=1", "training.seed 23333 -> 1"),
        ("--data.max_length=32", "data.max_length 64 -> 32"),
        ("--model.dtype=bfloat16", "model.dtype float32 -> bfloat16"),
    ],
)
def test_what_changes_the_training_is_refused_with_the_difference_and_the_word_that_allows_it(
    copied, override, shown
):
    workspace, recipe = copied
    word = (
        override.partition(".")[2].partition("=")[0]
        if "seed" in override
        else override[2:].partition(".")[0]
    )
    changed = builders.launch(workspace, "run", recipe, override)
    assert changed.returncode == 5
    assert changed.stderr.count("\n") == 1
    assert shown in changed.stderr
    assert f"--resume.allow=[{word}]" in changed.stderr
    allowed = builders.launch(
        workspace, "run", recipe, override, f"--resume.allow={word}", "--dry-run"
    )
    assert allowed.returncode == 0, allowed.stderr
    assert f"in a new run ({shown}" in allowed.stdout


@pytest.mark.shows("F40", "another file in place of the rows, between run and resume")
def test_rows_that_changed_between_run_and_resume_are_refused(copied, tmp_path):
    workspace, recipe = copied
    data = builders.write_parquet(tmp_path / "other.parquet", builders.rows(45, seed=9))
    changed = builders.launch(workspace, "run", recipe, f"--data.train_file={data}")
    assert changed.returncode == 5
    assert f"train.parquet -> {data}; " in changed.stderr
    assert "valid.parquet -> none" in changed.stderr
    assert "the content of" not in changed.stderr


def test_rows_that_another_version_tokenised_are_refused_with_that_reason(copied):
    workspace, recipe = copied
    (file,) = (workspace / "runs/tiny").glob("*/tokens.json")
    used = base_files.read(file, dict)
    used["made_of"]["version"] -= 1
    base_files.write_json(file, {**used, "folder": f"{used['folder']}0"})
    changed = builders.launch(workspace, "run", recipe, "--dry-run")
    assert changed.returncode == 5
    assert "tokenised by another version of this program" in changed.stderr
    assert "--resume.allow=[data]" in changed.stderr


@pytest.mark.shows("F54", "a checkpoint that says it was written by other versions")
def test_other_libraries_are_said_and_refused_where_they_read_the_files(copied):
    workspace, recipe = copied
    newest = sorted((workspace / "runs/tiny").glob("*/checkpoints/checkpoint-*"))[-1]
    for package, old, code in (("accelerate", "1.0.0", 0), ("torch", "2.1.0", 5)):
        described = manifest.read(newest)
        described["versions"][package] = old
        described["seal"] = manifest.seal(described)
        base_files.write_json(newest / manifest.FILE, described)
        done = builders.launch(workspace, "run", recipe, "--dry-run")
        assert done.returncode == code, done.stderr
        assert f"{package} {old} -> " in done.stdout + done.stderr
    assert (
        builders.launch(workspace, "run", recipe, "--dry-run", "--resume.allow=versions").returncode
        == 0
    )


@pytest.mark.shows("F19", "a file of every checkpoint removed; named", code=5)
def test_a_run_without_one_good_checkpoint_is_refused_and_never_started_over(copied):
    workspace, recipe = copied
    for checkpoint in (workspace / "runs/tiny").glob("*/checkpoints/checkpoint-*"):
        (checkpoint / "scheduler.pt").unlink()
    done = builders.launch(workspace, "run", recipe)
    assert done.returncode == 5
    assert "scheduler.pt is missing" in done.stderr
    assert "never starts over" in done.stderr


@pytest.mark.shows(
    "F17",
    "F18",
    "F19",
    "each file of a real checkpoint cut, one bit flipped, removed; the file is named",
)
def test_any_damage_to_any_file_of_a_real_checkpoint_is_found(copied):
    workspace, _ = copied
    folder = sorted((workspace / "runs/tiny").glob("*/checkpoints/checkpoint-*"))[-1]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        for damaged in (content[: len(content) // 2], bytes(flipped), None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
                path.chmod(0o600)
            fault = manifest.fault(folder)
            assert fault is not None, path
            assert str(path.relative_to(folder)) in fault
            path.write_bytes(content)
    assert manifest.fault(folder) is None


def test_a_longer_run_continues_a_finished_one_where_schedule_is_allowed(tmp_path):
    """Each step has the learning rate of the longer schedule, from the first that is added."""
    recipe = str(builders.recipe(tmp_path, count=16, training={"warmup_steps": 0}))
    workspace = tmp_path / "workspace"
    assert builders.launch(workspace, "run", recipe).returncode == 0
    longer = ("--training.num_train_epochs=4", "--resume.allow=[schedule]")
    again = builders.launch(workspace, "run", recipe, *longer)
    assert again.returncode == 0, again.stderr
    assert "num_train_epochs 2.0 -> 4.0): 32 samples are done" in again.stdout
    (added,) = (run for run in workspace.glob("runs/tiny/2*") if (run / "continues.json").exists())
    assert [(event["step"], event["learning_rate"]) for event in builders.events(added)] == [
        (step, pytest.approx(1e-3 * (9 - step) / 8)) for step in (5, 6, 7, 8)
    ]


@pytest.mark.parametrize(
    "mode", ["cpu", "deepspeed_zero2", pytest.param("deepspeed_zero3", marks=pytest.mark.campaign)]
)
def test_a_run_that_was_killed_after_its_last_step_trains_no_further_one(tmp_path, mode):
    """max_steps ends inside an epoch, where Trainer looks for the end only after a step."""
    recipe = str(builders.recipe(tmp_path, training={"max_steps": 8, "save_steps": 4}))
    words = ("run", recipe, f"--launch.mode={mode}")
    first = builders.launch(tmp_path / "workspace", *words)
    assert first.returncode == 0, first.stdout + first.stderr
    run = builders.only_run(tmp_path / "workspace")
    (tmp_path / "model").rename(tmp_path / "first_model")
    for name in ("outcome.json", "supervisor.json"):  # as a kill -9 before the export leaves it
        (run / "attempts/01" / name).unlink()
    again = builders.launch(tmp_path / "workspace", *words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "all 8 steps had been trained" in again.stdout
    losses = [re.findall(r"^  loss +(.+)", done.stdout, re.MULTILINE) for done in (first, again)]
    assert losses[0] == losses[1] and "on the last step" in losses[0][0], losses
    assert [event["step"] for event in builders.events(run)] == list(range(1, 9))
    weights = builders.weights(tmp_path / "model")
    for name, weight in builders.weights(tmp_path / "first_model").items():
        assert torch.equal(weight, weights[name]), name
