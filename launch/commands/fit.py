"""`python -m launch fit`: which known models a machine trains, with which changes, how fast."""

import shutil
import sys
from argparse import Namespace

from launch.base.errors import ConfigError, ResourceError
from launch.base.files import to_json
from launch.base.text import columns, size, suggestion
from launch.base.workspace import FILES, Workspace
from launch.commands import recipe_arguments
from launch.plan import fit
from launch.probe import import_memory
from launch.probe import machine as probe_machine
from launch.recipe.strict_yaml import show

_MOST_TOKENS = 1 << 20  # limit of --length


FLAGS = {
    **recipe_arguments.MACHINE_FLAGS,
    "--model": {
        "action": "append",
        "metavar": "SHAPE",
        "help": f"a shape of configs/models, may be repeated (default: {', '.join(fit.MODELS)})",
    },
    "--length": {
        "action": "append",
        "metavar": "TOKENS",
        "help": f"tokens of a row, may be repeated (default: {', '.join(map(str, fit.LENGTHS))})",
    },
    "--json": {"action": "store_true", "help": "print the table for scripts"},
    "--lines": {
        "action": "store_true",
        "help": "print the line that trains each row that fits",
    },
}


def main(arguments: Namespace) -> None:
    if arguments.json and arguments.lines:
        raise ConfigError("--json and --lines: expected one of them; --json has each line, too")
    models = [_model_name(name) for name in arguments.model or fit.MODELS]
    expected = f"tokens from 8 to {_MOST_TOKENS:,}"
    lengths = [
        recipe_arguments.whole_number("--length", text, 8, _MOST_TOKENS, expected)
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
    traced = fit.fits(machine, of_imports, workspace.traces, models, lengths=lengths, say=_say)
    total = len(models) * len(fit.METHODS) * len(lengths)
    for each in traced:
        answers.append(each)
        _say(f"{len(answers)} of {total}: {each.model} {each.method} {each.length}")
    _say("")
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


def _say(line: str) -> None:
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
