"""On a real card: the plan's device and precision are what runs, and what was predicted is what is
measured."""

from __future__ import annotations

import json

import pytest
import torch

from tests import builders

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.mark.parametrize(
    ("shape", "precision"), [("llama-tiny", "bf16"), ("t5-tiny", "bf16"), ("llama-tiny", "no")]
)
def test_one_card_trains_and_its_memory_is_in_the_report(tmp_path, shape, precision):
    training = {"max_steps": 12, "bf16": precision == "bf16", "learning_rate": 3e-3}
    recipe = builders.recipe(tmp_path, shape, training=training, launch={"num_processes": 1})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rank 0 of 1 on" in done.stdout
    assert "cuda:0, no process group" in done.stdout
    run = builders.only_run(tmp_path / "workspace")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    plan = json.loads((run / "plan.json").read_text())
    assert plan["strategy"]["mixed_precision"] == precision
    for name in ("weights_bytes", "gradients_bytes"):
        assert outcome[name] == plan["estimate"][name]
    assert outcome["vram_allocated_bytes"] > plan["estimate"]["weights_bytes"]
    steps = builders.events(run)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["vram_total_bytes"] > 0


def test_lora_on_4_bit_weights_of_a_folder_holds_what_was_predicted(tmp_path):
    first = builders.recipe(
        tmp_path / "first", training={"max_steps": 2}, launch={"num_processes": 1}
    )
    assert builders.launch(tmp_path / "workspace", "run", str(first)).returncode == 0
    training = {"max_steps": 12, "bf16": True, "learning_rate": 3e-3, "eval_steps": 4}
    sections = {
        "lora": {"r": 4},
        "quantization": {"load_in_4bit": True},
        "launch": {"num_processes": 1},
    }
    recipe = builders.recipe(tmp_path, training=training, **sections)
    path = f"--model.path={tmp_path / 'first/model'}"
    done = builders.launch(
        tmp_path / "quantised", "run", str(recipe), path, "--model.dtype=bfloat16"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    run = builders.only_run(tmp_path / "quantised")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    estimate = json.loads((run / "plan.json").read_text())["estimate"]
    for name in ("weights_bytes", "gradients_bytes"):
        assert outcome[name] == estimate[name]
    steps = builders.events(run)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_card_gives_the_losses_of_the_cpu(tmp_path):
    losses = {}
    for device in ("cpu", "single_gpu"):
        folder = tmp_path / device
        recipe = builders.recipe(
            folder, training={"max_steps": 8}, launch={"mode": device, "num_processes": 1}
        )
        done = builders.launch(folder / "workspace", "run", str(recipe))
        assert done.returncode == 0, done.stderr + done.stdout
        losses[device] = [
            event["loss"] for event in builders.events(builders.only_run(folder / "workspace"))
        ]
    assert losses["single_gpu"] == pytest.approx(losses["cpu"], rel=1e-3)
