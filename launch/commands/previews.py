"""`python -m launch plan`, `fit`, `show`, `keys`: what a training would be, before there is one."""

import math
import shutil
import sys
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

from launch.base import compile_caches
from launch.base.errors import ConfigError, DataError, ResourceError
from launch.base.files import expanded, to_json
from launch.base.text import columns, nearest, shown, size, suggestion
from launch.base.workspace import FILES, Workspace
from launch.commands import recipe_arguments
from launch.commands.recipe_arguments import RecipeArguments
from launch.data.files import shards
from launch.plan import fit, resolve
from launch.predict.facts import Facts
from launch.probe import import_memory
from launch.probe import machine as probe_machine
from launch.queue import admission
from launch.recipe import key_reference
from launch.recipe.strict_yaml import show
from launch.report import first_screen, plan_lines
from launch.schema.machine import NOT_LEASED
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS
from launch.supervise import show_rows

_MOST_TOKENS = 1 << 20  # limit of --length
_ANY = 1_000_000_000  # bad rows
_ROWS = 5
_WIDTH = 100  # columns of `keys`


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text}, expected a number from 1")
    return int(text)


FLAGS = {  # the flags of each verb
    "plan": {
        **recipe_arguments.RECIPE_FLAGS,
        **recipe_arguments.EXPLAIN,
        "--json": {
            "action": "store_true",
            "help": "print the plan for scripts, as plan.json in a run (docs/plan_json.md)",
        },
        **recipe_arguments.MACHINE_FLAGS,
        "--rows-of": {
            "metavar": "TOKENS",
            "help": "plan for rows that are all this long, so that none is padded; nothing is"
            " tokenised",
        },
    },
    "fit": {
        **recipe_arguments.MACHINE_FLAGS,
        "--model": {
            "action": "append",
            "metavar": "SHAPE",
            "help": "a shape of configs/models, may be repeated (default:"
            f" {', '.join(fit.MODELS)})",
        },
        "--length": {
            "action": "append",
            "metavar": "TOKENS",
            "help": "tokens of a row, may be repeated (default:"
            f" {', '.join(map(str, fit.LENGTHS))})",
        },
        "--json": {"action": "store_true", "help": "print the table for scripts"},
        "--lines": {
            "action": "store_true",
            "help": "print the line that trains each row that fits",
        },
    },
    "show": {
        **recipe_arguments.RECIPE_FLAGS,
        "--rows": {
            "type": _positive,
            "help": f"the first rows of each source (default {_ROWS})",
        },
        "--file": {
            "help": "a file of data.train_file or data.validation_file (default: the first of"
            " each source of data.train_file; with --line the first)"
        },
        "--line": {"type": _positive, "help": "the row at this line of the file alone"},
    },
    "keys": {
        "section": {
            "nargs": "?",
            "default": "",
            "help": "of this section alone, or this key alone",
        },
    },
}


def main(arguments: Namespace, *unparsed: Sequence[str]) -> None:
    """`unparsed`: the recipe and its keys, of the verbs that take them."""
    _VERBS[arguments.verb](arguments, *unparsed)


def _plan(arguments: Namespace, unparsed: Sequence[str]) -> None:
    """Show what would run, and why."""
    if arguments.json and arguments.explain:
        raise ConfigError("--json and --explain: expected one of them; --json has the whole plan")
    typed = recipe_arguments.read(arguments, unparsed)
    rows_of = (
        None
        if arguments.rows_of is None
        else recipe_arguments.whole_number(
            *("--rows-of", arguments.rows_of, 1, math.inf),
            "a number of tokens from 1 to data.max_length, such as --rows-of 512",
        )
    )
    compile_caches.settle()
    described = recipe_arguments.described_machine(arguments)
    choice = resolve.resolve(
        typed.recipe,
        typed.overrides,
        described,
        typed.wishes,
        NOT_LEASED if described else admission.leased_now(),
        partial(print, file=sys.stderr) if typed.download else lambda line: None,
        rows_of=rows_of,
        as_folder=True,
        download=typed.download,
    )
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    if arguments.json:
        rows = [asdict(fact) for fact in plan_lines.facts(recipe, machine, plan)]
        print(to_json({**asdict(plan), "facts": rows}, indent=1))
    elif arguments.explain:
        print(shown("\n".join(plan_lines.full_text(recipe, machine, plan))))
    else:
        screen = first_screen.lines(recipe, machine, plan, datetime.now(), columns=columns())
        print(shown("\n".join(screen)))


