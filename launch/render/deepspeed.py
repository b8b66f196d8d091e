"""DeepSpeed files: written from a plan, or read from a user."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import FILES
from launch.predict.sharding import BUCKET_ELEMENTS
from launch.schema.plan import Plan


def deepspeed_config(plan: Plan, max_grad_norm: float) -> str:
    """Render the DeepSpeed JSON, with every value explicit. The optimizer is the recipe's own, also
    if its states are offloaded: the same class in every stage, so that a checkpoint of one stage
    can be continued by another, and no op has to be compiled."""
    strategy, row = plan.strategy, plan.strategy.launch_mode
    zero: dict[str, object] = {
        "stage": row.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": strategy.device == "cuda",
        "reduce_bucket_size": BUCKET_ELEMENTS,
    }
    if row.shards_parameters:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
            "stage3_max_live_parameters": 2 * BUCKET_ELEMENTS,
            # once, for the export; checkpoints are sharded
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    else:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    if row.offloads:
        states = ("offload_optimizer", *(("offload_param",) if row.shards_parameters else ()))
        device = {"device": "cpu", "pin_memory": strategy.device == "cuda" and strategy.pin_memory}
        zero |= dict.fromkeys(states, device)
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


OURS = (  # keys of a DeepSpeed file that the recipe decides
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
)


def existing_path(path: str) -> Path:
    """The path as typed, or below the checkout: our Accelerate files name theirs from there."""
    return Path(path) if Path(path).exists() else FILES / path


def read_deepspeed(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed file. Raises ResourceError, ConfigError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResourceError(f"deepspeed_config_file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"deepspeed_config_file {path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"deepspeed_config_file {path}: found {type(config).__name__}, expected an object"
        )
    return config


def deepspeed_file(
    plan: Plan,
    max_grad_norm: float,
    cache: Path,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Path | None:
    """Write the file that the ranks read: the user's own, with the recipe's batch, precision and
    clipping.

    A line names each value that the recipe replaces. Raises ConfigError for a section or switch
    that would replace the recipe's optimizer or schedule.
    """
    if plan.strategy.launch_mode.engine != "deepspeed":
        return None
    config = json.loads(deepspeed_config(plan, max_grad_norm))
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    theirs = read_deepspeed(existing_path(path)) if path else {}
    for section in ("optimizer", "scheduler"):
        if section in theirs:
            raise ConfigError(
                f"{path}: {section} is the recipe's (training.optim, training.learning_rate, ...);"
                " remove it"
            )
    if theirs.get("zero_force_ds_cpu_optimizer"):
        raise ConfigError(
            f"{path}: zero_force_ds_cpu_optimizer true replaces the recipe's optimizer"
            " (training.optim) by DeepSpeed's; set it to false, or remove it"
        )
    config |= {key: value for key, value in theirs.items() if key not in OURS}
    for key, value in theirs.items():
        enabled = value.get("enabled") if isinstance(value, dict) else value
        if value != config[key] and "auto" not in (value, enabled):
            say(
                f"{path}: {key} says {json.dumps(value)}, the recipe says"
                f" {json.dumps(config[key])}, which runs"
            )
    text = json.dumps(config, indent=1) + "\n"
    made = cache / "deepspeed" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    made.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(made, text)
    return made
