"""Answers of an evaluation are computed in the precision of training, also an adapter's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests import builders

PROGRAM = """
import sys
from pathlib import Path
from launch.base.workspace import Workspace
from launch.run_folder.layout import RankStart, RunDir
from train_low_mem import leave
from training import run as training_run

seen = set()

def watch(trainer):
    for name, module in trainer.model.named_modules():
        if name.endswith("q_proj"):  # what attention gets; flash_attn refuses float32
            module.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))

run = RunDir(Path(sys.argv[1]))
attempt = run.attempts()[-1]
recipe, plan = run.read_recipe(), run.read_plan()
start = RankStart(Workspace.here(), recipe, plan, True, run=run, attempt=attempt)
training_run.train(start, lambda *_: (str(run.root), str(attempt.root)), [], watch=watch)
print("seen:", *sorted(seen), flush=True)
leave(0)
"""


@pytest.mark.modes
@pytest.mark.parametrize(
    "sections",
    [pytest.param({}, marks=pytest.mark.campaign), {"lora": {"r": 4}}],
    ids=["weights", "adapter"],
)
def test_answers_are_computed_under_autocast(tmp_path, sections: dict[str, Any]):
    recipe = builders.recipe(
        tmp_path,
        training={"bf16": True, "max_steps": 1},
        evaluation={"exact_match_rows": 2, "max_new_tokens": 3},
        **sections,
    )
    dry = builders.launch(tmp_path / "h", "run", str(recipe), "--dry-run", "--launch.mode=cpu")
    assert dry.returncode == 0, dry.stderr
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(builders.only_run(tmp_path / "h"))],
        env=builders.environment(tmp_path / "h"),
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "exact match before training" in done.stdout + done.stderr
    assert "seen: torch.bfloat16\n" in done.stdout
