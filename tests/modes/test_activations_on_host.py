"""DDP of two ranks whose checkpointed layers keep their inputs on the host: the losses and the
model of plain checkpointing, also where the run was killed and goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests import builders
from tests.train_cpu.test_resume import kill_after
from tests.train_cpu.test_ways_to_fit import losses, weights

LAYERS, RANKS, STEPS = 2, 2, 18
TRAINING = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 3,
    "save_steps": 3,
    "activation_checkpointing": True,
}


@pytest.mark.parametrize("sections", [{}, {"lora": {"r": 4}}], ids=["all weights", "LoRA"])
def test_two_ranks_train_as_with_activations_on_the_device_across_a_resume(tmp_path, sections):
    recipe = str(builders.recipe(tmp_path, training=TRAINING, **sections))
    words = [recipe, f"--launch.num_processes={RANKS}"]
    plain, on_host = tmp_path / "plain", tmp_path / "on_host"
    mode = ("--launch.mode=multi_cpu", f"--output_dir={plain / 'model'}")
    done = builders.launch(plain, "run", *words, *mode)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = tmp_path / "counts"
    counts.mkdir()
    extra = {"OFFLOADING_COUNTS": str(counts)}
    one = ("-m", "tests.modes.launch_one", "ddp_on_host")
    kill_after(on_host, words, step=7, program=one, **extra)
    again = subprocess.run(
        [sys.executable, *one, *words],
        env=builders.environment(on_host, **extra),
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from checkpoint-00000" in again.stdout
    assert losses(on_host) == losses(plain)
    assert len(losses(plain)) == STEPS
    for rank in range(RANKS):
        sent, received = (
            (counts / f"{name}-{rank}").read_text().split() for name in ("sent", "received")
        )
        assert set(sent) == {str(RANKS)}
        assert len(sent) > STEPS * LAYERS  # those after the last checkpoint twice
        assert len(received) >= STEPS * LAYERS
    expected, found = weights(plain / "model"), weights(tmp_path / "model")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
