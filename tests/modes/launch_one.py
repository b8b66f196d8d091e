"""`python -m launch run` for one mode, on CPUs; FSDP2, which the product refuses there, through its
shim."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from launch.__main__ import main
from launch.base.workspace import CODE
from launch.data import token_cache
from launch.plan.resolve import resolve
from launch.predict import sharding
from launch.predict.parameters import Shapes
from launch.probe import machine
from launch.render import command as render_command
from launch.render import write
from launch.report import text
from launch.run_folder import layout, resume
from launch.schema.plan import Command, Plan
from launch.schema.recipe import Recipe
from launch.supervise import attempt as supervise_attempt
from launch.supervise.screen import Screen

SHIM = CODE / "tests" / "modes" / "fsdp_on_cpu.py"


def as_fsdp2(plan: Plan, recipe: Recipe, parameters: Shapes) -> Plan:
    """A plan for ranks with a full copy each, with the states sharded."""
    strategy = replace(plan.strategy, mode="fsdp2")
    estimate = sharding.per_rank(
        plan.estimate, parameters, recipe, strategy, plan.shape.config["model_type"]
    )
    return replace(plan, strategy=strategy, estimate=estimate)


def through_shim(command: Command) -> Command:
    entrypoint = str(CODE / "train_low_mem.py")
    assert entrypoint in command.argv
    argv = tuple(str(SHIM) if word == entrypoint else word for word in command.argv)
    return Command(argv, {**command.env, "PYTHONPATH": str(CODE)})


def fsdp2(recipe_file: str, overrides: Sequence[str]) -> int:
    """What `python -m launch run` does, with the mode changed after planning."""
    resolved = resolve(recipe_file, [*overrides, "--launch.mode=multi_cpu"])
    assert resolved.context is not None
    plan = as_fsdp2(resolved.plan, resolved.recipe, resolved.context.parameters)
    resolved = replace(resolved, plan=plan)
    recipe, workspace = resolved.recipe, resolved.workspace
    tokens = token_cache.token_cache(workspace.cache, recipe, plan.shape, plan.data_format)
    start = resume.decide(workspace.runs, recipe, plan, tokens, "auto", datetime.now())
    print(start.line)
    attempt = write.write_run(start.run, recipe, resolved.machine, plan, workspace)
    command = through_shim(
        render_command.command(plan, resolved.machine, start.run, attempt, workspace, os.environ)
    )
    screen = Screen(layout.log_file(workspace.root, start.run))
    result = supervise_attempt.run(resolved, start.run, attempt, lambda: command, screen)
    supervise_attempt.write_outcome(result, attempt)
    print("\n".join(text.result_lines(recipe, resolved.machine, plan, result, "")))
    return result.exit_code


if __name__ == "__main__":
    mode, recipe_name, *words = sys.argv[1:]
    if mode == "fsdp2" and not machine.machine().gpus:
        sys.exit(fsdp2(recipe_name, words))
    sys.exit(main(["run", recipe_name, f"--launch.mode={mode}", *words]))
