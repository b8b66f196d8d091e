"""Run folders of a plan: recipe, plan, configuration files, and the command line of the ranks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict

from launch.base import files
from launch.base.workspace import CODE, Workspace
from launch.predict.memory import malloc, pinned_memory
from launch.predict.memory.allocator_config import VARIABLES
from launch.probe import architectures
from launch.probe.gpus import visible_devices
from launch.recipe import load
from launch.render import accelerate, deepspeed
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Command, Plan
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
    line = command(plan, machine, run, attempt, workspace, os.environ, resume)
    files.write_atomic(
        run.command_file, f"#!/bin/sh\n# attempt {attempt.number} of {run.run_id}\n{line}\n"
    )
    return attempt


def command(
    plan: Plan,
    machine: Machine,
    run: RunDir,
    attempt: AttemptDir,
    workspace: Workspace,
    environ: Mapping[str, str],
    resume: str = "auto",
) -> Command:
    """Render the line that starts the ranks; env holds only variables that are added. The user's
    OMP_NUM_THREADS counts. `resume` is for the line of a dry run, which opens a run itself."""
    strategy = plan.strategy
    per_machine = strategy.processes_per_machine
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpu_count // per_machine))
    added: dict[str, str] = dict(plan.link.env) if plan.link else {}
    defaults = dict(malloc.SETTINGS)
    if strategy.device == "cuda":
        defaults = architectures.environment(machine.gpus[:per_machine], plan.few_shapes)
        users = {name: environ[name] for name in VARIABLES if name in environ}
        for name, settings in (users or {VARIABLES[0]: plan.allocator_settings}).items():
            is_pinned = pinned_memory.KEY in settings
            parts = [settings, "" if is_pinned else pinned_memory.setting(strategy)]
            if (joined := ",".join(filter(None, parts))) != environ.get(name, ""):
                added[name] = joined
        added |= visible_devices(machine, per_machine)
    elif strategy.launch_mode.engine == "deepspeed":
        added["DS_ACCELERATOR"] = "cpu"
    # ranks that compute over NCCL agree on stops over Gloo
    if strategy.backend and strategy.num_machines == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # not reachable from other machines
    added |= {key: environ.get(key, value) for key, value in defaults.items()}
    if plan.rendezvous and plan.rendezvous.network_interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        added |= dict.fromkeys(names, plan.rendezvous.network_interface)
    launches_ranks = strategy.launch_mode.engine != "plain"
    # several ranks of a single machine connect over its loopback
    is_local = launches_ranks and strategy.num_machines == 1
    launcher = "on_loopback.py" if is_local else "accelerate_launch.py"
    return Command(
        argv=(
            sys.executable,
            "-P",  # a module of the same name in the user's folder is not ours
            str(CODE / "training" / "children" / launcher),
            "--config_file",
            str(run.accelerate_file),
            # else torchrun makes a folder among the temporary files, and leaves it there
            *(["--log_dir", str(attempt.launcher_logs)] if launches_ranks else []),
            *(
                ["--rdzv_conf", f"timeout={plan.rendezvous.join_timeout_s}"]
                if plan.rendezvous
                else []
            ),
            str(CODE / "train_low_mem.py"),
            "--run-dir",
            str(run.root),
            "--attempt",
            str(attempt.number),
            *(["--resume", resume] if resume != "auto" else []),
        ),
        env={
            "HF_HUB_OFFLINE": "1",
            "LOWMEM_ROOT": str(workspace.root),
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **added,
        },
    )
