"""Runs that decide a night: one that was killed goes on, and one that is out of memory is planned
again; both end with what the run that nothing has stopped ends with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import builders, stopping
from tests.faults.test_out_of_memory import CUDA, batches, losses, step_fault
from tests.train_cpu.test_resume import kill_after, watched


class Finished(NamedTuple):
    """A run that nothing stops."""

    ranks: int
    folder: Path
    recipe: str


def training(ranks: int) -> dict[str, int]:
    return {"num_train_epochs": 8, "per_device_train_batch_size": 8 // ranks, "save_steps": 5}


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory) -> Finished:
    ranks = request.param
    folder = tmp_path_factory.mktemp("whole")
    recipe = str(builders.recipe(folder, training=training(ranks)))
    done = builders.launch(folder / "h", "run", recipe, f"--launch.num_processes={ranks}")
    assert done.returncode == 0, done.stderr
    return Finished(ranks, folder, recipe)


@pytest.mark.shows(
    "F1", "F18", "kill -9 of the whole tree, and one bit of the newest checkpoint flipped"
)
@pytest.mark.parametrize(
    ("finished", "is_damaged"),
    [(1, True), pytest.param(2, False, marks=pytest.mark.faults)],
    indirect=["finished"],
)
def test_kill_minus_nine_and_the_same_line_again_give_the_uninterrupted_weights(
    finished, is_damaged, tmp_path
):
    """With one rank the newest checkpoint is damaged as well: the one before it serves as well as
    any."""
    words = ["run", finished.recipe, f"--launch.num_processes={finished.ranks}"]
    words.append(f"--output_dir={tmp_path / 'model'}")
    shutil.copytree(finished.folder / "h/.cache", tmp_path / "killed/.cache")  # tokenised rows
    kill_after(tmp_path / "killed", words, step=13)
    assert watched(tmp_path / "killed")["state"] == "lost"
    run = builders.only_run(tmp_path / "killed")
    newest = sorted(run.glob("checkpoints/checkpoint-*"))[-1]
    if is_damaged:
        content = bytearray((newest / "model.safetensors").read_bytes())
        content[-7] ^= 1
        (newest / "model.safetensors").write_bytes(content)
    again = builders.launch(tmp_path / "killed", *words)
    assert again.returncode == 0, again.stderr + again.stdout
    assert watched(tmp_path / "killed").items() >= {"state": "complete", "step": 48}.items()
    assert (
        f"{newest.name}/model.safetensors was changed after it was written" in again.stdout
    ) == is_damaged
    assert (f"resuming from {newest.name}" in again.stdout) != is_damaged
    assert "resuming from checkpoint-0000" in again.stdout
    expected, found = (
        builders.weights(finished.folder / "model"),
        builders.weights(tmp_path / "model"),
    )
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    shown = builders.launch(tmp_path / "killed", "samples", str(run))
    assert shown.stdout.splitlines() == [
        f"epoch {epoch}: all of 45 rows, each once" for epoch in range(1, 9)
    ]
    last = {event["step"]: event for event in builders.events(run)}
    for event in builders.events(builders.only_run(finished.folder / "h")):
        assert last[event["step"]]["loss"] == event["loss"]
        assert last[event["step"]]["samples_seen"] == event["samples_seen"]


@pytest.mark.parametrize("finished", [1], indirect=True)
def test_out_of_memory_is_planned_again_in_smaller_pieces_with_the_same_losses(finished, tmp_path):
    """As long as a micro-batch has more than four samples, after the first checkpoint."""
    fault = step_fault(
        "args[2]['labels'].shape[0] > 4 and args[0].state.global_step >= 6", CUDA, rank=None
    )
    launched = {"ranks": 1, "faults": {"oom": fault}, "training": training(1)}
    with stopping.launched(tmp_path, **launched) as child:
        assert child.wait(within_s=200) == 0, child.said()
        found = batches(child.run)
        assert found[0][:2] == (8, 1)
        assert found[-1][0] <= 4, "no smaller pieces"
        assert all(micro * accumulation == 8 for micro, accumulation, _ in found)
        assert stopping.fired(tmp_path, "oom") == len(found) - 1
        assert "planned again, from step 5" in child.said()
        assert "the effective batch stays 8" in child.said()
        uninterrupted = losses(builders.only_run(finished.folder / "h"))
        assert losses(child.run.root) == pytest.approx(uninterrupted, rel=1e-4)
        assert child.left() == []
