"""How the ledger knows a machine, a model and a recipe again: by a hash of what decides memory and
speed. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from launch.schema.machine import GIB, Machine
from launch.schema.plan import ModelSize
from launch.schema.recipe import Recipe

# keys of a config that name its origin, not the model
UNTOLD = {"_name_or_path", "transformers_version"}
# What an optimizer step does not feel. A key that is added to the recipe counts until it is listed
# here: being tuned once more costs minutes, the result of other work costs a run.
UNFELT: Mapping[str, Any] = {
    "name": True,
    "output_dir": True,
    "log_dir": True,
    "evaluation": True,
    "resume": True,
    "model": {"shape", "path", "path_if_there"},  # model_key has their content
    "tokenizer": {"path", "path_if_there"},
    # rows are cut at max_length, so trials hold for other rows as far as theirs were that long
    "data": {
        "train_file",
        "validation_file",
        "prompt_column",
        "response_column",
        "text_column",
        "messages_column",
        "ignore_columns",
        "max_train_samples",
        "max_validation_samples",
        "group_by_length",  # a trial's rows are of one length
    },
    "training": {
        "per_device_train_batch_size",  # their product counts: how it is cut is what tuning finds
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "warmup_steps",
        "lr_scheduler_type",
        "weight_decay",
        "logging_steps",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "eval_steps",
        "seed",
    },
    "launch": {
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "network_interface",
        "join_timeout_s",
        "max_restarts",
        "hang_floor_s",
        "time_limit_s",
        "host_stop_fraction",
    },
}


def machine_key(machine: Machine) -> str:
    """Cards in their order, driver, host RAM a job may have, CPUs: not the name, not what is free
    just now.

    Sizes count in GiB: a kernel or a driver keeps some MiB for itself.
    """
    cards = [
        [
            gpu.vendor,
            gpu.name,
            gpu.architecture,
            round(gpu.total_bytes / GIB),
            gpu.driver.partition(".")[0],
        ]
        for gpu in machine.gpus
    ]
    return _key("machine", [cards, round(machine.host_limit_bytes / GIB), machine.cpu_count])


def model_key(shape: ModelSize) -> str:
    """Config and number of parameters: the same model under another name or in another folder is
    the same."""
    config = {key: value for key, value in shape.config.items() if key not in UNTOLD}
    return _key("model", [config, shape.parameters])


def recipe_key(recipe: Recipe) -> str:
    """The whole recipe less what an optimizer step does not feel; of the batch only its effective
    size."""
    felt = recipe.model_dump(mode="json", exclude=dict(UNFELT))
    training = recipe.training
    # of a process
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return _key("recipe", [felt, batch])


def _key(kind: str, facts: list[Any]) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"
