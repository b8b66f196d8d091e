"""FSDP2 computes under autocast in the precision in which DDP does, and shares out weights of 4
bits: ranks that keep their rows train what full copies train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import builders
from tests.modes import test_change_of_mode as changes
from tests.modes.test_added_tokens import base_folder
from training.compat import torch_private

PROGRAM = Path(__file__).parent / "precision_of_a_step.py"
BY_ACCELERATE = {  # what accelerate launch sets for configs/accelerate/fsdp2.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


# under DDP the products are those that tests/modes/trace/test_switches.py counts
@pytest.mark.parametrize("mode", [pytest.param("multi_cpu", marks=pytest.mark.campaign), "fsdp2"])
def test_products_are_in_bf16_and_all_else_in_float32(tmp_path, mode):
    training = {
        "bf16": True,
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
    }
    recipe = builders.recipe(tmp_path, "llama-tiny", training=training, data={"max_length": 64})
    dry = builders.launch(
        tmp_path / "h", "run", str(recipe), "--dry-run", "--launch.mode=multi_cpu"
    )
    assert dry.returncode == 0, dry.stderr
    run = builders.only_run(tmp_path / "h")
    words = [str(PROGRAM), str(run), mode, str(tmp_path / "seen.pt")]
    env = builders.environment(
        tmp_path / "h", OMP_NUM_THREADS="1", **(BY_ACCELERATE if mode == "fsdp2" else {})
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, *words], env=env, cwd=builders.CODE, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr

    assert torch.load(tmp_path / "seen.pt") == {
        "layer inputs": ["torch.float32"],
        "products": ["torch.bfloat16"],
        "logits": ["torch.float32"],
        "gradients": ["('finer than bf16', 'torch.float32')"],
    }


FOUR_BIT = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}


@pytest.mark.parametrize("is_stored", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_two_ranks_train_the_adapter_of_full_copies_and_one_goes_on(tmp_path: Path, is_stored):
    sections: dict[str, object] = {**FOUR_BIT}
    if is_stored:
        sections["model"] = {"shape": None, "path": str(base_folder(tmp_path / "base", tied=False))}
    expected = train(tmp_path / "ddp", "multi_cpu", **sections)
    found = train(tmp_path / "fsdp2", "fsdp2", **sections)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)

    run = builders.only_run(tmp_path / "fsdp2/h")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    estimate = json.loads((run / "plan.json").read_text())["estimate"]
    assert "logits of a row" in outcome["export_check"]
    assert outcome["weights_bytes"] == pytest.approx(estimate["weights_bytes"], rel=1e-3)
    assert outcome["gradients_bytes"] == estimate["gradients_bytes"]
    checkpoint = run / f"checkpoints/checkpoint-{changes.SAVED:06d}"
    written = torch_private.read_sharded(checkpoint / "pytorch_model_fsdp_0")["model"]
    assert len(written) == len(expected) and all(".lora_" in name for name in written)

    losses = [event["loss"] for event in builders.events(run)][changes.SAVED :]
    changes.take_the_end_away(tmp_path / "fsdp2")
    changes.goes_on(tmp_path / "fsdp2", ("cpu", 1), losses)


def train(folder: Path, mode: str, **sections: object) -> dict[str, torch.Tensor]:
    """The adapter of a recipe that is trained in this mode."""
    folder.mkdir()
    training = {"max_steps": changes.STEPS, "save_steps": changes.SAVED}
    builders.recipe(folder, training=training, **sections)
    done = changes.start(folder, mode, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (folder / "model").rglob("adapter_model.safetensors")
    return load_file(file)
