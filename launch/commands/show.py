"""`python -m launch show`: rows as they will be trained, and which tokens have a loss."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from launch.base.errors import ConfigError, DataError
from launch.base.files import expanded
from launch.commands import recipe_arguments
from launch.commands.recipe_arguments import RecipeArguments
from launch.data.files import shards
from launch.plan import resolve
from launch.predict.facts import Facts
from launch.schema.recipe import Recipe
from launch.supervise import show_rows

_ANY = 1_000_000_000  # bad rows
ROWS = 5


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text}, expected a number from 1")
    return int(text)


FLAGS = {
    **recipe_arguments.RECIPE_FLAGS,
    "--rows": {
        "type": _positive,
        "help": f"the first rows of each source (default {ROWS})",
    },
    "--file": {
        "help": "a file of data.train_file or data.validation_file (default: the first of"
        " each source of data.train_file; with --line the first)"
    },
    "--line": {"type": _positive, "help": "the row at this line of the file alone"},
}


def main(arguments: Namespace, unparsed: Sequence[str]) -> None:
    if arguments.rows is not None and arguments.line is not None:
        raise ConfigError("show: --rows and --line are both given; --line shows one row alone")
    facts = _facts(recipe_arguments.read(arguments, unparsed), arguments.line)
    tokens = facts.rows.tokens
    assert tokens is not None
    files = _files(facts.recipe, arguments.file, arguments.line)
    rows = show_rows.encoded(tokens, files, arguments.rows or ROWS, arguments.line)
    from rich.console import Console

    from launch.report import shown_rows

    console = Console(highlight=False, soft_wrap=True)
    colours = console.is_terminal and not console.no_color
    data, is_one_row = facts.recipe.data, arguments.line is not None
    lines = shown_rows.lines(
        data, facts.rows.format, files, rows, colours, is_one_row, console.encoding
    )
    console.print(*lines, sep="\n")
    if arguments.line is None:
        show_rows.refuse_untrained(files, rows)


def _facts(typed: RecipeArguments, line: int | None) -> Facts:
    """The recipe's facts. A row at a line is shown whatever other rows are bad."""

    def read(overrides: Sequence[str]) -> Facts:
        return resolve.read(
            typed.recipe,
            overrides,
            wishes=typed.wishes,
            say=recipe_arguments.say if typed.download else lambda line: None,
            trace=False,
            download=typed.download,
        )

    try:
        return read(typed.overrides)
    except DataError:
        if line is None:
            raise
        return read([*typed.overrides, f"data.max_bad_rows={_ANY}"])


def _files(recipe: Recipe, requested: str | None, line: int | None) -> list[Path]:
    """The files whose rows are shown. Raises ConfigError for a file of another recipe."""
    if requested is None:
        first = [shards.list_shards(Path(source.path))[0] for source in recipe.data.sources]
        return first if line is None else first[:1]
    files = [file for name in recipe.data.paths for file in shards.list_shards(name)]
    path = expanded(requested).resolve()
    if path not in [file.resolve() for file in files]:
        names = ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise ConfigError(
            f"--file {requested}: expected a file of data.train_file or data.validation_file, which"
            f" are {names}"
        )
    return [path]
