"""A start that is not ours: accelerate launch or torchrun has made the ranks and each asks here what to run."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from launch import architectures, locks, probe, recipes, render, report, resume, room, rundir, started
from launch.errors import ConfigError, shown
from launch.resolve import resolve, tokenising_processes
from launch.rundir import AttemptDir, House, RunDir, Start
from launch.schema import Machine, Plan, Recipe
from launch.seed_cli import Request


def from_run_dir(run: RunDir, attempt: int) -> Start:
    """The start that a plan in a run folder describes."""
    return Start(
        house=House.here(),
        recipe=run.read_recipe(),
        plan=run.read_plan(),
        supervised="LOWMEM_SUPERVISED" in os.environ,
        run=run,
        attempt=run.attempt(attempt),
        deepspeed_file=run.deepspeed_file,
    )


def from_request(request: Request) -> Start:
    """The start that was asked for, with the ranks that are there. Rank 0 prints the plan."""
    _ranks_that_were_asked_for(request.cpu)
    is_first = os.environ.get("RANK", "0") == "0"
    say = print if is_first else lambda line: None
    for line in request.notes:
        say(shown(line))
    given = started.given(os.environ, _launcher(), request.cpu)
    resolved = resolve(request.recipe, request.overrides, given=given, say=say, trace=False)
    if resolved.plan.strategy.device == "cuda":  # PyTorch reads these at its first attention
        chosen = resolved.machine.gpus[: resolved.plan.strategy.processes_per_machine]
        for key, value in architectures.environment(chosen).items():
            os.environ.setdefault(key, value)
        if resolved.plan.strategy.num_processes == 1:  # CUDA reads these once; no torch is here yet
            os.environ.update(render.visible_devices(resolved.machine, 1))
    if is_first:
        lines = report.plan_lines(resolved.recipe, resolved.machine, resolved.plan)
        lines += started.unused(os.environ, resolved.plan, resolved.recipe.training.max_grad_norm)
        print(shown("\n".join(lines)), flush=True)
    return Start(
        house=resolved.house,
        recipe=resolved.recipe,
        plan=resolved.plan,
        supervised=False,
        machine=resolved.machine,
        wish=request.resume,
        tokenising_processes=tokenising_processes(resolved),
        deepspeed_file=started.deepspeed_file(
            resolved.plan, resolved.recipe.training.max_grad_norm, resolved.house.cache, os.environ, say
        ),
    )


def open_run(start: Start, tokens: Path, held: ExitStack) -> tuple[str, str] | None:
    """On rank 0: the folders of the run and of the attempt, locked until `held` closes; None when it is complete."""
    if start.run and start.attempt:
        if not start.supervised:
            held.enter_context(output_lock(start.house, start.recipe))
            held.enter_context(run_lock(start.run))
        start.attempt.root.mkdir(parents=True, exist_ok=True)
        return str(start.run.root), str(start.attempt.root)
    assert start.machine is not None
    held.enter_context(output_lock(start.house, start.recipe))
    decided = resume.decide(start.house.runs, start.recipe, start.plan, tokens, start.wish, datetime.now())
    aside = rundir.kept_aside(Path(start.recipe.output_dir), decided.run.run_id)
    print(shown("\n".join([decided.line, *aside])), flush=True)
    if decided.complete:
        return None
    held.enter_context(run_lock(decided.run))
    for line in room.check(decided.run, start.recipe, start.plan):
        print(line, flush=True)
    attempt = write_run(decided.run, start.recipe, start.machine, start.plan, start.house)
    decided.run.write_tokens(tokens)
    return str(decided.run.root), str(attempt.root)


def write_run(run: RunDir, recipe: Recipe, machine: Machine, plan: Plan, house: House) -> AttemptDir:
    """Render a plan into its run folder, with a new attempt."""
    attempt = run.new_attempt()
    write_plan(run, recipe, machine, plan, house, attempt)
    return attempt


def write_plan(run: RunDir, recipe: Recipe, machine: Machine, plan: Plan, house: House, attempt: AttemptDir) -> None:
    """The plan's files, in place of those that are there."""
    run.write_plan(recipe, plan)
    rundir.write_json(attempt.plan_file, asdict(plan))  # the run's own is that of its last attempt
    rundir.write_json(attempt.machine_file, asdict(machine))
    rundir.write_atomic(run.recipe_yaml, recipes.dump(recipe))
    rundir.write_atomic(run.accelerate_file, render.accelerate_config(plan, str(run.deepspeed_file)))
    if plan.strategy.engine == "deepspeed":
        rundir.write_atomic(run.deepspeed_file, render.deepspeed_config(plan, recipe.training.max_grad_norm))
    command = render.command(plan, machine, run, attempt, house, os.environ)
    rundir.write_atomic(run.command_file, f"#!/bin/sh\n# attempt {attempt.number} of {run.run_id}\n{command}\n")


def output_lock(house: House, recipe: Recipe) -> ExitStack:
    """One run at a time per recipe and output folder."""
    held = ExitStack()
    name = Path(recipe.output_dir).name
    held.enter_context(locks.lock(house.runs / recipe.name / f".lock-{name}", f"{recipe.name} ({recipe.output_dir})"))
    return held


def run_lock(run: RunDir) -> AbstractContextManager[None]:
    """One start at a time in a run's folder, whatever recipe or output folder it was reached by."""
    return locks.lock(run.lock_file, str(run.root))


def _ranks_that_were_asked_for(cpu: bool) -> None:
    """accelerate launch --cpu starts one process whatever --num_processes says: start the ranks that were asked for,
    or say that it cannot be done. accelerate leaves MASTER_ADDR in the environment exactly in that case."""
    if "WORLD_SIZE" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    number = started.flag(started.words_of(_launcher()), "num_processes")
    asked = int(number) if number and number.isdigit() else None
    if asked is None or (not cpu and probe.machine().gpus):
        raise ConfigError(
            "accelerate launch started one process although more were asked for; add --multi_gpu"
            " (it works on a machine without GPUs too: this entrypoint puts the ranks on the CPU)"
        )
    print(f"accelerate launch --cpu starts one process whatever --num_processes says: starting {asked} with torchrun")
    sys.stdout.flush()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(asked)]
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[key]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv, *([] if cpu else ["--cpu"])])


def _launcher() -> Path:
    """The command line of the process that started this one."""
    return Path(f"/proc/{os.getppid()}/cmdline")
