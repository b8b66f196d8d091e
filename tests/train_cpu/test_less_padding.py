"""Less padding, and still: the same steps however they are cut, resumed at the same sample, each
row once an epoch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from launch.run_folder import sample_audit
from launch.run_folder.layout import RunDir
from tests import builders, stopping

ROWS, EPOCHS, STOP = 200, 3, 10  # step at which a run is stopped
TRAINING = {
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "save_steps": 1000,
    "max_grad_norm": 0.0,
    "learning_rate": 1e-4,
}
# of what packing orders as well
RARELY = [
    pytest.param(name, marks=pytest.mark.campaign)
    for name in ("group_by_length", "batch_by_tokens")
]
pytestmark = pytest.mark.modes


@pytest.fixture(scope="module", params=["packing", *RARELY])
def stopped(request, tmp_path_factory) -> tuple[Path, str]:
    """(folder with the recipe, its model and the house of a run stopped at a step, what the data
    section says)."""
    folder = tmp_path_factory.mktemp("stopped")
    stop = stopping.at_step(str(STOP), "os.kill(os.getpid(), 15)", rank=0, times=1)
    data = {request.param: True}
    with stopping.launched(
        folder, 1, faults={"stop": stop}, data=data, training=TRAINING, count=ROWS
    ) as child:
        assert child.wait() == 75, child.said()
        assert stopping.fired(folder, "stop") == 1
        assert child.committed() == [STOP]
    return folder, request.param


def continued(stopped: tuple[Path, str], tmp_path: Path, *words: str) -> tuple[Path, str]:
    """(house, what was printed) of the stopped run, continued with these words."""
    workspace = shutil.copytree(stopped[0] / "workspace", tmp_path / "workspace")
    # into another output folder a run is continued only where it is named
    named = (f"--resume={builders.only_run(workspace)}", f"--output_dir={tmp_path / 'model'}")
    done = builders.launch(workspace, "run", str(stopped[0] / "tiny.yaml"), *named, *words)
    assert done.returncode == 0, done.stderr
    return workspace, done.stdout


def test_continued_on_two_ranks_it_gives_the_weights_of_an_uninterrupted_run(stopped, tmp_path):
    recipe = builders.recipe(
        tmp_path / "whole", data={stopped[1]: True}, training=TRAINING, count=ROWS
    )
    whole = builders.launch(tmp_path / "other", "run", str(recipe))
    assert whole.returncode == 0, whole.stderr
    words = ("--launch.num_processes=2", "--training.per_device_train_batch_size=2")
    workspace, said = continued(stopped, tmp_path, *words)
    assert f"resuming from checkpoint-{STOP:06d}" in said
    run, other = (RunDir(builders.only_run(one)) for one in (workspace, tmp_path / "other"))
    assert {step: sorted(rows) for step, rows in sample_audit.taken(run).items()} == {
        step: sorted(rows) for step, rows in sample_audit.taken(other).items()
    }
    expected, found = (
        builders.weights(tmp_path / "whole/model"),
        builders.weights(tmp_path / "model"),
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=name)


def test_continued_with_another_effective_batch_each_row_is_still_seen_once_an_epoch(
    stopped, tmp_path
):
    words = ("--training.per_device_train_batch_size=6", "--resume.allow=[effective_batch_size]")
    workspace, _ = continued(stopped, tmp_path, *words)
    newest = sorted((workspace / "runs/tiny").glob("*/plan.json"))[-1].parent
    lines = sample_audit.lines(RunDir(newest))
    assert len(lines) == EPOCHS
    ending = (
        f"each once, and so all of {ROWS} rows"
        if stopped[1] == "packing"
        else f"all of {ROWS} rows, each once"
    )
    assert all(": all of " in line and line.endswith(ending) for line in lines), lines


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("multi_cpu", marks=pytest.mark.campaign),
        "deepspeed_zero2",
        pytest.param("deepspeed_zero3", marks=pytest.mark.campaign),
    ],
)
def test_by_tokens_every_engine_takes_the_steps_of_fixed_micro_batches(mode, tmp_path):
    training = {**TRAINING, "num_train_epochs": 1, "max_grad_norm": 1.0}
    recipe = builders.recipe(tmp_path, training=training, count=ROWS)
    words = ["run", str(recipe), f"--output_dir={tmp_path / 'other'}"]
    fixed = builders.launch(tmp_path / "fixed", *words)
    assert fixed.returncode == 0, fixed.stderr
    words += [f"--launch.mode={mode}", "--launch.num_processes=2", "--data.batch_by_tokens=true"]
    words += [
        "--training.per_device_train_batch_size=1",
        "--training.gradient_accumulation_steps=4",
    ]
    found = builders.launch(tmp_path / "workspace", *words, "--explain")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "micro-steps a step on average" in found.stdout
    ours, theirs = (
        builders.events(builders.only_run(tmp_path / workspace))
        for workspace in ("workspace", "fixed")
    )
    assert len(ours) == len(theirs) == ROWS // 8
    for step, other in zip(ours, theirs, strict=True):
        assert (step["tokens"], step["samples_seen"]) == (other["tokens"], other["samples_seen"])
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert sum(step["computed_tokens"] for step in ours) < sum(
        step["computed_tokens"] for step in theirs
    )


def test_a_plan_sorts_the_rows_of_a_step_where_that_is_faster_and_trains_the_same(tmp_path):
    """Of one micro-batch a step, and no key that asks for it."""
    training = {"max_steps": 6, "per_device_train_batch_size": 16}
    recipe = builders.recipe(tmp_path, training=training, data={"max_length": 512})
    words = ["red " * 400, *["blue"] * 7]
    rows = [{"prompt": f"{number} {words[number % 8]}", "response": "x"} for number in range(96)]
    builders.write_parquet(tmp_path / "train.parquet", rows)
    found = builders.launch(tmp_path / "sorted", "run", str(recipe), "--explain")
    assert found.returncode == 0, found.stderr
    assert "data.batch_by_tokens: asked null, runs true" in found.stdout
    assert "the same rows and the same loss, with less padding" in found.stdout
    words = [f"--output_dir={tmp_path / 'other'}", "--data.batch_by_tokens=false"]
    obeyed = builders.launch(tmp_path / "as_they_come", "run", str(recipe), *words)
    assert obeyed.returncode == 0, obeyed.stderr
    ours, theirs = (
        builders.events(builders.only_run(tmp_path / name)) for name in ("sorted", "as_they_come")
    )
    assert [step["samples_seen"] for step in ours] == [step["samples_seen"] for step in theirs]
    for step, other in zip(ours, theirs, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert step["computed_tokens"] < 0.7 * other["computed_tokens"]
