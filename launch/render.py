"""A plan as the files and the command line that run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from launch import architectures, malloc
from launch.rundir import CODE, AttemptDir, House, RunDir
from launch.schema import Command, Machine, Plan

DISTRIBUTED_TYPE = {"plain": "NO", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}
BUCKET_ELEMENTS = 50_000_000  # reduced or gathered at once; DeepSpeed's own 500 million are 1 GB each in bf16


def accelerate_config(plan: Plan, deepspeed_file: str) -> str:
    """The Accelerate YAML. The same on CPUs: the entrypoint's use_cpu puts the ranks there (MULTI_CPU would start one
    process). Batch, accumulation and clipping stand in the plan and, for DeepSpeed, in `deepspeed_file` alone."""
    strategy, meeting = plan.strategy, plan.rendezvous
    launched = strategy.engine != "plain"
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": DISTRIBUTED_TYPE[strategy.engine],
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": meeting.machine_rank if meeting else 0,
        "main_training_function": "main",
        "num_machines": strategy.num_machines,
        "num_processes": strategy.num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": strategy.device == "cpu" and not launched,
    }
    if strategy.engine == "deepspeed":  # precision is in its own file
        config["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_file,
            "zero3_init_flag": strategy.zero_stage == 3,
        }
        if strategy.num_machines > 1:
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"  # pdsh would leak the environment
    else:
        config["mixed_precision"] = strategy.mixed_precision
    if strategy.engine == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # the classes are the model's _no_split_modules
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",  # a full one would need all states in one rank's host RAM
            "fsdp_activation_checkpointing": False,  # training.gradient_checkpointing does it
        }
    if launched:
        config["main_process_port"] = meeting.main_process_port if meeting else 0  # 0: any free one
    if meeting:
        config["main_process_ip"] = meeting.main_process_ip
    if strategy.device == "cuda":
        config["gpu_ids"] = "all"  # of those the command makes visible
    header = f"# {strategy.mode}, for {plan.recipe_name}: written by launch/render.py from its plan\n"
    return header + yaml.safe_dump(config, sort_keys=True)


def deepspeed_config(plan: Plan, max_grad_norm: float) -> str:
    """The DeepSpeed JSON, every value explicit. The optimizer is the recipe's own, also where its states are offloaded:
    one class everywhere, so that a checkpoint of one stage can be taken on by another, and no op to compile."""
    strategy = plan.strategy
    zero: dict[str, object] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": strategy.device == "cuda",
        "reduce_bucket_size": BUCKET_ELEMENTS,
    }
    if strategy.zero_stage < 3:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    else:
        zero["stage3_prefetch_bucket_size"] = BUCKET_ELEMENTS
        zero["stage3_max_live_parameters"] = 2 * BUCKET_ELEMENTS
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # once, for the export; checkpoints are sharded
    if strategy.offloads:
        where = {"device": "cpu", "pin_memory": strategy.device == "cuda"}
        zero["offload_optimizer"] = where
        if strategy.zero_stage == 3:
            zero["offload_param"] = where
    config: dict[str, Any] = {
        "train_batch_size": strategy.effective_batch_size,
        "train_micro_batch_size_per_gpu": strategy.per_device_train_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": strategy.mixed_precision == "bf16"},
        "fp16": {"enabled": strategy.mixed_precision == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 60,  # the log is ours
        "wall_clock_breakdown": False,
    }
    return json.dumps(config, indent=1) + "\n"


def visible_devices(machine: Machine, num_processes: int) -> dict[str, str]:
    """The variables that leave a run its first `num_processes` GPUs, one per rank and in their order."""
    chosen = machine.gpus[:num_processes]
    indices = ",".join(gpu.uuid or str(gpu.index) for gpu in chosen)
    if chosen[0].vendor == "amd":
        # HIP reads this before CUDA_VISIBLE_DEVICES, and counts what ROCR_VISIBLE_DEVICES leaves, as gpus.py does.
        # RCCL has no names of its own: it reads NCCL_*.
        return {"HIP_VISIBLE_DEVICES": indices}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": indices}  # NVML counts in this order


def _launcher(plan: Plan) -> tuple[str, ...]:
    """Accelerate's launcher; several ranks of one machine meet on its loopback."""
    if plan.strategy.engine != "plain" and plan.strategy.num_machines == 1:
        return (str(CODE / "training" / "on_loopback.py"),)
    return ("-m", "accelerate.commands.launch")


def command(
    plan: Plan, machine: Machine, run: RunDir, attempt: AttemptDir, house: House, environ: Mapping[str, str]
) -> Command:
    """What starts the ranks; env holds only what is added to the environment. The user's OMP_NUM_THREADS is obeyed."""
    strategy = plan.strategy
    per_machine = strategy.processes_per_machine
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpu_count // per_machine))
    added: dict[str, str] = dict(plan.link.env) if plan.link else {}
    if strategy.device == "cuda":
        wanted = architectures.environment(machine.gpus[:per_machine])
        added |= visible_devices(machine, per_machine)
        added |= {key: environ.get(key, value) for key, value in wanted.items()}
    if strategy.device == "cpu":
        added |= {key: environ.get(key, value) for key, value in malloc.SETTINGS.items()}
        if strategy.engine == "deepspeed":
            added["DS_ACCELERATOR"] = "cpu"
    if strategy.backend == "gloo" and strategy.num_machines == 1:
        added["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", "lo")  # nobody else's business
    if plan.rendezvous and plan.rendezvous.network_interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        added |= dict.fromkeys(names, plan.rendezvous.network_interface)
    return Command(
        argv=(
            sys.executable,
            "-P",  # a module of the same name in the user's folder is not ours
            *_launcher(plan),
            "--config_file",
            str(run.accelerate_file),
            *(["--rdzv_conf", f"timeout={plan.rendezvous.join_timeout_s}"] if plan.rendezvous else []),
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
            **added,
        },
    )
