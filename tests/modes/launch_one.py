"""`python -m launch run` for one mode, on CPUs; what the product refuses there through a shim:
FSDP2, and DDP whose activations are kept on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launch.__main__ import main
from launch.base import compile_caches, interpreter
from launch.base.workspace import CODE, Workspace
from launch.plan.resolve import resolve
from launch.predict import sharding
from launch.predict.parameters import Shapes
from launch.probe import machine
from launch.render import run_files
from launch.report import run_end
from launch.run_folder import layout
from launch.schema.plan import Command, Plan
from launch.schema.recipe import Recipe
from launch.supervise import attempt as supervise_attempt
from launch.supervise.screen import Screen
from tests import builders

SHIM = CODE / "tests" / "modes" / "fsdp_on_cpu.py"
HOST_SHIM = CODE / "tests" / "host_on_cpu.py"
COUNTS = "OFFLOADING_COUNTS"  # the folder in which its ranks count


def as_fsdp2(plan: Plan, recipe: Recipe, parameters: Shapes) -> Plan:
    """A plan for ranks with a full copy each, with the states sharded."""
    strategy = replace(plan.strategy, mode="fsdp2")
    estimate = sharding.per_rank(plan.estimate, parameters, recipe, strategy, plan.shape.family)
    return replace(plan, strategy=strategy, estimate=estimate)


def on_host(plan: Plan, recipe: Recipe, parameters: Shapes) -> Plan:
    """A plan that checkpoints, with what it keeps on the host."""
    assert plan.strategy.levers.every_n_layers
    return replace(plan, strategy=plan.strategy.with_levers(activation_offloading=True))


def through_shim(command: Command, shim: Path = SHIM) -> Command:
    entrypoint = str(CODE / "train_low_mem.py")
    assert entrypoint in command.argv
    argv = tuple(str(shim) if word == entrypoint else word for word in command.argv)
    asked = {name: os.environ[name] for name in (COUNTS,) if name in os.environ}
    return Command(argv, {**command.env, **asked, "PYTHONPATH": str(CODE)})


def changed(
    recipe_file: str,
    overrides: Sequence[str],
    change: Callable[[Plan, Recipe, Shapes], Plan],
    shim: Path,
) -> int:
    """Steps of `python -m launch run`, with the plan of DDP changed."""
    compile_caches.settle()
    choice = resolve(recipe_file, [*overrides, "--launch.mode=multi_cpu"])
    plan = change(choice.plan, choice.recipe, choice.facts.model.parameters)
    choice = replace(choice, plan=plan)
    recipe, workspace = choice.recipe, Workspace.here()
    run, attempt = builders.opened_run(choice, "auto")
    command = through_shim(
        run_files.command(plan, choice.machine, run, attempt, workspace, os.environ),
        shim,
    )
    screen = Screen(layout.log_file(workspace.root, run))
    result = supervise_attempt.run(recipe, choice.machine, run, attempt, command, screen)
    supervise_attempt.write_outcome(result, attempt)
    print("\n".join(run_end.result_lines(recipe, choice.machine, plan, result, ())))
    return result.exit_code


if __name__ == "__main__":
    interpreter.end_on_stop_signals()
    mode, recipe_name, *words = sys.argv[1:]
    if mode == "fsdp2" and not machine.machine().gpus:
        exit_code = changed(recipe_name, words, as_fsdp2, SHIM)
    elif mode == "ddp_on_host":
        exit_code = changed(recipe_name, words, on_host, HOST_SHIM)
    else:
        exit_code = main(["run", recipe_name, f"--launch.mode={mode}", *words])
    interpreter.ignore_stop_signals()
    sys.exit(exit_code)
