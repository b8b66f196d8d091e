"""FSDP2 computes under autocast in the precision in which DDP does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import builders

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
