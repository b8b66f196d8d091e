"""Starts of ranks that another launcher has made: accelerate launch, torchrun, or the pasted line
of a dry run; and what that launcher has decided: the number of ranks, the machines, the engine."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch.base import environment
from launch.base.errors import ConfigError
from launch.base.text import columns, from_here, shown
from launch.base.workspace import Workspace
from launch.plan import planner, resolve
from launch.plan.facts import tokenising_processes
from launch.predict.facts import Wishes
from launch.probe import architectures, gpus
from launch.probe import machine as probe_machine
from launch.recipe.guides.chatlm_flags import Request
from launch.render import deepspeed
from launch.render.run_files import write_run
from launch.report import first_screen, plan_lines
from launch.run_folder import disk_space, layout
from launch.run_folder import resume as run_resume
from launch.run_folder.layout import RankStart, RunDir, output_lock, run_lock
from launch.schema.machine import Machine
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode
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
    return replace(
        start,
        run=None,
        attempt=None,
        machine=run.attempt(attempt).read_machine(),
        resume=resume,
    )


def from_request(request: Request) -> RankStart:
    """The start that a guide's flags describe, with the ranks that another launcher has started.
    Rank 0 shows the plan; open_run() adds the run and the log."""
    _start_all_ranks(request.cpu)
    is_first = os.environ.get("RANK", "0") == "0"
    say = print if is_first else lambda line: None
    for line in request.notes:
        say(shown(line))
    facts = resolve.read(
        request.recipe,
        request.overrides,
        wishes=wishes(os.environ, _launcher(), request.cpu),
        say=say,
        trace=False,
    )
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
            screen = first_screen.lines(
                *(recipe, machine, plan, datetime.now()),
                below=_SHOWN_LATER,
                source="the log has",
                columns=columns(),
            )
            lines = [
                *unused_values(os.environ, plan, recipe.training.max_grad_norm),
                *screen[: -len(_SHOWN_LATER)],
            ]
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
        *unused_values(os.environ, plan, recipe.training.max_grad_norm),
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
    number = _flag(_argv_of(_launcher()), "num_processes")
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


# ---- decisions of the other launcher
# -------------------------------------------------------------------------------------


def wishes(environ: Mapping[str, str], launcher: Path, force_cpu: bool) -> Wishes:
    """The fixed part of a plan, from a rank's environment and the command line of the process above
    it."""
    mode = _mode_of_config_file(_argv_of(launcher))
    world = int(environ.get("WORLD_SIZE", "1"))
    return Wishes(
        num_processes=world,
        num_machines=world // int(environ.get("LOCAL_WORLD_SIZE", world)),
        mode=_sharding_mode(environ),
        force_cpu=force_cpu or (mode is not None and mode.device == "cpu"),
        force_gloo=environment.asks_for_gloo(environ)
        or (mode is not None and mode.backend == "gloo"),
    )


def _argv_of(cmdline: Path) -> list[str]:
    """A process's argv, from its /proc/<pid>/cmdline."""
    return cmdline.read_bytes().decode("utf-8", "replace").split("\0") if cmdline.exists() else []


def _flag(argv: list[str], name: str) -> str | None:
    """The value of --name, written with - or _, in an argv."""
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        typed, equals, value = argument.partition("=")
        if typed.startswith("--") and typed[2:].replace("-", "_") == name:
            return value if equals else following
    return None


def _mode_of_config_file(argv: list[str]) -> LaunchMode | None:
    """The mode by which a configuration file of ours is named: Accelerate's own keys cannot say CPU
    or Gloo for several ranks."""
    name = Path(_flag(argv, "config_file") or "").stem
    return next((row for mode, row in LAUNCH_MODES.items() if mode == name), None)


def _sharding_mode(environ: Mapping[str, str]) -> Mode | None:
    """The mode of the DeepSpeed or FSDP2 configuration that Accelerate has put into the
    environment."""
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        if environ.get("FSDP_VERSION", "1") != "2":
            raise ConfigError(
                "the Accelerate file starts FSDP version 1; set fsdp_version: 2 in its fsdp_config"
            )
        return "fsdp2"
    if environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return None
    if path := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        zero = deepspeed.read_deepspeed(deepspeed.existing_path(path)).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        offload = (zero.get("offload_optimizer") or {}).get("device", "none")
        offload_param = (zero.get("offload_param") or {}).get("device", "none")
    else:
        stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        offload_param = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    of_deepspeed: dict[Mode, LaunchMode] = {
        mode: row for mode, row in LAUNCH_MODES.items() if row.engine == "deepspeed"
    }
    for mode, row in of_deepspeed.items():
        device = "cpu" if row.offloads else "none"
        if (str(stage), offload) == (str(row.zero_stage), device) and (
            offload_param == device or not row.shards_parameters
        ):
            return mode
    raise ConfigError(
        f"DeepSpeed was started with stage {stage}, offload_optimizer {offload}, offload_param"
        f" {offload_param}; there"
        + " are "
        + ", ".join(of_deepspeed)
        + " (files of theirs: configs/accelerate, configs/deepspeed)"
    )


def unused_values(environ: Mapping[str, str], plan: Plan, max_grad_norm: float) -> list[str]:
    """A line for each value that was given to accelerate and does not run: the recipe decides
    it."""
    strategy = plan.strategy
    decided = {  # accelerate's name -> its default, the value that runs, the key of the recipe
        "mixed_precision": ("no", strategy.mixed_precision, "training.bf16, training.fp16"),
        "gradient_accumulation_steps": (
            "1",
            str(strategy.gradient_accumulation_steps),
            "training.gradient_accumulation_steps",
        ),
        "gradient_clipping": ("auto", str(max_grad_norm), "training.max_grad_norm"),
    }
    return [
        f"accelerate was given {name} {value}; the recipe says {runs}, which runs ({key})"
        for name, (default, runs, key) in decided.items()
        if (value := environ.get(f"ACCELERATE_{name.upper()}", runs)) not in (runs, default, "auto")
    ]
