"""The flags of scripts/train.py become a recipe's name and overrides: --mode pretrain|sft --config
medium|large of the A6000 guide, or --config FILE.yaml of the A5000 guide. Values are written as
--name=value or --name value, and keys of a recipe are accepted too."""

from collections.abc import Sequence

from launch.base.errors import ConfigError
from launch.recipe.guides import a5000_yaml
from launch.recipe.guides.chatlm_flags import Request, read
from launch.recipe.load import Override
from launch.recipe.strict_yaml import check_choice, show

MODES = ("pretrain", "sft")
SIZES = ("medium", "large")
VALUES = ("mode", "config")
SWITCHES = ("cpu", "dry_run")


def translate(argv: Sequence[str]) -> Request:
    """The request that the flags stand for. Raises ConfigError."""
    flags = read(argv, "train.py", SWITCHES, dict.fromkeys(VALUES, ""))
    values, typed_keys = flags.values, flags.overrides
    config = values.get("config")
    if config is not None and config.endswith((".yaml", ".yml")):
        if "mode" in values:
            raise ConfigError(
                f"--mode={show(values['mode'])[1:-1]}: found it beside a YAML file, which says"
                " itself what to train; leave it out"
            )
        recipe, overrides, notes = a5000_yaml.translate(config)
    else:
        has_model = any(key.startswith(("--model.shape=", "--model.path=")) for key in typed_keys)
        recipe, overrides, notes = _built_in(values.get("mode"), config, has_model)
    cpu, dry_run = (flags.switches.get(name, False) for name in SWITCHES)
    resume = flags.resume or "auto"
    return Request(recipe, (*overrides, *typed_keys), resume, cpu, notes, dry_run)


def _built_in(
    mode: str | None, size: str | None, has_model: bool
) -> tuple[str, tuple[Override, ...], tuple[str, ...]]:
    """The recipe of --mode and --config. A typed size names the model. Without it the size is
    medium, or that of the recipe if there is no GPU."""
    if mode is None:
        raise ConfigError(
            f"--mode: found nothing, expected one of {', '.join(MODES)}, or --config=FILE.yaml"
        )
    check_choice(f"--mode={show(mode)[1:-1]}", mode, MODES)
    if size is not None:
        check_choice(f"--config={show(size)[1:-1]}", size, SIZES, " or a .yaml file")
    name = f"minigpt_{size or SIZES[0]}" + ("_sft" if mode == "sft" else "")
    if size is None or has_model:
        return name, (), ()
    return name, (Override(f"--model.shape=minigpt-{size}", f"--config={size}"),), ()
