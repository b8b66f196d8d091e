#!/usr/bin/env python3
"""Write configs/accelerate and configs/deepspeed as launch/render makes them for sft_fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(CODE))

from launch.plan import facts as plan_facts  # noqa: E402
from launch.plan import planner  # noqa: E402
from launch.predict.models import model_config  # noqa: E402
from launch.predict.traces import Traces  # noqa: E402
from launch.probe import described  # noqa: E402
from launch.recipe import load  # noqa: E402
from launch.render import accelerate  # noqa: E402
from launch.render import deepspeed as render_deepspeed  # noqa: E402
from launch.schema.machine import Machine  # noqa: E402
from launch.schema.modes import LAUNCH_MODES, Mode  # noqa: E402
from launch.schema.plan import DataFormat, Plan  # noqa: E402
from launch.schema.recipe import Recipe  # noqa: E402

_GPU_MACHINE, _CPU_MACHINE = "2x3080-20g-16g", "cpu"
DATA = DataFormat(
    "prompt_response", {"prompt": "prompt", "response": "response"}, "parquet", "described"
)


def planned(
    machine_name: str, overrides: Sequence[str], traces: Path | None = None
) -> tuple[Machine, Recipe, Plan]:
    """Plan sft_fast with overrides on a described machine, without its data; with traces where a
    folder for them is named."""
    machine = described.from_file(CODE / "configs" / "machines" / f"{machine_name}.yaml")
    recipe, changes = load.load("sft_fast", overrides, bool(machine.gpus))
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=CODE / ".cache")
    facts = plan_facts.build(recipe, machine, config, parameters, family, DATA)
    # the torch of requirements.txt has it
    installed = replace(facts.installed, no_varlen_attn=None)
    facts = replace(facts, changes=changes, installed=installed)
    if traces is not None:
        model = facts.model
        facts = replace(facts, traces=Traces(recipe, model.size, model.lora_targets, traces))
    return machine, recipe, planner.choose(facts).plan


def files(mode: Mode) -> dict[str, str]:
    """Render the files of a mode as {path below the checkout: content}."""
    machine = _CPU_MACHINE if LAUNCH_MODES[mode].device == "cpu" else _GPU_MACHINE
    _, recipe, plan = planned(machine, [f"--launch.mode={mode}"])
    deepspeed = f"configs/deepspeed/{mode.removeprefix('deepspeed_')}.json"
    made = {f"configs/accelerate/{mode}.yaml": accelerate.accelerate_config(plan, deepspeed)}
    if plan.strategy.launch_mode.engine == "deepspeed":
        made[deepspeed] = render_deepspeed.deepspeed_config(plan, recipe.training.max_grad_norm)
    return made


def main() -> None:
    for mode in LAUNCH_MODES:
        for path, text in files(mode).items():
            (CODE / path).parent.mkdir(exist_ok=True)
            (CODE / path).write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
