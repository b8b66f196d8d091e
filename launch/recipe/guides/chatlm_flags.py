"""The guides' `train --is_finetune=True --batch_size_per_gpu=20` becomes a recipe's name and
overrides of its keys.

google-fire's forms are read: --name=value, --name value, --name (True), --noname (False), with - or
_ between words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.recipe.load import Override
from launch.schema.recipe import SECTIONS, Recipe

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
BOOLEANS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


@dataclass(frozen=True)
class Request:
    """What was typed: a recipe, its overrides, and how to start."""

    recipe: str
    overrides: tuple[str, ...]
    resume: str  # auto, never, or the path of a checkpoint
    cpu: bool = False
    notes: tuple[str, ...] = ()  # what a reader should know of how it was understood
    dry_run: bool = False  # print the plan, and end


def translate(argv: Sequence[str]) -> Request:
    """The request that the guides' flags stand for, in the order typed. Raises ConfigError."""
    switches: dict[str, bool] = {}
    overrides: list[str] = []
    resume: str | None = None
    for name, value, typed in flags_of(list(argv[1:] if argv[:1] == ["train"] else argv)):
        if name in SWITCHES:
            switches[name] = boolean(value, typed)
        elif (positive := name.removeprefix("no").lstrip("_")) in SWITCHES and value is None:
            switches[positive] = False
        elif name == "noresume" and value is None:
            resume = "never"
        elif name == "resume":
            resume = "auto" if value is None else value
        elif name in VALUES or "." in name or name in Recipe.model_fields:
            overrides.append(override(name, value, typed))
        else:
            flag = typed.partition("=")[0]  # not its value: it may be a secret
            raise ConfigError(
                f"{flag}: found an unknown flag, expected one of train's; {_suggestion(name)}"
            )
    recipe = next((recipe for flag, recipe in RECIPES.items() if switches.get(flag)), "pretrain")
    keep = switches.get("is_keep_training", True)
    if resume is not None and (not resume or (resume != "never" and not keep)):
        found = "it beside --is_keep_training=False" if resume else "no value"
        raise ConfigError(
            f"--resume={resume}: found {found}, expected auto, never or the path of a checkpoint"
        )
    wish = resume or ("auto" if keep else "never")
    cpu, dry_run = (switches.get(name, False) for name in ("cpu", "dry_run"))
    return Request(recipe, tuple(overrides), wish, cpu, dry_run=dry_run)


def flags_of(words: list[str]) -> list[tuple[str, str | None, str]]:
    """Each flag's name, its value (None: it has none) and the text that was typed."""
    flags: list[tuple[str, str | None, str]] = []
    while words:
        typed = words.pop(0)
        if not typed.startswith("--") or typed == "--":
            raise ConfigError(
                f"{typed!r}: found no flag, expected --name=value, as in --batch_size_per_gpu=20"
            )
        name, equals, text = typed.removeprefix("--").partition("=")
        value = text if equals else None
        name = name.replace("-", "_")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
            typed = f"{typed}={value}"
        flags.append((name, value, typed if typed.isprintable() else repr(typed)))
    return flags


def boolean(value: str | None, typed: str) -> bool:
    if value is not None and value not in BOOLEANS:
        raise ConfigError(f"{typed}: found {value!r}, expected True or False")
    return value is None or BOOLEANS[value]


def override(name: str, value: str | None, typed: str) -> Override:
    key = VALUES.get(name, name)
    if value is None and name in VALUES:
        raise ConfigError(f"{typed}: found no value, expected --{name}=VALUE")
    made = Override(f"--{key}={'true' if value is None else value}")
    if name in VALUES:
        made.typed = typed
    return made


def _suggestion(name: str) -> str:
    """The nearest flag, or the nearest key of a recipe as it is written on the command line."""
    near = nearest_flag(name, (*RECIPES, *SWITCHES, *VALUES, "resume"))
    return (
        f"did you mean --{near}?"
        if near
        else f"there are {', '.join((*SWITCHES, *VALUES, 'resume'))}"
    )


def nearest_flag(name: str, flags: Sequence[str]) -> str | None:
    """The nearest of these flags and of a recipe's keys, as it is written on the command line."""
    known = {flag: flag for flag in (*flags, *Recipe.model_fields)}
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            known.setdefault(key, f"{section}.{key}")
    return next((known[near] for near in nearest(name, known)), None)
