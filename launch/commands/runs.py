"""`python -m launch watch`, `runs`, `report`, `compare`, `samples`: runs of now and of before."""

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from launch.base import files
from launch.base.errors import ConfigError, Interrupted, ResourceError
from launch.base.text import columns, shown, size
from launch.base.workspace import Workspace
from launch.commands.recipe_arguments import refuse
from launch.predict.history.ledger import Ledger
from launch.run_folder import disk_space, sample_audit
from launch.run_folder.layout import RunDir

_INTERVAL_S = 2.0  # pause between two looks of `watch`
_KEEP = 5  # runs of each recipe that `runs clean` leaves their checkpoints
_RUN_HELP = "a recipe (its newest run), a run's name, or its folder"
FLAGS = {  # the flags of each verb
    "watch": {
        "run": {"nargs": "?", "help": _RUN_HELP},
        "--once": {"action": "store_true", "help": "print the screen once"},
        "--json": {"action": "store_true", "help": "print one JSON object"},
    },
    "runs": {
        "action": {"nargs": "?", "choices": ("clean",), "help": "none: list them"},
        "--json": {"action": "store_true", "help": "list them for scripts"},
        "--keep": {
            "type": int,
            "metavar": "N",
            "help": "clean: the newest N runs of each recipe keep their checkpoints; default 5",
        },
        "--unfinished": {
            "action": "store_true",
            "help": "clean: also checkpoints from which a run could be continued",
        },
        "--dry-run": {
            "action": "store_true",
            "help": "clean: only say what would be removed",
        },
    },
    "report": {
        "run": {"nargs": "?", "help": _RUN_HELP},
        "--calibration": {
            "action": "store_true",
            "help": "predicted beside measured, of all runs",
        },
    },
    "compare": {
        "first": {"metavar": "A", "help": _RUN_HELP},
        "second": {"metavar": "B", "help": "likewise"},
        "--anyway": {
            "action": "store_true",
            "help": "also where model, data or effective batch differ",
        },
    },
    "samples": {"run": {"type": Path, "help": "a folder runs/<recipe>/<time>"}},
}


def main(arguments: Namespace) -> int | None:
    return _VERBS[arguments.verb](Workspace.here(), arguments)


def _runs(workspace: Workspace, arguments: Namespace) -> None:
    return (_clean if arguments.action else _list)(workspace, arguments)


def _compare(workspace: Workspace, arguments: Namespace) -> None:
    from launch.report import compare  # rich's tables

    compare.run(workspace, arguments.first, arguments.second, arguments.anyway)


def _audit(workspace: Workspace, arguments: Namespace) -> None:
    print("\n".join(sample_audit.lines(RunDir(arguments.run))))


def _report(workspace: Workspace, arguments: Namespace) -> None:
    if (arguments.run is None) != arguments.calibration:
        raise ConfigError("report: expected either a run or --calibration, which is of all runs")
    if arguments.calibration:
        print("\n".join(Ledger(workspace.ledger_file, print).calibration_lines()))
        return
    from launch.report import comparable

    page = comparable.find(workspace, arguments.run).report_file
    if not page.is_file():
        raise ResourceError(
            f"{page}: not there, as it is written when a start ends by itself; python -m launch"
            f" watch {shlex.quote(arguments.run)} shows the run now"
        )
    print(shown(f"page: {page}"))


def _list(workspace: Workspace, arguments: Namespace) -> None:
    if arguments.keep is not None or arguments.unfinished or arguments.dry_run:
        raise ConfigError(
            "runs: --keep, --unfinished and --dry-run are for runs clean; add clean, or leave them"
            " out"
        )
    from launch.status import table

    rows = table.rows(workspace.runs)
    if arguments.json:
        print(files.to_json([row.as_json() for row in rows], indent=1))
    elif rows:
        from rich.console import Console

        console = Console(highlight=False)
        console.width = columns(console.width)
        for line in table.lines(rows, console.width):
            console.print(line, crop=False)
        for line in table.next_lines(rows):
            print(line)
    else:
        print(shown(f"no runs in {workspace.runs} yet"))


def _clean(workspace: Workspace, arguments: Namespace) -> None:
    """Free disk space by the rules of disk_space.py."""
    keep = _KEEP if arguments.keep is None else arguments.keep
    refuse(
        (keep < 0, f"runs clean --keep {keep}: expected 0 or more runs, such as --keep 5"),
        (arguments.json, "runs clean: --json is for the list alone; leave it out"),
    )
    freed_bytes = 0
    removals, stays = disk_space.survey(workspace.runs, keep, arguments.unfinished)
    for removal in removals:
        part = "checkpoints of the" if removal.rule in ("complete", "unfinished") else "a"
        name = f"{removal.run.root.parent.name}/{removal.run.root.name}"
        line = (
            f"{part} {removal.rule}{' run' if part != 'a' else ''}: {name}, {size(removal.bytes)}"
        )
        line += f" ({removal.note})" if removal.note else ""
        if not arguments.dry_run and not disk_space.remove(removal):
            line = f"stays: {name}: a start has just taken it"
        else:
            freed_bytes += removal.bytes
        print(shown(line))
    for line in stays:
        print(shown(f"stays: {line}"))
    print(f"{'would free' if arguments.dry_run else 'freed'} {size(freed_bytes)}")


def _watch(workspace: Workspace, arguments: Namespace) -> int | None:
    from rich.console import Console
    from rich.live import Live

    from launch.status import watch

    watcher = watch.Watcher(workspace, arguments.run)
    if arguments.json:
        state = {
            "runs": [asdict(run) for run in watcher.runs()],
            "waiting": watcher.waiting(),
            "cards": [asdict(card) for card in watch.cards()],
        }
        print(json.dumps(state, indent=1))
        return None
    console = Console()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        page = watch.in_encoding(watcher.page(), console.encoding)
        console.print(page, soft_wrap=True)
        return None
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                page = watch.in_encoding(watcher.page(console), console.encoding)
                live.update(page, refresh=True)
                time.sleep(_INTERVAL_S)
    except Interrupted as stopped:  # Ctrl-C is how one leaves it
        return stopped.exit_code


_VERBS: dict[str, Callable[[Workspace, Namespace], int | None]] = {
    "watch": _watch,
    "runs": _runs,
    "report": _report,
    "compare": _compare,
    "samples": _audit,
}
