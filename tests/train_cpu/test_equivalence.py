"""However the effective batch is cut, each optimizer step is the same step."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from launch.base.workspace import Workspace
from launch.plan.resolve import resolve
from launch.render import run_files
from launch.run_folder.layout import RunDir
from tests import builders
from training.data.batches import FILLER_LENGTH, NumberedRows
from training.data.sample_order import SampleOrder, TokenBudget

HERE = Path(__file__).parent
CUTS = {
    "8x1": (8, 1, 1),
    "4x2": (4, 2, 1),
    "1x8": (1, 8, 1),
    "1x8 by tokens": (1, 8, 1),
    "2 ranks 1x4": (1, 4, 2),
    "2 ranks 1x4 by tokens": (1, 4, 2),
}
LONGEST = 64  # tokens: data.max_length, for which these runs are planned


def rendered(folder: Path, shape: str, cut: tuple[int, int, int], by_tokens: bool) -> Path:
    """A run folder whose plan knows model states alone; 45 rows of unequal lengths at effective
    batch 8: the last step of an epoch has 5."""
    micro, accumulation, ranks = cut
    training = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 8,
    }
    data = {"max_length": LONGEST, "batch_by_tokens": by_tokens}
    recipe = builders.recipe(folder, shape, training={**training, "max_grad_norm": 0.0}, data=data)
    choice = resolve(str(recipe), [f"--launch.num_processes={ranks}"], trace=False)
    run = RunDir.create(folder / "runs", "tiny", datetime.now())
    run_files.write_run(run, choice.recipe, choice.machine, choice.plan, Workspace.here())
    return run.root


def train(folder: Path, runs: dict[str, Path], ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """What each step of each run did, all runs in one program on so many ranks."""
    starter = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    outputs = {name: folder / f"{name.replace(' ', '-')}.pt" for name in runs}
    words = [str(word) for name in runs for word in (runs[name], outputs[name])]
    done = subprocess.run(
        [sys.executable, *starter, str(HERE / "dump_gradients.py"), *words],
        env=builders.environment(folder / "workspace", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    steps = {name: torch.load(output) for name, output in outputs.items()}
    for name, run in runs.items():
        events = builders.events(run)
        steps[name]["losses"] = torch.tensor(
            [event["loss"] for event in events], dtype=torch.float64
        )
        for counted in ("samples_seen", "tokens", "computed_tokens", "data_seconds", "seconds"):
            steps[name][counted] = [event[counted] for event in events]
    return steps


def tokens_by_the_data(
    cache: Path, cut: tuple[int, int, int], by_tokens: bool, step: int, sides: slice
) -> tuple[int, int]:
    """(tokens, tokens with padding) that the ranks compute in an optimizer step; `sides`: input,
    and labels of a T5."""
    rows = NumberedRows(cache)
    lengths = rows.lengths()[:, sides]
    budget = TokenBudget(rows.lengths, cut[0] * LONGEST, cut[0] * LONGEST) if by_tokens else None
    orders = [
        SampleOrder(len(rows), *cut, rank, seed=23333, budget=budget) for rank in range(cut[2])
    ]
    real = computed = 0
    if by_tokens:
        assert not any(order.rows_of(step, [cut[1] - 1]) for order in orders), (
            "as many micro-steps as by rows"
        )
    for micro in range(cut[1]):
        taken = [order.rows_of(step, [micro]) for order in orders]
        if any(taken):
            computed += sum(
                int(lengths[of_rank].max(axis=0).sum()) * len(of_rank)
                for of_rank in taken
                if of_rank
            )
            computed += sum(FILLER_LENGTH * lengths.shape[1] for of_rank in taken if not of_rank)
            real += sum(int(lengths[of_rank].sum()) for of_rank in taken if of_rank)
    return real, computed


@pytest.mark.modes
@pytest.mark.parametrize(
    "shape", ["llama-tiny", pytest.param("t5-tiny", marks=pytest.mark.campaign)]
)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(tmp_path, shape, monkeypatch):
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path / "workspace"))
    # of the program that two ranks need for each division, a T5's labels add nothing to one of two
    names = [name for name in CUTS if shape == "llama-tiny" or name != "2 ranks 1x4"]
    folders = {
        name: rendered(tmp_path / str(i), shape, CUTS[name], name.endswith("by tokens"))
        for i, name in enumerate(names)
    }
    alone = {name: run for name, run in folders.items() if CUTS[name][2] == 1}
    runs = train(tmp_path, alone, 1)
    for name in folders.keys() - alone.keys():  # a process group is made once in a process
        runs |= train(tmp_path, {name: folders[name]}, 2)
    reference = runs["8x1"]
    assert reference["gradients"].shape[0] == 8
    assert reference["samples_seen"] == [8, 16, 24, 32, 40, 45, 53, 61]
    for name, steps in runs.items():
        assert steps["samples_seen"] == reference["samples_seen"]
        (cache,) = tmp_path.glob("workspace/.cache/tokens/*/train.arrow")
        counted = zip(steps["tokens"], steps["computed_tokens"], strict=True)
        sides = slice(0, 2) if shape.startswith("t5") else slice(0, 1)
        assert list(counted) == [
            tokens_by_the_data(cache, CUTS[name], name.endswith("by tokens"), step, sides)
            for step in range(1, 9)
        ], name
        assert all(
            0 <= wait < whole
            for wait, whole in zip(steps["data_seconds"], steps["seconds"], strict=True)
        )
        torch.testing.assert_close(
            steps["losses"], reference["losses"], rtol=1e-5, atol=0, msg=lambda m, n=name: n + m
        )
        # the first gradient comes from equal weights; later ones also carry how rounding moved them
        first = (steps["gradients"][0] - reference["gradients"][0]).norm() / reference["gradients"][
            0
        ].norm()
        assert first < 1e-5, name
        error = (steps["gradients"] - reference["gradients"]).norm(dim=1) / reference[
            "gradients"
        ].norm(dim=1)
        assert error.max() < 1e-4, name
        assert steps["reduces"] == (8 if "ranks" in name else 0), name