def _fit(arguments: Namespace) -> None:
    """Show which known models a machine trains, with which changes, how fast."""
    if arguments.json and arguments.lines:
        raise ConfigError("--json and --lines: expected one of them; --json has each line, too")
    models = [_model_name(name) for name in arguments.model or fit.MODELS]
    lengths = [
        recipe_arguments.whole_number(
            "--length", text, 8, _MOST_TOKENS, f"tokens from 8 to {_MOST_TOKENS:,}"
        )
        for text in arguments.length or map(str, fit.LENGTHS)
    ]
    workspace = Workspace.here()
    machine = recipe_arguments.described_machine(arguments) or probe_machine.machine(
        run_dir=workspace.root
    )
    if not machine.gpus:
        raise ResourceError(
            f'fit: there is no GPU ({machine.gpus_reason}); name one: --gpu "RTX 4090" --ram 64'
        )
    of_imports = import_memory.measured_or_assumed(workspace.cache, "cuda")
    answers = []
    total = len(models) * len(fit.METHODS) * len(lengths)
    for each in fit.fits(
        machine, of_imports, workspace.traces, models, lengths=lengths, say=_progress
    ):
        answers.append(each)
        _progress(f"{len(answers)} of {total}: {each.model} {each.method} {each.length}")
    _progress("")
    from launch.report import fit_table

    if arguments.json:
        print(to_json({"machine": machine.name, "fits": fit_table.as_json(answers)}, indent=1))
    elif arguments.lines:
        print("\n".join(fit_table.lines(answers)))
    else:
        from rich.console import Console

        console = Console(width=columns(), highlight=False)
        title = f"{machine.name}, {size(machine.host_limit_bytes)} of RAM: what fits"
        console.print(fit_table.table(answers, title))
        assumed = [f"Assumed: {machine.assumed}."] if machine.assumed else []
        console.print(
            *assumed, fit_table.margin_line(answers), *fit_table.legend(len(machine.gpus)), sep="\n"
        )


def _progress(line: str) -> None:
    """Show progress in the place of the last line on a terminal, and none in a file or a pipe."""
    if sys.stderr.isatty():
        line = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _model_name(name: str) -> str:
    names = sorted(path.stem for path in (FILES / "configs" / "models").glob("*.yaml"))
    if name not in names:
        raise ConfigError(
            f"--model {show(name)[1:-1]}: no such shape in configs/models;"
            f" {suggestion(name, names)}"
        )
    return name


def _show(arguments: Namespace, unparsed: Sequence[str]) -> None:
    """Show rows as they will be trained, and which tokens have a loss."""
    if arguments.rows is not None and arguments.line is not None:
        raise ConfigError("show: --rows and --line are both given; --line shows one row alone")
    facts = _facts(recipe_arguments.read(arguments, unparsed), arguments.line)
    tokens = facts.rows.tokens
    assert tokens is not None
    files = _files(facts.recipe, arguments.file, arguments.line)
    rows = show_rows.encoded(tokens, files, arguments.rows or _ROWS, arguments.line)
    from rich.console import Console

    from launch.report import shown_rows

    console = Console(highlight=False, soft_wrap=True)
    colours = console.is_terminal and not console.no_color
    data, is_one_row = facts.recipe.data, arguments.line is not None
    console.print(
        *shown_rows.lines(
            data, facts.rows.format, files, rows, colours, is_one_row, console.encoding
        ),
        sep="\n",
    )
    if not is_one_row:
        show_rows.refuse_untrained(files, rows)


def _facts(typed: RecipeArguments, line: int | None) -> Facts:
    """The recipe's facts. A row at a line is shown whatever other rows are bad."""
    read = partial(
        resolve.read,
        typed.recipe,
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


def _list_keys(arguments: Namespace) -> None:
    """List every key of a recipe with its type, default and meaning."""
    section: str = arguments.section
    listed = [
        key
        for key in key_reference.all_keys()
        if not section or f"{key.name}.".startswith(f"{section}.")
    ]
    if not listed:
        near = nearest(section, SECTIONS) or [key_reference.likely(section) or ""]
        hint = f"did you mean {near[0]}?" if near[0] else "python -m launch keys lists all"
        raise ConfigError(f"keys: {show(section)} is no section and no key of a recipe; {hint}")
    indent = " " * 4
    for key in listed:
        print(f"{key.name}: {key.type}; default {key.default}")
        print(textwrap.fill(key.meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent))


_VERBS: dict[str, Callable[..., None]] = {
    "plan": _plan,
    "fit": _fit,
    "show": _show,
    "keys": _list_keys,
}
