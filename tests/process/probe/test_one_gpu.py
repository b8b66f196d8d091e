"""A single process that another launcher has started sees one GPU, before torch counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.probe import gpus
from tests import builders, cards

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES")
CODE = f"""
import json, os, sys
# of a build of torch for the cards; what starts the rank needs the real one
sys.path.insert(0, SITE)
from launch.commands import attach
from launch.recipe.guides import chatlm_flags
start = attach.from_request(chatlm_flags.translate(sys.argv[1:]))
seen = {{name: os.environ.get(name) for name in {VARIABLES}}}
seen |= {{"mode": start.plan.strategy.mode, "torch": "torch" in sys.modules}}
print("\\n" + json.dumps(seen))
"""
ROCM = ("2.13.0+rocm7.2", "", "7.2", "gfx1100 gfx1200 gfx1201")
CUDA = ("2.13.0+cu130", "13.0", "", cards.CU130)
LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"],
    "accelerate": ["-m", "accelerate.commands.launch", "--num_processes", "1"],
    "accelerate file": [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", str(builders.CODE / "configs" / "accelerate" / "single_gpu.yaml")),
    ],
}


@pytest.fixture(autouse=True)
def _no_other_card():
    if gpus.find(os.environ).gpus:
        pytest.skip("a GPU is here and goes first")


def start(
    tmp_path: Path, launcher: str, *flags: str, build: tuple[str, ...] = ROCM, **extra: str
) -> tuple[str, dict[str, str]]:
    """What a rank printed, and the variables that it had when torch might be imported."""
    script = tmp_path / "rank.py"
    site = cards.torch(tmp_path / "site", *build)
    script.write_text(f"SITE = {str(site)!r}\n{CODE}")
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(24))
    environment = builders.environment(tmp_path / "workspace", **extra)
    model = ["--use_fast_config=True", "--model.shape=llama-tiny", "--training.bf16=false"]
    data = [f"--train_file={train}", "--data.validation_file=null"]
    argv = [sys.executable, *LAUNCHERS[launcher], str(script), *model, *data, *flags]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.strip().splitlines()[-1])


def two_amd_cards(tmp_path: Path) -> str:
    """A PATH whose rocm-smi lists two cards; the second has more free memory."""
    listed = {
        f"card{index}": {
            "VRAM Total Memory (B)": str(16 << 30),
            "VRAM Total Used Memory (B)": str(used),
            "Card Series": "AMD Radeon RX 9060 XT",
            "GFX Version": "gfx1200",
        }
        for index, used in enumerate((3 << 30, 1 << 20))
    }
    (tmp_path / "gpus.json").write_text(json.dumps(listed))
    program = tmp_path / "rocm-smi"
    program.write_text(f"#!/bin/sh\ncat '{tmp_path / 'gpus.json'}'\n")
    program.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_process_is_shown_the_gpu_with_most_free_memory_only(tmp_path, launcher):
    said, seen = start(tmp_path, launcher, PATH=two_amd_cards(tmp_path))
    assert (seen["HIP_VISIBLE_DEVICES"], seen["mode"], seen["torch"]) == ("1", "single_gpu", False)
    assert "one process uses one of 2 GPUs: 1, which has the most free memory" in said


def test_gpus_that_the_user_hides_stay_hidden(tmp_path):
    _, seen = start(tmp_path, "python", PATH=two_amd_cards(tmp_path), HIP_VISIBLE_DEVICES="0")
    assert seen["HIP_VISIBLE_DEVICES"] == "0"


def test_on_the_cpu_no_gpu_is_hidden(tmp_path):
    said, seen = start(tmp_path, "python", "--cpu", PATH=two_amd_cards(tmp_path))
    assert (seen["HIP_VISIBLE_DEVICES"], seen["mode"]) == (None, "cpu")
    assert "one process uses" not in said


def test_nvidia_cards_are_hidden_by_what_nvml_calls_the_one_that_is_used(tmp_path):
    driver = str(cards.nvml(tmp_path))
    _, seen = start(
        tmp_path, "python", build=CUDA, LD_LIBRARY_PATH=driver, CUDA_VISIBLE_DEVICES="GPU-22,GPU-00"
    )
    shown = seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]
    assert shown == ("GPU-2222", "PCI_BUS_ID")  # a card that may not be opened shifts numbers
