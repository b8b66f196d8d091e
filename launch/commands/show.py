"""`python -m launch show`: rows as they will be trained, and which tokens have a loss."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError
from launch.commands import recipe_arguments
from launch.data import shards
from launch.plan import resolve
from launch.schema.recipe import Recipe
from launch.supervise import show_rows


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    parser = recipe_arguments.add_parser(
        subparsers,
        verb,
        "show rows as they will be trained, and which tokens have a loss",
        "[--rows N] [--file FILE] [--line N]",
    )
    parser.add_argument("--rows", type=_positive, default=5, help="the first rows (default 5)")
    parser.add_argument(
        "--file", help="a file of data.train_file or data.validation_file (default: the first)"
    )
    parser.add_argument("--line", type=_positive, help="the row at this line of the file alone")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text}, expected a number from 1")
    return int(text)


def main(arguments: Namespace, others: Sequence[str]) -> int:
    typed = recipe_arguments.read(arguments, others)
    facts = resolve.read(typed.recipe, typed.overrides, constraints=typed.constraints, trace=False)
    tokens = facts.context.tokens
    assert tokens is not None
    file = _file(facts.context.recipe, arguments.file)
    rows = show_rows.encoded(tokens, [file], arguments.rows, arguments.line)
    from rich.console import Console

    from launch.report import shown_rows

    console = Console(highlight=False, soft_wrap=True)
    colours = console.is_terminal and not console.no_color
    for line in shown_rows.lines(facts.context, file, rows, colours):
        console.print(line)
    return 0


def _file(recipe: Recipe, asked: str | None) -> Path:
    """The file whose rows are shown. Raises ConfigError for a file of another recipe."""
    files = [file for name in recipe.data.paths for file in shards.of(name)]
    if asked is None:
        return files[0]
    path = Path(asked).expanduser().resolve()
    if path not in [file.resolve() for file in files]:
        names = ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise ConfigError(
            f"--file {asked}: expected a file of data.train_file or data.validation_file, which"
            f" are {names}"
        )
    return path
