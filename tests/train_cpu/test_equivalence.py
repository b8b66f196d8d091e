"""However the effective batch is cut, each optimizer step is the same step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import builders

HERE = Path(__file__).parent
CUTS = {"8x1": (8, 1, 1), "4x2": (4, 2, 1), "1x8": (1, 8, 1), "2 ranks 1x4": (1, 4, 2)}


def train(folder: Path, shape: str, cut: tuple[int, int, int], lora: bool) -> dict[str, torch.Tensor]:
    """45 rows of unequal lengths at effective batch 8: the last step of an epoch has 5."""
    micro, accumulation, ranks = cut
    sections = {"lora": {"r": 4}} if lora else {}
    training = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation, "max_steps": 8}
    recipe = builders.recipe(folder, shape, training={**training, "max_grad_norm": 0.0}, **sections)
    config = [f"--launch.num_processes={ranks}"] + (["--launch.mode=multi_cpu"] if ranks > 1 else [])
    dry = builders.launch(folder / "house", "run", str(recipe), "--dry-run", *config)
    assert dry.returncode == 0, dry.stderr
    run = builders.only_run(folder / "house")
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if ranks > 1 else []
    argv = [sys.executable, *starter, str(HERE / "dump_gradients.py"), str(run), str(folder / "steps.pt")]
    done = subprocess.run(
        argv,
        env=builders.environment(folder / "house", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    steps = torch.load(folder / "steps.pt")
    steps["losses"] = torch.tensor([event["loss"] for event in builders.events(run)], dtype=torch.float64)
    steps["samples_seen"] = [event["samples_seen"] for event in builders.events(run)]
    return steps


@pytest.mark.parametrize(
    ("shape", "lora", "cuts"),
    [
        ("llama-tiny", False, ["8x1", "4x2", "1x8", "2 ranks 1x4"]),
        ("t5-tiny", False, ["8x1", "1x8", "2 ranks 1x4"]),
    ],
)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(tmp_path, shape, lora, cuts):
    runs = {name: train(tmp_path / str(i), shape, CUTS[name], lora) for i, name in enumerate(cuts)}
    reference = runs["8x1"]
    assert reference["gradients"].shape[0] == 8
    assert reference["samples_seen"] == [8, 16, 24, 32, 40, 45, 53, 61]
    for name, steps in runs.items():
        assert steps["samples_seen"] == reference["samples_seen"]
        torch.testing.assert_close(steps["losses"], reference["losses"], rtol=1e-5, atol=0, msg=lambda m, n=name: n + m)
        # the first gradient comes from equal weights; later ones also carry how rounding moved them
        first = (steps["gradients"][0] - reference["gradients"][0]).norm() / reference["gradients"][0].norm()
        assert first < 1e-5, name
        error = (steps["gradients"] - reference["gradients"]).norm(dim=1) / reference["gradients"].norm(dim=1)
        assert error.max() < 1e-4, name
        assert steps["reduces"] == (8 if "ranks" in name else 0), name
