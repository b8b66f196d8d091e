"""Arguments that plan, run and tune share: a recipe, a batch size and keys of the recipe."""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.base.errors import ConfigError
from launch.base.text import shown
from launch.commands import foreign_launcher
from launch.plan.candidates import LaunchConstraints
from launch.recipe import load
from launch.recipe.strict_yaml import show

AUTO = "auto"
BATCH_KEY = "per_device_train_batch_size"
EPILOG = """RECIPE is a name in configs/recipes/, or a file. BATCH is per_device_train_batch_size,
or auto: the fastest, found by short trials unless an earlier start has found it.

Every key of the recipe can be set, as --section.key=value or --section.key value:
    --training.learning_rate=3e-5 --model.shape=t5-tiny --lora.r=8
`python -m launch keys` lists them."""


@dataclass(frozen=True)
class RecipeArguments:
    """What plan, run and tune are asked for."""

    recipe: str
    is_auto: bool  # the batch size was typed as `auto`
    overrides: list[str]
    constraints: LaunchConstraints


def add_parser(subparsers: Any, verb: str, description: str, usage: str) -> ArgumentParser:
    """The parser of a verb that takes a recipe. The recipe, the batch size and keys are left to
    read(), because argparse would take the value of an unknown flag for one of them."""
    parser = subparsers.add_parser(
        verb,
        help=description,
        description=description,
        usage=f"%(prog)s RECIPE {usage} [--section.key=value ...]",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, key in (("--assume-fits", "assume_fits"), ("--exact-batch", "exact_batch")):
        parser.add_argument(
            flag,
            action="append_const",
            dest="switches",
            const=f"--launch.{key}=true",
            help=f"short for --launch.{key}=true",
        )
    return parser


def read(
    verb: str, others: Sequence[str], switches: Sequence[str] | None, variables: Sequence[str] = ()
) -> RecipeArguments:
    """What argparse left: a recipe, a batch size and keys. `variables` are overrides of weaker
    standing. Raises ConfigError."""
    keys, names = _split(others)
    if not names:
        raise _mistake(verb, "expected a recipe")
    reject(verb, names[1 if verb == "tune" else 2 :])
    batch = names[1] if len(names) == 2 else None
    overrides = [*variables, *(switches or ()), *keys]
    batch_keys = [
        text for text in overrides if text.partition("=")[0].replace("-", "_").endswith(BATCH_KEY)
    ]
    if batch is not None and batch_keys:
        other = getattr(batch_keys[0], "typed", "") or f"--training.{BATCH_KEY}"
        raise ConfigError(f"batch {batch} and {other} are both given; keep one")
    if batch not in (None, AUTO):
        overrides.append(f"--training.{BATCH_KEY}={load.check_batch(batch)}")
    constraints = LaunchConstraints(
        force_gloo=foreign_launcher.asks_for_gloo(os.environ),
        free_batch=batch == AUTO,
        wants_tuned=batch in (None, AUTO) and not batch_keys and verb != "tune",
    )
    return RecipeArguments(names[0], batch == AUTO, overrides, constraints)


def _split(others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys as `--key=value`, and the words that are none. A key without = takes the next word."""
    keys: list[str] = []
    names: list[str] = []
    queue = list(others)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            names.append(word)
        elif "=" in word:
            keys.append(word)
        elif queue and not queue[0].startswith("--"):
            keys.append(f"{word}={queue.pop(0)}")
        else:
            raise ConfigError(f"{word}: a key of the recipe needs a value, as in {word}=VALUE")
    return keys, names


def reject(verb: str, others: Sequence[str]) -> None:
    """Refuse what argparse left of a verb that takes no recipe. Raises ConfigError."""
    if others:
        raise _mistake(verb, f"{show(others[0])[1:-1]} was not expected")


def _mistake(verb: str, what: str) -> ConfigError:
    return ConfigError(f"{verb}: {what}; see python -m launch {verb} --help")


def say(line: str) -> None:
    """Print a line at once, into a file too, without secrets."""
    print(shown(line), flush=True)
