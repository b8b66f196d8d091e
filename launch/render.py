"""A plan as the files and the command line that run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import yaml

from launch.rundir import CODE, AttemptDir, House, RunDir
from launch.schema import Command, Machine, Plan


def accelerate_config(plan: Plan) -> str:
    """The Accelerate YAML. One rank per process on CPUs too: MULTI_GPU starts the ranks, the entrypoint's use_cpu puts
    them on the CPU (MULTI_CPU would start one process)."""
    strategy = plan.strategy
    several = strategy.num_processes > 1
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if several else "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": strategy.mixed_precision,
        "num_machines": 1,
        "num_processes": strategy.num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": strategy.device == "cpu" and not several,
    }
    if several:
        config["main_process_port"] = 0  # any free one
    if strategy.device == "cuda":
        config["gpu_ids"] = "all"  # of those the command makes visible
    return f"# {strategy.mode}: written from the plan beside it\n" + yaml.safe_dump(config, sort_keys=True)


def visible_devices(machine: Machine, num_processes: int) -> dict[str, str]:
    """The variables that leave a run its first `num_processes` GPUs, one per rank and in their order."""
    chosen = machine.gpus[:num_processes]
    indices = ",".join(str(gpu.index) for gpu in chosen)
    if chosen[0].vendor == "amd":
        return {"HIP_VISIBLE_DEVICES": indices}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": indices}  # NVML counts in this order


def command(
    plan: Plan, machine: Machine, run: RunDir, attempt: AttemptDir, house: House, environ: Mapping[str, str]
) -> Command:
    """What starts the ranks; env holds only what is added to the environment. The user's OMP_NUM_THREADS is obeyed."""
    strategy = plan.strategy
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpu_count // strategy.num_processes))
    devices = visible_devices(machine, strategy.num_processes) if strategy.device == "cuda" else {}
    return Command(
        argv=(
            sys.executable,
            "-P",  # a module of the same name in the user's folder is not ours
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(run.accelerate_file),
            str(CODE / "train_low_mem.py"),
            "--run-dir",
            str(run.root),
            "--attempt",
            str(attempt.number),
        ),
        env={
            "HF_HUB_OFFLINE": "1",
            "LOWMEM_ROOT": str(house.root),
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **devices,
        },
    )
