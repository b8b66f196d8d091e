"""Plans on fewer cards than there are, if the recipe leaves their number open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import builders
from tests.process import forked_starts

RAM_GIB = "2.9"  # less than two ranks import, more than one does


def plan(folder: Path, *words: str):
    recipe = builders.recipe(folder / "recipe", training={"gradient_accumulation_steps": 2})
    machine = ("--gpu", "RTX 3090", "--gpus", "2", "--ram", RAM_GIB)
    return forked_starts.launch(folder, "plan", str(recipe), *machine, "--rows-of=64", *words)


def test_host_ram_for_one_rank_leaves_a_card_idle_at_the_same_effective_batch(tmp_path):
    lines = plan(tmp_path, "--explain").stdout.splitlines()
    assert "  batch      8 per device x 4 accumulation x 1 process = 32 effective" in lines
    assert any(line.startswith("  mode       single_gpu, ") for line in lines)
    (idle,) = (line.strip() for line in lines if "idle" in line)
    assert idle.startswith("GPU 1 stays idle: more processes do not fit: dual_gpu_nccl x2, batch 8")
    assert "in host RAM in " in idle
    assert any("1 process instead of 2: the effective batch stays 32" in line for line in lines)


@pytest.mark.modes
def test_a_number_or_a_mode_that_the_user_names_is_kept_or_refused(tmp_path):
    for flag in ("--launch.num_processes=2", "--launch.mode=dual_gpu_nccl"):
        done = plan(tmp_path, flag)
        assert done.returncode == 3
        assert "Nothing fits. Nearest:\n  dual_gpu_nccl x2" in done.stderr
    asked = plan(tmp_path, "--launch.num_processes=1", "--explain").stdout
    assert "idle" not in asked
