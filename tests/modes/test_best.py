"""training.load_best_model_at_end: the model is that of the lowest held-out loss, also in a run
that was killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import builders
from tests.train_cpu.test_resume import kill_after

TRAINING = {
    "num_train_epochs": 10,
    "learning_rate": 0.03,  # learns the few rows by heart, so that the held-out loss rises again
    "eval_steps": 2,
    "save_steps": 5,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}


def held_out(run: Path) -> dict[int, float]:
    """Step -> held-out loss, as the attempts' logs have it."""
    text = "".join(path.read_text() for path in sorted(run.glob("attempts/*/train.log")))
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d+)/\d+  held-out loss ([\d.]+)", text)
    }


@pytest.mark.parametrize(
    ("lora", "ranks"),
    [(None, 2), pytest.param({"r": 16, "lora_alpha": 256}, 1, marks=pytest.mark.campaign)],
)
def test_the_exported_weights_are_those_of_the_lowest_held_out_loss(tmp_path, lora, ranks):
    recipe = str(
        builders.recipe(tmp_path, count=16, training=TRAINING, **({"lora": lora} if lora else {}))
    )
    # learns nothing by heart so soon: what is held out has words that training makes ever less
    # likely
    if lora:
        odd = [{"prompt": f"{i}: red", "response": "ζψ" * (i + 1)} for i in range(8)]
        builders.write_parquet(tmp_path / "valid.parquet", odd)
    cut = [
        f"--launch.num_processes={ranks}",
        f"--training.per_device_train_batch_size={8 // ranks}",
    ]
    done = builders.launch(tmp_path / "workspace", "run", recipe, *cut)
    assert done.returncode == 0, done.stderr + done.stdout
    run = builders.only_run(tmp_path / "workspace")
    losses = held_out(run)
    step = min(losses, key=losses.__getitem__)
    assert 2 <= step < max(losses)  # else this test would not tell the best from the last
    folder = run / "checkpoints" / f"checkpoint-{step:06d}"
    assert folder.is_dir()
    assert f"(step {step}: lowest held-out loss)" in done.stdout
    assert f"weights of step {step}" in (tmp_path / "model/README.md").read_text()
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    exported = load_file(tmp_path / "model" / ("adapter" if lora else "") / name)
    best = load_file(folder / name)
    last = load_file(max((run / "checkpoints").glob("checkpoint-0*")) / name)
    assert exported.keys() == best.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in best.items())
    assert not all(torch.equal(tensor, exported[key]) for key, tensor in last.items())


@pytest.mark.campaign
def test_a_run_that_was_killed_after_its_best_step_still_knows_it(tmp_path):
    recipe = str(builders.recipe(tmp_path, count=16, training=TRAINING))
    whole = builders.launch(tmp_path / "whole", "run", recipe)
    losses = held_out(builders.only_run(tmp_path / "whole"))
    step = min(losses, key=losses.__getitem__)
    assert whole.returncode == 0
    expected = builders.weights(tmp_path / "model")
    words = ["run", recipe, f"--output_dir={tmp_path / 'again'}"]
    kill_after(tmp_path / "workspace", words, step=step + 6)
    done = builders.launch(tmp_path / "workspace", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "resuming from checkpoint-0000" in done.stdout
    found = builders.weights(tmp_path / "again")
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
    (outcome,) = (
        json.loads(path.read_text()) for path in (tmp_path / "workspace/runs").rglob("outcome.json")
    )
    assert outcome["exported_step"] == step


def test_engines_whose_checkpoints_hold_parts_are_refused_with_the_reason(tmp_path):
    recipe = str(builders.recipe(tmp_path, training={"load_best_model_at_end": True}))
    done = builders.launch(tmp_path / "workspace", "plan", recipe, "--launch.mode=deepspeed_zero2")
    assert done.returncode == 2
    assert "no whole weights in its checkpoints" in done.stderr
    without = builders.launch(tmp_path / "workspace", "plan", recipe, "--data.validation_file=null")
    assert without.returncode == 2
    assert "needs data.validation_file" in without.stderr
