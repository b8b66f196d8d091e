"""Decisions of a launcher that is not ours: the number of ranks, the machines, the engine."""

from collections.abc import Mapping
from pathlib import Path

from launch.base.errors import ConfigError
from launch.predict.facts import Wishes
from launch.render.deepspeed import existing_path, read_deepspeed
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode
from launch.schema.plan import Plan

_GLOO_VARIABLE = "ACCELERATE_USE_GLOO"  # the guides' own; Accelerate has none


def wishes(environ: Mapping[str, str], launcher: Path, force_cpu: bool) -> Wishes:
    """The fixed part of a plan, from a rank's environment and the command line of the process above
    it."""
    mode = _mode_of_config_file(argv_of(launcher))
    world = int(environ.get("WORLD_SIZE", "1"))
    return Wishes(
        num_processes=world,
        num_machines=world // int(environ.get("LOCAL_WORLD_SIZE", world)),
        mode=_sharding_mode(environ),
        force_cpu=force_cpu or (mode is not None and mode.device == "cpu"),
        force_gloo=asks_for_gloo(environ) or (mode is not None and mode.backend == "gloo"),
    )


def asks_for_gloo(environ: Mapping[str, str]) -> bool:
    return environ.get(_GLOO_VARIABLE, "").lower() in ("1", "true", "yes")


def argv_of(cmdline: Path) -> list[str]:
    """A process's argv, from its /proc/<pid>/cmdline."""
    return cmdline.read_bytes().decode("utf-8", "replace").split("\0") if cmdline.exists() else []


def flag(argv: list[str], name: str) -> str | None:
    """The value of --name, written with - or _, in an argv."""
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        typed, equals, value = argument.partition("=")
        if typed.startswith("--") and typed[2:].replace("-", "_") == name:
            return value if equals else following
    return None


def _mode_of_config_file(argv: list[str]) -> LaunchMode | None:
    """The mode by which a configuration file of ours is named: Accelerate's own keys cannot say CPU
    or Gloo for several ranks."""
    path = flag(argv, "config_file")
    name = Path(path).stem if path else None
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
    defaults = {"mixed_precision": "no", "gradient_accumulation_steps": "1"}
    return [
        f"accelerate was given {name} {environ[variable]}; the recipe says {runs}, which runs"
        f" ({key})"
        for name, (variable, runs, key) in decided.items()
        if environ.get(variable, runs) not in (runs, defaults.get(name), "auto")
    ]
