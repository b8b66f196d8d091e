"""What a launcher that is not ours has decided before the ranks ask: how many, on which machines, with which engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch import render, rundir
from launch.candidates import CPU_MODES, Given
from launch.errors import ConfigError, ResourceError
from launch.schema import MODES, Mode, Plan

GLOO_VARIABLE = "ACCELERATE_USE_GLOO"  # the guides' own; Accelerate has none
OURS = (  # keys of a DeepSpeed file that the recipe decides
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
)


def given(environ: Mapping[str, str], launcher: Path, force_cpu: bool) -> Given:
    """The fixed part of a plan, from a rank's environment and the command line of the process above it."""
    named = _mode_of_config_file(words_of(launcher))
    world = int(environ.get("WORLD_SIZE", "1"))
    return Given(
        num_processes=world,
        num_machines=world // int(environ.get("LOCAL_WORLD_SIZE", world)),
        mode=_sharding_mode(environ),
        force_cpu=force_cpu or named in CPU_MODES,
        force_gloo=asks_for_gloo(environ) or named == "dual_gpu_gloo",
    )


def asks_for_gloo(environ: Mapping[str, str]) -> bool:
    return environ.get(GLOO_VARIABLE, "").lower() in ("1", "true", "yes")


def words_of(cmdline: Path) -> list[str]:
    """A process's argv, from its /proc/<pid>/cmdline."""
    return cmdline.read_bytes().decode("utf-8", "replace").split("\0") if cmdline.exists() else []


def flag(words: list[str], name: str) -> str | None:
    """The value of --name, with - or _ between words, in an argv."""
    for i, word in enumerate(words):
        found, equals, value = word.partition("=")
        if found.removeprefix("--").replace("-", "_") == name and found.startswith("--"):
            return value if equals else (words[i + 1] if i + 1 < len(words) else None)
    return None


def _mode_of_config_file(words: list[str]) -> str | None:
    """Accelerate's file cannot say CPU or Gloo for several ranks; ours are named by their mode."""
    path = flag(words, "config_file")
    return Path(path).stem if path and Path(path).stem in MODES else None


def _sharding_mode(environ: Mapping[str, str]) -> Mode | None:
    """The mode of the DeepSpeed or FSDP2 configuration that Accelerate has put into the environment."""
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        if environ.get("FSDP_VERSION", "1") != "2":
            raise ConfigError("the Accelerate file starts FSDP version 1; set fsdp_version: 2 in its fsdp_config")
        return "fsdp2"
    if environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return None
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if path:
        zero = read_deepspeed(_found(path)).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        offload = (zero.get("offload_optimizer") or {}).get("device", "none")
        offload_param = (zero.get("offload_param") or {}).get("device", "none")
    else:
        stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        offload_param = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    for mode in MODES:
        name = f"deepspeed_zero{stage}" + ("_offload" if offload == "cpu" else "")
        if mode == name and offload in ("none", "cpu") and (offload == offload_param or stage not in (3, "3")):
            return mode
    raise ConfigError(
        f"DeepSpeed was started with stage {stage}, offload_optimizer {offload}, offload_param {offload_param}; there"
        + " are "
        + ", ".join(mode for mode in MODES if mode.startswith("deepspeed"))
        + " (files of theirs: configs/accelerate, configs/deepspeed)"
    )


def _found(path: str) -> Path:
    """A DeepSpeed file as typed or, since our Accelerate files name theirs from the checkout, from there."""
    return Path(path) if Path(path).exists() else rundir.CODE / path


def read_deepspeed(path: Path) -> dict[str, Any]:
    """A DeepSpeed file. Raises ResourceError, ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResourceError(f"deepspeed_config_file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"deepspeed_config_file {path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed_config_file {path}: found {type(found).__name__}, expected an object")
    return found


def deepspeed_file(
    plan: Plan, max_grad_norm: float, cache: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> Path | None:
    """The file that the ranks read: the user's own, where batch, precision and clipping are the recipe's.

    Each value that is not the user's any more is said. Raises ConfigError for a section that would replace the recipe's
    optimizer or schedule.
    """
    if plan.strategy.engine != "deepspeed":
        return None
    config = json.loads(render.deepspeed_config(plan, max_grad_norm))
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    theirs = read_deepspeed(_found(path)) if path else {}
    for section in ("optimizer", "scheduler"):
        if section in theirs:
            raise ConfigError(
                f"{path}: {section} is the recipe's (training.optim, training.learning_rate, ...); remove it"
            )
    for key, value in theirs.items():
        if key not in OURS:
            config[key] = value
        elif value != config[key] and value != "auto" and not _is_auto(value):
            say(f"{path}: {key} says {json.dumps(value)}, the recipe says {json.dumps(config[key])}, which runs")
    text = json.dumps(config, indent=1) + "\n"
    made = cache / "deepspeed" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    made.parent.mkdir(parents=True, exist_ok=True)
    rundir.write_atomic(made, text)
    return made


def _is_auto(value: Any) -> bool:
    return isinstance(value, dict) and value.get("enabled") == "auto"


def unused(environ: Mapping[str, str], plan: Plan, max_grad_norm: float) -> list[str]:
    """A line for each value that was given to accelerate and does not run: the recipe decides it."""
    strategy = plan.strategy
    decided = {
        "mixed_precision": ("ACCELERATE_MIXED_PRECISION", strategy.mixed_precision, "training.bf16, training.fp16"),
        "gradient_accumulation_steps": (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            str(strategy.gradient_accumulation_steps),
            "training.gradient_accumulation_steps",
        ),
        "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", str(max_grad_norm), "training.max_grad_norm"),
    }
    found = []
    for name, (variable, runs, key) in decided.items():
        asked = environ.get(variable, runs)
        defaults = {"mixed_precision": "no", "gradient_accumulation_steps": "1"}
        if asked not in (runs, defaults.get(name), "auto"):
            found.append(f"accelerate was given {name} {asked}; the recipe says {runs}, which runs ({key})")
    return found
