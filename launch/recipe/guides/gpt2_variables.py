"""The variables of run_single_gpu.sh and run_single_gpu_optimized.sh become overrides of a recipe's
keys."""

from collections.abc import Iterator, Mapping

from launch.base.errors import ConfigError
from launch.recipe.load import Override
from launch.recipe.strict_yaml import check_choice, show

_MODEL_SIZES = ("tiny", "small", "medium")  # gpt2-<size> in configs/models
VALUES = {  # variable -> recipe key
    "BATCH_SIZE": "training.per_device_train_batch_size",
    "GRADIENT_ACCUM": "training.gradient_accumulation_steps",
    "NUM_WORKERS": "training.dataloader_num_workers",
    "MAX_LENGTH": "data.max_length",
    "EPOCHS": "training.num_train_epochs",
    "OUTPUT_DIR": "output_dir",
}
# variable -> (flag, overrides with the flag, overrides without it). The guide puts the flag itself
# into the variable, or nothing. Without --fp16 its script trains in float32.
SWITCHES: Mapping[str, tuple[str, Mapping[str, bool], Mapping[str, bool]]] = {
    "ENABLE_FP16": (
        "--fp16",
        {"training.fp16": True, "training.bf16": False},
        {"training.fp16": False, "training.bf16": False},
    ),
    "ENABLE_GRAD_CKPT": (
        "--gradient_checkpointing",
        {"training.activation_checkpointing": True},
        {"training.activation_checkpointing": False},
    ),
}
NAMES = ("MODEL_SIZE", *VALUES, *SWITCHES)


def translate(environ: Mapping[str, str]) -> list[Override]:
    """Make an override for each key that a variable sets. The recipe decides keys whose variable is
    not set.

    Raises ConfigError, which names the variable."""
    return [
        override
        for name in NAMES
        if name in environ
        for override in _overrides(name, environ[name])
    ]


def _overrides(name: str, value: str) -> Iterator[Override]:
    typed = f"{name}={show(value)[1:-1]}"
    if name == "MODEL_SIZE":
        check_choice(typed, value, _MODEL_SIZES)
        yield Override(f"--model.shape=gpt2-{value}", typed)
    elif name in SWITCHES:
        flag, with_it, without_it = SWITCHES[name]
        if value not in (flag, ""):
            raise ConfigError(
                f'{typed}: found {show(value)}, expected "{flag}" or nothing: {name}="{flag}"'
            )
        for key, is_on in (with_it if value else without_it).items():
            yield Override(f"--{key}={str(is_on).lower()}", typed)
    elif not value.strip():
        raise ConfigError(
            f"{typed}: found nothing, expected a value; unset {name} to leave it to the recipe"
        )
    else:
        yield Override(f"--{VALUES[name]}={value}", typed)
