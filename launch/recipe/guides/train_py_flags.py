"""The flags of scripts/train.py become a recipe's name and overrides: --mode pretrain|sft --config
medium|large of the A6000 guide, or --config FILE.yaml of the A5000 guide. With --name=value, --name
value, and keys of a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.recipe.guides import a5000_yaml
from launch.recipe.guides.chatlm_flags import Request, boolean, flags_of, nearest_flag, override
from launch.recipe.load import Override
from launch.recipe.strict_yaml import show
from launch.schema.recipe import Recipe

MODES = ("pretrain", "sft")
SIZES = ("medium", "large")
VALUES = ("mode", "config")
SWITCHES = ("cpu", "dry_run")
RESUME = "resume"


def translate(argv: Sequence[str]) -> Request:
    """What was typed. Raises ConfigError."""
    given: dict[str, str] = {}
    switches: dict[str, bool] = {}
    typed_keys: list[str] = []
    wish = "auto"
    for name, value, typed in flags_of(list(argv)):
        if name in VALUES:
            if value is None:
                raise ConfigError(f"{typed}: found no value, expected --{name}=VALUE")
            given[name] = value
        elif name in SWITCHES:
            switches[name] = boolean(value, typed)
        elif name == RESUME:
            wish = value or "auto"
        elif "." in name or name in Recipe.model_fields:
            typed_keys.append(override(name, value, typed))
        else:
            near = nearest_flag(name, (*VALUES, *SWITCHES, RESUME))
            known = ", ".join(
                f"--{flag.replace('_', '-')}" for flag in (*VALUES, *SWITCHES, RESUME)
            )
            hint = f"did you mean --{near}?" if near else f"there are {known}"
            raise ConfigError(
                f"{typed.partition('=')[0]}: found an unknown flag, expected one of train.py's;"
                f" {hint}"
            )
    config = given.get("config")
    if config is not None and config.endswith((".yaml", ".yml")):
        if "mode" in given:
            raise ConfigError(
                f"--mode={show(given['mode'])[1:-1]}: found it beside a YAML file, which says"
                " itself what to train; leave it out"
            )
        recipe, keys, notes = a5000_yaml.translate(config)
    else:
        has_model = any(key.startswith(("--model.shape=", "--model.path=")) for key in typed_keys)
        recipe, keys, notes = _built_in(given.get("mode"), config, has_model)
    return Request(
        recipe,
        (*keys, *typed_keys),
        wish,
        switches.get("cpu", False),
        notes,
        switches.get("dry_run", False),
    )


def _built_in(
    mode: str | None, size: str | None, has_model: bool
) -> tuple[str, tuple[Override, ...], tuple[str, ...]]:
    """The recipe of --mode and --config. A size that was typed names the model; left out, it is
    medium, or what the recipe has where there is no GPU."""
    if mode is None:
        raise ConfigError(
            f"--mode: found nothing, expected one of {', '.join(MODES)}, or --config=FILE.yaml"
        )
    _check("mode", mode, MODES)
    if size is not None:
        _check("config", size, SIZES, " or a .yaml file")
    name = f"minigpt_{size or SIZES[0]}" + ("_sft" if mode == "sft" else "")
    if size is None or has_model:
        return name, (), ()
    model = Override(f"--model.shape=minigpt-{size}")
    model.typed = f"--config={size}"
    return name, (model,), ()


def _check(flag: str, value: str, known: Sequence[str], other: str = "") -> None:
    if value not in known:
        near = "".join(f"; did you mean {word}?" for word in nearest(value, known))
        text = show(value)[1:-1]
        raise ConfigError(
            f"--{flag}={text}: found {show(value)}, expected one of {', '.join(known)}{other}{near}"
        )
