"""The guides' `train --is_finetune=True --batch_size_per_gpu=20` becomes a recipe's name and
overrides of its keys.

google-fire's forms are read: --name=value, --name value, --name (True), --noname (False), with - or
_ between words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.recipe import key_reference
from launch.recipe.load import Override
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS

RECIPES = {  # flag -> recipe; the first one that is set wins
    "use_large_config": "pretrain_large",
    "use_fast_config": "sft_fast",
    "use_small_config": "sft_small",
    "is_finetune": "sft",
}
SWITCHES = (*RECIPES, "is_keep_training", "cpu", "dry_run")
VALUES = {  # flag -> recipe key
    "batch_size_per_gpu": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "epochs": "training.num_train_epochs",
    "learn_rate": "training.learning_rate",
    "max_seq_len": "data.max_length",
    "save_steps": "training.save_steps",
    "train_file": "data.train_file",
    "validation_file": "data.validation_file",
}
_BOOLEANS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


@dataclass(frozen=True)
class Request:
    """The typed request: a recipe, its overrides, and the way to start."""

    recipe: str
    overrides: tuple[str, ...]
    resume: str  # auto, never, or the path of a checkpoint
    cpu: bool = False
    notes: tuple[str, ...] = ()  # for the reader, on the interpretation of what was typed
    dry_run: bool = False  # print the plan, and end


@dataclass
class _Flags:
    """Flags as they were typed."""

    switches: dict[str, bool] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # of flags that are no key of a recipe
    overrides: list[str] = field(default_factory=list)  # in the order typed
    resume: str | None = None


def translate(argv: Sequence[str]) -> Request:
    """The request that the guides' flags stand for. Raises ConfigError."""
    argv = argv[1:] if argv[:1] == ["train"] else argv
    flags = read(argv, "train", SWITCHES, VALUES)
    switches, resume = flags.switches, flags.resume
    recipe = next((recipe for flag, recipe in RECIPES.items() if switches.get(flag)), "pretrain")
    continues = switches.get("is_keep_training", True)
    if resume is not None and (not resume or (resume != "never" and not continues)):
        mistake = "it beside --is_keep_training=False" if resume else "no value"
        raise ConfigError(
            f"--resume={resume}: found {mistake}, expected auto, never or the path of a checkpoint"
        )
    resume = resume or ("auto" if continues else "never")
    cpu, dry_run = (switches.get(name, False) for name in ("cpu", "dry_run"))
    return Request(recipe, tuple(flags.overrides), resume, cpu, dry_run=dry_run)


def read(
    argv: Sequence[str], program: str, switches: Sequence[str], values: Mapping[str, str]
) -> _Flags:
    """The flags of a program, and keys of a recipe. `values`: a key of the recipe for each flag
    with a value, "" for one that is none. Raises ConfigError."""
    flags = _Flags()
    for name, value, typed in _flags_of(argv):
        if name in switches:
            flags.switches[name] = _boolean(value, typed)
        elif (positive := name.removeprefix("no").lstrip("_")) in switches and value is None:
            flags.switches[positive] = False
        elif name == "noresume" and value is None:
            flags.resume = "never"
        elif name == "resume":
            flags.resume = "auto" if value is None else value
        elif name in values and value is None:
            raise ConfigError(f"{typed}: found no value, expected --{name}=VALUE")
        elif name in values and not values[name]:
            flags.values[name] = value or ""
        elif name in values or "." in name or name in Recipe.model_fields:
            text = f"--{values.get(name, name)}={'true' if value is None else value}"
            flags.overrides.append(Override(text, typed if name in values else ""))
        else:
            raise _unknown(typed, name, program, (*switches, *values, "resume"))
    return flags


def _flags_of(argv: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yield each flag's name, its value (None if it has none) and the text that was typed."""
    remaining = list(argv)
    while remaining:
        typed = remaining.pop(0)
        if not typed.startswith("--") or typed == "--":
            raise ConfigError(
                f"{typed!r}: found no flag, expected --name=value, as in --batch_size_per_gpu=20"
            )
        name, equals, text = typed.removeprefix("--").partition("=")
        value = text if equals else None
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
            typed = f"{typed}={value}"
        yield name.replace("-", "_"), value, typed if typed.isprintable() else repr(typed)


def _boolean(value: str | None, typed: str) -> bool:
    if value is not None and value not in _BOOLEANS:
        raise ConfigError(f"{typed}: found {value!r}, expected True or False")
    return value is None or _BOOLEANS[value]


def _unknown(typed: str, name: str, program: str, flags: Sequence[str]) -> ConfigError:
    """The error for an unknown flag, with the nearest flag or recipe key. It does not repeat the
    flag's value, which may be a secret."""
    written = {
        **{
            key: f"{section}.{key}"
            for section, model in reversed([*SECTIONS.items()])
            for key in model.model_fields
        },
        **{flag: flag for flag in (*flags, *Recipe.model_fields)},
    }
    listed = ", ".join(f"--{flag}" for flag in flags)
    meant = key_reference.ALIASES.get(name)
    near = [f"did you mean --{meant}?"] if meant and meant not in VALUES.values() else []
    near += [f"did you mean --{written[key]}?" for key in nearest(name, written)]
    return ConfigError(
        f"{typed.partition('=')[0]}: found an unknown flag, expected one of {program}'s;"
        f" {(near or [f'there are {listed}'])[0]}"
    )
