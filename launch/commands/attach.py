"""Starts of ranks that another launcher has made: accelerate launch, torchrun, or the pasted line
of a dry run."""

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch.base.errors import ConfigError
from launch.base.text import columns, from_here, shown
from launch.base.workspace import Workspace
from launch.commands import foreign_launcher
from launch.plan import planner, resolve
from launch.plan.facts import tokenising_processes
from launch.probe import architectures, gpus
from launch.probe import machine as probe_machine
from launch.recipe.guides.chatlm_flags import Request
from launch.render import deepspeed
from launch.render.write import write_run
from launch.report import first_screen, plan_lines
from launch.run_folder import disk_space, layout
from launch.run_folder import resume as run_resume
from launch.run_folder.layout import RankStart, RunDir, output_lock, run_lock
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.supervise.screen import Screen

# rows that open_run() shows; the first screen leaves lines for them
_SHOWN_LATER = [("run", "-"), ("log", "-")]


def from_run_dir(run: RunDir, attempt: int, resume: str = "auto") -> RankStart:
    """The start that a plan in a run folder describes; of a dry run, in a run of its own."""
    start = RankStart(
        workspace=Workspace.here(),
        recipe=run.read_recipe(),
        plan=run.read_plan(),
        supervised="LOWMEM_SUPERVISED" in os.environ,
        run=run,
        attempt=run.attempt(attempt),
        deepspeed_file=run.deepspeed_file,
    )
    if start.supervised or not run.is_dry_run:
        return start
    machine = run.attempt(attempt).read_machine()
    return replace(start, run=None, attempt=None, machine=machine, resume=resume)


def from_request(request: Request) -> RankStart:
    """The start that a guide's flags describe, with the ranks that another launcher has started.
    Rank 0 shows the plan; open_run() adds the run and the log."""
    _start_all_ranks(request.cpu)
    is_first = os.environ.get("RANK", "0") == "0"
    say = print if is_first else lambda line: None
    for line in request.notes:
        say(shown(line))
    wishes = foreign_launcher.wishes(os.environ, _launcher(), request.cpu)
    facts = resolve.read(request.recipe, request.overrides, wishes=wishes, say=say, trace=False)
    begun = run_resume.begun_levers(Workspace.here().runs, facts.recipe, request.resume)
    facts = replace(facts, history=replace(facts.history, began_with=begun))
    planner.refuse_hopeless(facts)
    choice = planner.choose(facts)
    if choice.plan.strategy.device == "cuda":  # PyTorch reads these at its first attention
        chosen = choice.machine.gpus[: choice.plan.strategy.processes_per_machine]
        for key, value in architectures.environment(chosen, choice.plan.few_shapes).items():
            os.environ.setdefault(key, value)
        if choice.plan.strategy.num_processes == 1:  # CUDA reads these once; no torch is here yet
            os.environ.update(gpus.visible_devices(choice.machine, 1))
            if "one process uses one of" in choice.machine.gpus_reason:
                say(shown(f"GPUs: {choice.machine.gpus_reason}"))
    if is_first:
        recipe, machine, plan = choice.recipe, choice.machine, choice.plan
        lines = _full_plan(recipe, machine, plan)
        if not request.dry_run:
            for line in foreign_launcher.unused(os.environ, plan, recipe.training.max_grad_norm):
                print(shown(line))
            lines = first_screen.lines(
                *(recipe, machine, plan, datetime.now()),
                below=_SHOWN_LATER,
                source="the log has",
                columns=columns(),
            )[: -len(_SHOWN_LATER)]
        print(shown("\n".join(lines)), flush=True)
    return RankStart(
        workspace=Workspace.here(),
        recipe=choice.recipe,
        plan=choice.plan,
        supervised=False,
        machine=choice.machine,
        resume=request.resume,
        tokenising_processes=tokenising_processes(
            choice.recipe, choice.machine, choice.facts.installed
        ),
        deepspeed_file=deepspeed.deepspeed_file(
            choice.plan,
            choice.recipe.training.max_grad_norm,
            Workspace.here().cache,
            os.environ,
            say,
        ),
    )


def _full_plan(recipe: Recipe, machine: Machine, plan: Plan) -> list[str]:
    """The plan with every setting, and a line for each of accelerate's values that does not run."""
    return [
        *plan_lines.full_text(recipe, machine, plan),
        *foreign_launcher.unused(os.environ, plan, recipe.training.max_grad_norm),
    ]


def open_run(start: RankStart, locks: ExitStack) -> tuple[str, str] | None:
    """Open the folders of the run and of the attempt on rank 0, locked until `locks` closes; None
    when the run is complete."""
    recipe, plan, runs = start.recipe, start.plan, start.workspace.runs
    if start.run and start.attempt:
        if not start.supervised:
            locks.enter_context(output_lock(start.workspace, recipe))
            locks.enter_context(run_lock(start.run))
        start.attempt.root.mkdir(parents=True, exist_ok=True)
        return str(start.run.root), str(start.attempt.root)
    assert start.machine is not None
    locks.enter_context(output_lock(start.workspace, recipe))
    opened = run_resume.decide(
        *(runs, recipe, plan, start.tokens, start.resume),
        lambda: RunDir.create(runs, recipe.name, datetime.now()),
    )
    logs, screen = layout.log_files(start.workspace.root, opened.run, recipe), Screen()
    screen.note(*_full_plan(recipe, start.machine, plan))
    screen.say(
        *first_screen.labelled("run", opened.line),
        *([] if opened.complete else first_screen.labelled("log", from_here(logs[0]))),
        *layout.kept_aside(Path(recipe.output_dir), opened.run.run_id),
    )
    if opened.complete:
        return None
    locks.enter_context(run_lock(opened.run))
    screen.log_to(*logs)
    screen.say(*disk_space.check(opened.run, recipe, plan))
    attempt = write_run(opened.run, recipe, start.machine, plan, start.workspace)
    opened.run.write_tokens(start.tokens)
    return str(opened.run.root), str(attempt.root)


def _start_all_ranks(cpu: bool) -> None:
    """Start the ranks of --num_processes, because accelerate launch --cpu starts one process
    whatever that flag says. accelerate leaves MASTER_ADDR in the environment exactly in that
    case. Raises ConfigError."""
    if "WORLD_SIZE" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    number = foreign_launcher.flag(foreign_launcher.argv_of(_launcher()), "num_processes")
    if not (number and number.isdigit()) or (not cpu and probe_machine.machine().gpus):
        raise ConfigError(
            "accelerate launch started one process instead of --num_processes; add --multi_gpu (it"
            " works on a machine without GPUs too: this entrypoint puts the ranks on the CPU)"
        )
    print(
        "accelerate launch --cpu starts one process whatever --num_processes says: starting"
        f" {number} with torchrun",
        flush=True,
    )
    # -P: a module of the same name in the user's folder is not torch's
    launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", number]
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[key]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv, *([] if cpu else ["--cpu"])])


def _launcher() -> Path:
    """The command line of the process that started this one."""
    return Path(f"/proc/{os.getppid()}/cmdline")
