"""A run that was cut short goes on in another mode of its family with the same losses, and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import builders

STEPS, SAVED = 8, 4


def start(folder: Path, mode: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The recipe at an effective batch of 6 in this mode, to its end."""
    argv = [sys.executable, "-m", "tests.modes.launch_one", mode, str(folder / "tiny.yaml")]
    argv += [f"--launch.num_processes={ranks}", f"--training.per_device_train_batch_size={6 // ranks}", *words]
    env = builders.environment(folder / "h", OMP_NUM_THREADS="1")
    return subprocess.run(argv, env=env, cwd=builders.CODE, capture_output=True, text=True, timeout=120)


def cut_short(folder: Path, mode: str, ranks: int) -> list[float]:
    """Train, then take the last checkpoint and the outcome away, as a kill would; the losses after the one before."""
    builders.recipe(folder, training={"max_steps": STEPS, "save_steps": SAVED})
    done = start(folder, mode, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    run = builders.only_run(folder / "h")
    losses = [event["loss"] for event in builders.events(run)][SAVED:]
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS:06d}")
    (run / "attempts/01/outcome.json").unlink()
    shutil.rmtree(folder / "model")
    return losses


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("multi_cpu", 2), ("cpu", 1)),
        (("deepspeed_zero1", 2), ("deepspeed_zero2", 2)),
        (("deepspeed_zero2", 2), ("deepspeed_zero2_offload", 2)),
        (("deepspeed_zero3", 2), ("deepspeed_zero3_offload", 2)),
        (("fsdp2", 2), ("fsdp2", 3)),
    ],
)
def test_it_goes_on_in_another_mode_of_its_family(tmp_path, before, after):
    expected = cut_short(tmp_path, *before)
    done = start(tmp_path, *after)
    assert done.returncode == 0, done.stdout + done.stderr
    run = builders.only_run(tmp_path / "h")
    found = [event["loss"] for event in builders.events(run)][STEPS:]
    assert len(found) == STEPS - SAVED
    assert found == pytest.approx(expected, rel=1e-5)


def test_another_effective_batch_goes_on_at_the_same_sample_under_zero(tmp_path):
    cut_short(tmp_path, "deepspeed_zero2", 2)
    done = start(tmp_path, "deepspeed_zero2", 2, "--training.per_device_train_batch_size=6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 samples are done" in done.stdout
    newest = max((tmp_path / "h/runs/tiny").glob("*/plan.json")).parent
    assert builders.events(newest)[0]["samples_seen"] == 24 + 12


def test_a_checkpoint_that_would_be_misread_is_refused_with_the_mode_to_use(tmp_path):
    cut_short(tmp_path, "deepspeed_zero2", 2)
    for after in (("multi_cpu", 2), ("deepspeed_zero2", 1), ("deepspeed_zero3", 2)):
        done = start(tmp_path, *after)
        assert done.returncode == 5, after
        assert "continue with --launch.mode=deepspeed_zero2 --launch.num_processes=2" in done.stderr
