"""A run that was cut short goes on in any other mode or number of ranks, with the same losses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import builders

STEPS, SAVED = 8, 4


def start(folder: Path, mode: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The recipe at an effective batch of 6 in this mode, to its end."""
    argv = [sys.executable, "-m", "tests.modes.launch_one", mode, str(folder / "tiny.yaml")]
    argv += [
        f"--launch.num_processes={ranks}",
        f"--training.per_device_train_batch_size={6 // ranks}",
        *words,
    ]
    env = builders.environment(folder / "h", OMP_NUM_THREADS="1")
    return subprocess.run(
        argv, env=env, cwd=builders.CODE, capture_output=True, text=True, timeout=120
    )


def cut_short(folder: Path, mode: str, ranks: int, **sections: Any) -> list[float]:
    """Train, then take the last checkpoint and the outcome away, as a kill would; the losses after
    the one before."""
    builders.recipe(folder, training={"max_steps": STEPS, "save_steps": SAVED}, **sections)
    done = start(folder, mode, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    run = builders.only_run(folder / "h")
    losses = [event["loss"] for event in builders.events(run)][SAVED:]
    take_the_end_away(folder)
    return losses


def take_the_end_away(folder: Path) -> None:
    """Remove what a kill behind the first checkpoint would not have left."""
    run = builders.only_run(folder / "h")
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS:06d}")
    (run / "attempts/01/outcome.json").unlink()
    shutil.rmtree(folder / "model")


def goes_on(folder: Path, after: tuple[Any, ...], expected: list[float]) -> str:
    """Continue it so; the losses are those expected, and each row was trained once an epoch. What
    it said."""
    done = start(folder, *after)
    assert done.returncode == 0, done.stdout + done.stderr
    run = builders.only_run(folder / "h")
    found = [event["loss"] for event in builders.events(run)][STEPS:]
    assert len(found) == STEPS - SAVED
    assert found == pytest.approx(expected, rel=1e-5)
    seen = builders.launch(folder / "h", "samples", str(run))
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.splitlines() == ["epoch 1: all of 45 rows, each once"]
    return done.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("multi_cpu", 2), ("cpu", 1)),
        pytest.param(("deepspeed_zero1", 2), ("deepspeed_zero2", 2), marks=pytest.mark.campaign),
        pytest.param(
            ("deepspeed_zero2", 2), ("deepspeed_zero2_offload", 2), marks=pytest.mark.campaign
        ),
        pytest.param(
            ("deepspeed_zero3", 2), ("deepspeed_zero3_offload", 2), marks=pytest.mark.campaign
        ),
    ],
)
def test_it_goes_on_in_another_mode_of_its_family(tmp_path, before, after):
    assert "converting" not in goes_on(tmp_path, after, cut_short(tmp_path, *before))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("deepspeed_zero2", 2), ("deepspeed_zero2", 3), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero3", 2), ("deepspeed_zero3", 3), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero2", 2), ("deepspeed_zero3", 2), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero3", 2), ("deepspeed_zero1", 1), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero2", 2), ("cpu", 1), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero3", 2), ("multi_cpu", 2), marks=pytest.mark.campaign),
        pytest.param(("cpu", 1), ("deepspeed_zero2_offload", 2), marks=pytest.mark.campaign),
        pytest.param(("multi_cpu", 2), ("deepspeed_zero3", 2), marks=pytest.mark.campaign),
        pytest.param(("fsdp2", 2), ("fsdp2", 3), marks=pytest.mark.campaign),
        pytest.param(("fsdp2", 2), ("multi_cpu", 2), marks=pytest.mark.campaign),
        pytest.param(("cpu", 1), ("fsdp2", 2), marks=pytest.mark.campaign),
        (("deepspeed_zero2", 2), ("fsdp2", 2)),
    ],
)
def test_its_optimizer_states_are_carried_to_another_engine_or_number_of_ranks(
    tmp_path, before, after
):
    said = goes_on(tmp_path, after, cut_short(tmp_path, *before))
    assert ("converting it from" in said) == (before[0] != "fsdp2" or after[0] != "fsdp2")
    assert not list(builders.only_run(tmp_path / "h").glob("checkpoints/tmp-*"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("deepspeed_zero2", 2), ("cpu", 1)),
        pytest.param(("cpu", 1), ("cpu", 1), marks=pytest.mark.campaign),
        pytest.param(("cpu", 1), ("deepspeed_zero3", 2), marks=pytest.mark.campaign),
        pytest.param(("deepspeed_zero3", 2), ("multi_cpu", 2), marks=pytest.mark.campaign),
        pytest.param(("fsdp2", 2), ("cpu", 1), marks=pytest.mark.campaign),
        pytest.param(("multi_cpu", 2), ("fsdp2", 2), marks=pytest.mark.campaign),
    ],
)
def test_states_of_adapters_and_of_copied_modules_are_carried_too(tmp_path, before, after):
    lora = {"r": 4, "modules_to_save": ["embed_tokens", "norm", "down_proj"]}
    goes_on(tmp_path, after, cut_short(tmp_path, *before, lora=lora))


@pytest.mark.campaign
def test_another_effective_batch_goes_on_at_the_same_sample_under_zero(tmp_path):
    cut_short(tmp_path, "deepspeed_zero2", 2)
    words = ("--training.per_device_train_batch_size=6", "--resume.allow=effective_batch_size")
    done = start(tmp_path, "deepspeed_zero2", 2, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 samples are done" in done.stdout
    newest = max((tmp_path / "h/runs/tiny").glob("*/plan.json")).parent
    assert builders.events(newest)[0]["samples_seen"] == 24 + 12


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["multi_cpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_it_goes_on_with_every_second_layer_checkpointed(tmp_path, mode):
    kwargs = "--training.activation_checkpointing_kwargs={every_n_layers: 2}"
    losses = cut_short(tmp_path, mode, 2)
    said = goes_on(tmp_path, (mode, 2, "--training.activation_checkpointing=true", kwargs), losses)
    assert "converting" not in said
    (plan,) = (tmp_path / "h").glob("runs/*/*/attempts/02/plan.json")
    assert json.loads(plan.read_text())["strategy"]["levers"]["every_n_layers"] == 2
    assert (tmp_path / "model/model.safetensors").exists()
