"""A killed run continues from its last whole checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests import builders


def kill_after(house: Path, words: list[str], step: int) -> None:
    """Start a run and kill -9 every process of it once it has logged `step`."""
    child = subprocess.Popen(
        [sys.executable, "-m", "launch", *words],
        env=builders.environment(house),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while True:
        assert child.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run never reached the step"
        runs = list((house / "runs" / "tiny").glob("*/attempts/01/events.jsonl"))
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


@pytest.mark.parametrize(("ranks", "is_damaged"), [(1, True), (2, False)])
def test_kill_minus_nine_and_the_same_line_again_give_the_uninterrupted_weights(tmp_path, ranks, is_damaged):
    """With one rank the newest checkpoint is damaged as well: the one before it serves as well as any."""
    recipe = builders.recipe(
        tmp_path, training={"num_train_epochs": 8, "per_device_train_batch_size": 8 // ranks, "save_steps": 5}
    )
    words = ["run", str(recipe), f"--launch.num_processes={ranks}"]
    whole = builders.launch(tmp_path / "whole", *words, f"--output_dir={tmp_path / 'whole_model'}")
    assert whole.returncode == 0, whole.stderr
    kill_after(tmp_path / "killed", words, step=13)
    newest = sorted(builders.only_run(tmp_path / "killed").glob("checkpoints/checkpoint-*"))[-1]
    if is_damaged:
        content = bytearray((newest / "model.safetensors").read_bytes())
        content[-7] ^= 1
        (newest / "model.safetensors").write_bytes(content)
    again = builders.launch(tmp_path / "killed", *words)
    assert again.returncode == 0, again.stderr + again.stdout
    assert (f"{newest.name}/model.safetensors was changed after it was written" in again.stdout) == is_damaged
    assert (f"resuming from {newest.name}" in again.stdout) != is_damaged
    assert "resuming from checkpoint-0000" in again.stdout
    expected, found = builders.weights(tmp_path / "whole_model"), builders.weights(tmp_path / "model")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    last = {event["step"]: event for event in builders.events(builders.only_run(tmp_path / "killed"))}
    for event in builders.events(builders.only_run(tmp_path / "whole")):
        assert last[event["step"]]["loss"] == event["loss"]
        assert last[event["step"]]["samples_seen"] == event["samples_seen"]


def test_a_complete_run_says_so_and_resume_never_starts_over_with_another_learning_rate(tmp_path):
    recipe = str(builders.recipe(tmp_path, training={"max_steps": 3, "warmup_steps": 0}))
    assert builders.launch(tmp_path / "house", "run", recipe).returncode == 0
    first = {name: tensor.clone() for name, tensor in builders.weights(tmp_path / "model").items()}
    second = builders.launch(tmp_path / "house", "run", recipe)
    assert second.returncode == 0
    assert "is complete; --resume never starts over" in second.stdout
    assert len(list((tmp_path / "house/runs/tiny").glob("*/plan.json"))) == 1
    third = builders.launch(tmp_path / "house", "run", recipe, "--resume", "never", "--training.learning_rate=2e-3")
    assert third.returncode == 0
    assert "starting a new run" in third.stdout
    assert len(list((tmp_path / "house/runs/tiny").glob("*/attempts/01/outcome.json"))) == 2
    assert any(not torch.equal(first[name], tensor) for name, tensor in builders.weights(tmp_path / "model").items())


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, str]:
    """(house, recipe) of a run killed at step 13 or a little later; tests work on copies of the house."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = str(builders.recipe(folder, training={"num_train_epochs": 8, "save_steps": 5}))
    kill_after(folder / "house", ["run", recipe], step=13)
    return folder / "house", recipe


@pytest.fixture
def copied(killed, tmp_path) -> tuple[Path, str]:
    house, recipe = killed
    return shutil.copytree(house, tmp_path / "house"), recipe


def test_another_batch_continues_at_the_same_sample(copied):
    """The guides promise it: stop, change the batch, start again; no sample is skipped or repeated."""
    house, recipe = copied
    again = builders.launch(house, "run", recipe, "12")
    assert again.returncode == 0, again.stderr
    assert "effective batch 8 -> 12" in again.stdout
    taken, continued = sorted((house / "runs/tiny").glob("*/plan.json"))
    checkpoint = sorted((taken.parent / "checkpoints").glob("checkpoint-*"))[-1]
    epoch, in_epoch = divmod(int(checkpoint.name.split("-")[1]), 6)  # 45 rows in batches of 8
    seen = epoch * 45 + min(in_epoch * 8, 45)
    steps = builders.events(continued.parent)
    assert steps[0]["samples_seen"] == min(seen + 12, (epoch + 1) * 45)
    assert sum(event["samples"] for event in steps) == 8 * 45 - seen
    assert steps[-1]["samples_seen"] == 8 * 45


def test_a_run_whose_learning_rate_changed_is_refused_with_the_difference(copied):
    house, recipe = copied
    changed = builders.launch(house, "run", recipe, "--training.learning_rate=2e-3")
    assert changed.returncode == 5
    assert changed.stderr.count("\n") == 1
    assert "training.learning_rate 0.001 -> 0.002" in changed.stderr
