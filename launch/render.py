"""A plan as the files and the command line that run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import yaml

from launch import architectures
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


def command(
    plan: Plan, machine: Machine, run: RunDir, attempt: AttemptDir, house: House, environ: Mapping[str, str]
) -> Command:
    """What starts the ranks; env holds only what is added to the environment. The user's OMP_NUM_THREADS is obeyed."""
    strategy = plan.strategy
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpu_count // strategy.num_processes))
    devices: dict[str, str] = {}
    if strategy.device == "cuda":
        chosen = machine.gpus[: strategy.num_processes]
        indices = ",".join(str(gpu.index) for gpu in chosen)
        if chosen[0].vendor == "amd":
            # HIP reads this before CUDA_VISIBLE_DEVICES, and counts what ROCR_VISIBLE_DEVICES leaves, as gpus.py does.
            # RCCL has no names of its own: it reads NCCL_*.
            devices = {"HIP_VISIBLE_DEVICES": indices}
        else:  # NVML counts in this order
            devices = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": indices}
        wanted = architectures.environment(chosen)
        devices |= {key: environ.get(key, value) for key, value in wanted.items()}
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
