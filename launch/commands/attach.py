"""A start that is not ours: accelerate launch or torchrun has made the ranks and each asks here
what to run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from launch.base.errors import ConfigError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.commands import foreign_launcher
from launch.plan.resolve import resolve, tokenising_processes
from launch.probe import architectures, gpus, machine
from launch.recipe.guides.chatlm_flags import Request
from launch.render import deepspeed
from launch.render.write import write_run
from launch.report import text
from launch.run_folder import disk_space, layout, resume
from launch.run_folder.layout import RunDir, Start, output_lock, run_lock


def from_run_dir(run: RunDir, attempt: int) -> Start:
    """The start that a plan in a run folder describes."""
    return Start(
        workspace=Workspace.here(),
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
    constraints = foreign_launcher.constraints(os.environ, _launcher(), request.cpu)
    resolved = resolve(
        request.recipe, request.overrides, constraints=constraints, say=say, trace=False
    )
    if resolved.plan.strategy.device == "cuda":  # PyTorch reads these at its first attention
        chosen = resolved.machine.gpus[: resolved.plan.strategy.processes_per_machine]
        for key, value in architectures.environment(chosen).items():
            os.environ.setdefault(key, value)
        if resolved.plan.strategy.num_processes == 1:  # CUDA reads these once; no torch is here yet
            os.environ.update(gpus.visible_devices(resolved.machine, 1))
    if is_first:
        lines = text.plan_lines(resolved.recipe, resolved.machine, resolved.plan)
        lines += foreign_launcher.unused(
            os.environ, resolved.plan, resolved.recipe.training.max_grad_norm
        )
        print(shown("\n".join(lines)), flush=True)
    return Start(
        workspace=resolved.workspace,
        recipe=resolved.recipe,
        plan=resolved.plan,
        supervised=False,
        machine=resolved.machine,
        wish=request.resume,
        tokenising_processes=tokenising_processes(resolved),
        deepspeed_file=deepspeed.deepspeed_file(
            resolved.plan,
            resolved.recipe.training.max_grad_norm,
            resolved.workspace.cache,
            os.environ,
            say,
        ),
    )


def open_run(start: Start, tokens: Path, held: ExitStack) -> tuple[str, str] | None:
    """On rank 0: the folders of the run and of the attempt, locked until `held` closes; None when
    it is complete."""
    if start.run and start.attempt:
        if not start.supervised:
            held.enter_context(output_lock(start.workspace, start.recipe))
            held.enter_context(run_lock(start.run))
        start.attempt.root.mkdir(parents=True, exist_ok=True)
        return str(start.run.root), str(start.attempt.root)
    assert start.machine is not None
    held.enter_context(output_lock(start.workspace, start.recipe))
    decided = resume.decide(
        start.workspace.runs, start.recipe, start.plan, tokens, start.wish, datetime.now()
    )
    aside = layout.kept_aside(Path(start.recipe.output_dir), decided.run.run_id)
    print(shown("\n".join([decided.line, *aside])), flush=True)
    if decided.complete:
        return None
    held.enter_context(run_lock(decided.run))
    for line in disk_space.check(decided.run, start.recipe, start.plan):
        print(line, flush=True)
    attempt = write_run(decided.run, start.recipe, start.machine, start.plan, start.workspace)
    decided.run.write_tokens(tokens)
    return str(decided.run.root), str(attempt.root)


def _ranks_that_were_asked_for(cpu: bool) -> None:
    """accelerate launch --cpu starts one process whatever --num_processes says: start the ranks
    that were asked for, or say that it cannot be done. accelerate leaves MASTER_ADDR in the
    environment exactly in that case."""
    if "WORLD_SIZE" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    number = foreign_launcher.flag(foreign_launcher.words_of(_launcher()), "num_processes")
    asked = int(number) if number and number.isdigit() else None
    if asked is None or (not cpu and machine.machine().gpus):
        raise ConfigError(
            "accelerate launch started one process although more were asked for; add --multi_gpu"
            " (it works on a machine without GPUs too: this entrypoint puts the ranks on the CPU)"
        )
    print(
        "accelerate launch --cpu starts one process whatever --num_processes says: starting"
        f" {asked} with torchrun"
    )
    sys.stdout.flush()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(asked)]
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[key]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv, *([] if cpu else ["--cpu"])])


def _launcher() -> Path:
    """The command line of the process that started this one."""
    return Path(f"/proc/{os.getppid()}/cmdline")
