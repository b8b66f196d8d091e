"""What a launcher that is not ours has decided before the ranks ask: how many, on which machines,
with which engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launch.base.errors import ConfigError
from launch.plan.candidates import CPU_MODES, LaunchConstraints
from launch.render.deepspeed import existing_path, read_deepspeed
from launch.schema.plan import Plan
from launch.schema.recipe import MODES, Mode

GLOO_VARIABLE = "ACCELERATE_USE_GLOO"  # the guides' own; Accelerate has none


def constraints(environ: Mapping[str, str], launcher: Path, force_cpu: bool) -> LaunchConstraints:
    """The fixed part of a plan, from a rank's environment and the command line of the process above
    it."""
    named = _mode_of_config_file(words_of(launcher))
    world = int(environ.get("WORLD_SIZE", "1"))
    return LaunchConstraints(
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
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if path:
        zero = read_deepspeed(existing_path(path)).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        offload = (zero.get("offload_optimizer") or {}).get("device", "none")
        offload_param = (zero.get("offload_param") or {}).get("device", "none")
    else:
        stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        offload_param = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    for mode in MODES:
        name = f"deepspeed_zero{stage}" + ("_offload" if offload == "cpu" else "")
        if (
            mode == name
            and offload in ("none", "cpu")
            and (offload == offload_param or stage not in (3, "3"))
        ):
            return mode
    raise ConfigError(
        f"DeepSpeed was started with stage {stage}, offload_optimizer {offload}, offload_param"
        f" {offload_param}; there"
        + " are "
        + ", ".join(mode for mode in MODES if mode.startswith("deepspeed"))
        + " (files of theirs: configs/accelerate, configs/deepspeed)"
    )


def unused(environ: Mapping[str, str], plan: Plan, max_grad_norm: float) -> list[str]:
    """A line for each value that was given to accelerate and does not run: the recipe decides
    it."""
    strategy = plan.strategy
    decided = {
        "mixed_precision": (
            "ACCELERATE_MIXED_PRECISION",
            strategy.mixed_precision,
            "training.bf16, training.fp16",
        ),
        "gradient_accumulation_steps": (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            str(strategy.gradient_accumulation_steps),
            "training.gradient_accumulation_steps",
        ),
        "gradient_clipping": (
            "ACCELERATE_GRADIENT_CLIPPING",
            str(max_grad_norm),
            "training.max_grad_norm",
        ),
    }
    found = []
    for name, (variable, runs, key) in decided.items():
        asked = environ.get(variable, runs)
        defaults = {"mixed_precision": "no", "gradient_accumulation_steps": "1"}
        if asked not in (runs, defaults.get(name), "auto"):
            found.append(
                f"accelerate was given {name} {asked}; the recipe says {runs}, which runs ({key})"
            )
    return found
