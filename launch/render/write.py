"""Run folders of a plan: recipe, plan, configuration files and command line."""

import os
from dataclasses import asdict

from launch.base import files
from launch.base.workspace import Workspace
from launch.recipe import load
from launch.render import accelerate, deepspeed
from launch.render import command as render_command
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe


def write_run(
    run: RunDir,
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    workspace: Workspace,
    resume: str = "auto",
) -> AttemptDir:
    """Render a plan into its run folder, for the attempt that has tokenised its rows or a new
    attempt."""
    attempt = run.unplanned_attempt()
    run.write_plan(recipe, plan)
    files.write_json(attempt.plan_file, asdict(plan))  # the run's own is that of its last attempt
    files.write_json(attempt.machine_file, asdict(machine))
    files.write_atomic(run.recipe_yaml, load.dump(recipe))
    files.write_atomic(
        run.accelerate_file, accelerate.accelerate_config(plan, str(run.deepspeed_file))
    )
    if plan.strategy.launch_mode.engine == "deepspeed":
        files.write_atomic(
            run.deepspeed_file, deepspeed.deepspeed_config(plan, recipe.training.max_grad_norm)
        )
    command = render_command.command(plan, machine, run, attempt, workspace, os.environ, resume)
    files.write_atomic(
        run.command_file, f"#!/bin/sh\n# attempt {attempt.number} of {run.run_id}\n{command}\n"
    )
    return attempt
