"""What each described machine would run, held in tests/data/rehearsal. After a change that is
meant: LOWMEM_WRITE_REHEARSAL=1 python -m pytest tests/unit/plan/test_rehearsal.py, and read the
difference."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.base.errors import LaunchError
from launch.base.workspace import CODE, Workspace
from launch.render import accelerate, deepspeed, run_files
from launch.report import plan_lines
from launch.run_folder.layout import RunDir
from scripts import render_configs

HELD = CODE / "tests" / "data" / "rehearsal"
MACHINES = sorted(path.stem for path in (CODE / "configs" / "machines").glob("*.yaml"))
CASES = {
    "sft_fast": [],  # the guides' 0.2B T5
    "7b": ["--model.shape=llama-7b", "--training.bf16=true"],  # all of a 7B model
    "7b-lora": [
        "--model.shape=llama-7b",
        "--model.dtype=bfloat16",
        "--training.bf16=true",
        "--lora.r=32",
    ],
}


def rehearsal(machine_name: str, overrides: list[str]) -> str:
    """The plan, the files and the command line, or the refusal."""
    run = RunDir(Path("/workspace/runs/sft_fast/20261121-000000"))
    try:
        machine, recipe, plan = render_configs.planned(machine_name, overrides)
    except LaunchError as error:
        return f"exit {error.exit_code}: {error}\n"
    texts = ["\n".join(plan_lines.full_text(recipe, machine, plan)) + "\n"]
    texts.append(accelerate.accelerate_config(plan, str(run.deepspeed_file)))
    if plan.strategy.launch_mode.engine == "deepspeed":
        texts.append(deepspeed.deepspeed_config(plan, recipe.training.max_grad_norm))
    line = run_files.command(plan, machine, run, run.attempt(1), Workspace(Path("/workspace")), {})
    texts.append(f"{replace(line, argv=[without_places(word) for word in line.argv])}\n")
    return without_places("\n".join(texts))


def without_places(text: str) -> str:
    """The same text on every machine; a path of this one may need quotes in a command line."""
    return text.replace(sys.executable, "python").replace(str(CODE), "/checkout")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("machine_name", MACHINES)
def test_a_described_machine_runs_what_is_held(machine_name, case):
    path = HELD / f"{machine_name}.{case}.txt"
    found = rehearsal(machine_name, CASES[case])
    if "LOWMEM_WRITE_REHEARSAL" in os.environ:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
