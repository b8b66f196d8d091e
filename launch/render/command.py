"""The command line that starts the ranks of a plan."""

import sys
from collections.abc import Mapping

from launch.base.workspace import CODE, Workspace
from launch.predict.memory import malloc, pinned_memory
from launch.predict.memory.allocator_config import VARIABLES
from launch.probe import architectures
from launch.probe.gpus import visible_devices
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Command, Plan


def _launcher(plan: Plan) -> tuple[str, ...]:
    """Run Accelerate's launcher; several ranks of a single machine connect over its loopback."""
    strategy = plan.strategy
    is_local = strategy.launch_mode.engine != "plain" and strategy.num_machines == 1
    name = "on_loopback.py" if is_local else "accelerate_launch.py"
    return (str(CODE / "training" / "children" / name),)


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
    return Command(
        argv=(
            sys.executable,
            "-P",  # a module of the same name in the user's folder is not ours
            *_launcher(plan),
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
