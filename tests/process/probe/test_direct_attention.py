"""Ranks that others have started get the variables that the plan speaks of."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launch.probe import gpus
from tests import builders, cards

CARD = {
    "card0": {
        "VRAM Total Memory (B)": str(16 << 30),
        "VRAM Total Used Memory (B)": "0",
        "Card Series": "AMD Radeon RX 9060 XT",
        "GFX Version": "gfx1200",
    }
}
CODE = """
import os, sys
from launch.commands import attach
from launch.recipe.guides import chatlm_flags
attach.from_request(chatlm_flags.translate(sys.argv[1:]))
print("variable", os.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"))
"""


@pytest.fixture(autouse=True)
def _no_other_card():
    if gpus.find(os.environ).gpus:
        pytest.skip("a GPU is here and goes first")


def start(tmp_path, *flags: str, **extra: str) -> str:
    (tmp_path / "gpu.json").write_text(json.dumps(CARD))
    program = tmp_path / "rocm-smi"
    program.write_text(f"#!/bin/sh\ncat '{tmp_path / 'gpu.json'}'\n")
    program.chmod(0o755)
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(24))
    environment = builders.environment(tmp_path / "workspace", **extra)
    site = cards.torch(
        tmp_path / "site", "2.13.0+rocm7.2", hip="7.2", architectures="gfx1100 gfx1200 gfx1201"
    )
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{environment['PYTHONPATH']}"
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    model = ["--use_fast_config=True", "--model.shape=llama-tiny", "--training.bf16=false"]
    data = [f"--train_file={train}", "--data.validation_file=null"]
    argv = [sys.executable, "-c", CODE, *model, *data, *flags]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_experimental_attention_is_allowed_in_ranks_that_others_started(tmp_path):
    said = start(tmp_path, "--dry-run")  # prints the full plan
    assert "PyTorch calls its fused kernels for gfx1200 experimental" in said
    assert said.endswith("variable 1\n")


def test_the_variable_of_the_user_is_kept(tmp_path):
    assert start(tmp_path, TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL="0").endswith("variable 0\n")


def test_on_the_cpu_nothing_is_set_or_said(tmp_path):
    said = start(tmp_path, "--cpu")
    assert "experimental" not in said
    assert said.endswith("variable None\n")
