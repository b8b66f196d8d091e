"""`python -m launch run` for one mode, on CPUs; FSDP2, which the product refuses there, through its shim."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from launch import direct, probe, render, report, resume, rundir, sharding, supervise
from launch.__main__ import main
from launch.resolve import resolve
from launch.rundir import CODE
from launch.schema import Command, Plan, Recipe
from launch.screen import Screen

SHIM = CODE / "tests" / "modes" / "fsdp_on_cpu.py"


def as_fsdp2(plan: Plan, recipe: Recipe) -> Plan:
    """A plan for ranks with a full copy each, with the states shared out."""
    strategy = replace(plan.strategy, mode="fsdp2")
    estimate = sharding.per_rank(plan.estimate, {}, recipe, strategy, plan.shape.config["model_type"])
    return replace(plan, strategy=strategy, estimate=estimate)


def through_shim(command: Command) -> Command:
    entrypoint = str(CODE / "train_low_mem.py")
    assert entrypoint in command.argv
    argv = tuple(str(SHIM) if word == entrypoint else word for word in command.argv)
    return Command(argv, {**command.env, "PYTHONPATH": str(CODE)})


def fsdp2(recipe_file: str, overrides: Sequence[str]) -> int:
    """What `python -m launch run` does, with the mode changed after planning."""
    resolved = resolve(recipe_file, [*overrides, "--launch.mode=multi_cpu"])
    resolved = replace(resolved, plan=as_fsdp2(resolved.plan, resolved.recipe))
    recipe, plan, house = resolved.recipe, resolved.plan, resolved.house
    tokens = rundir.token_cache(house.cache, recipe, plan.shape, plan.data_format)
    start = resume.decide(house.runs, recipe, plan, tokens, "auto", datetime.now())
    print(start.line)
    attempt = direct.write_run(start.run, recipe, resolved.machine, plan, house)
    command = through_shim(render.command(plan, resolved.machine, start.run, attempt, house, os.environ))
    screen = Screen(rundir.log_file(house.root, start.run))
    result = supervise.run(resolved, start.run, attempt, lambda: command, screen)
    supervise.write_outcome(result, attempt)
    print("\n".join(report.result_lines(recipe, resolved.machine, plan, result, "")))
    return result.exit_code


if __name__ == "__main__":
    mode, recipe_name, *words = sys.argv[1:]
    if mode == "fsdp2" and not probe.machine().gpus:
        sys.exit(fsdp2(recipe_name, words))
    sys.exit(main(["run", recipe_name, f"--launch.mode={mode}", *words]))
