"""The Accelerate YAML of a plan."""

import yaml

from launch.schema.plan import Plan


def accelerate_config(plan: Plan, deepspeed_file: str) -> str:
    """Render the Accelerate YAML. It is the same on CPUs: the entrypoint's use_cpu puts the ranks
    there (MULTI_CPU would start one process). Batch, accumulation and clipping stand only in the
    plan and, for DeepSpeed, in `deepspeed_file`."""
    strategy, meeting = plan.strategy, plan.rendezvous
    row = strategy.launch_mode
    launched = row.engine != "plain"
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": row.distributed_type.replace("_CPU", "_GPU"),
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
    if row.engine == "deepspeed":  # precision is in its own file
        config["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_file,
            "zero3_init_flag": row.shards_parameters,
        }
        if strategy.num_machines > 1:
            # pdsh would leak the environment
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    else:
        config["mixed_precision"] = strategy.mixed_precision
    if row.engine == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            # the classes are the model's _no_split_modules
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": False,
            # a full one would need all states in one rank's host RAM
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": False,  # training.activation_checkpointing does it
        }
    if launched:
        config["main_process_port"] = meeting.main_process_port if meeting else 0  # 0: any free one
    if meeting:
        config["main_process_ip"] = meeting.main_process_ip
    if strategy.device == "cuda":
        config["gpu_ids"] = "all"  # all cards that the command makes visible
    header = f"# {strategy.mode}, for {plan.recipe_name}: written by launch/render from its plan\n"
    return header + yaml.safe_dump(config, sort_keys=True)
