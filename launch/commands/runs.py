"""`python -m launch watch`, `report`, `compare` and `samples`: runs of now and of before."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.base.errors import Interrupted
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.predict.history.ledger import Ledger
from launch.run_folder import sample_audit
from launch.run_folder.layout import RunDir

INTERVAL_S = 2.0  # between two looks of `watch`
DESCRIPTIONS = {
    "watch": "show the runs of this machine: state, step, time left, loss, memory",
    "report": "show how well predictions agreed with the runs so far",
    "compare": "show two runs side by side: speed, memory, losses; a table and a page",
    "samples": "show that a run has trained each row once an epoch",
}


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    parser = recipe_arguments.add_simple_parser(subparsers, verb, DESCRIPTIONS[verb])
    if verb == "watch":
        parser.add_argument("run", nargs="?", help="a recipe (its newest run) or a run's folder")
        parser.add_argument("--once", action="store_true", help="print the screen once")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    elif verb == "samples":
        parser.add_argument("run", type=Path, help="a folder runs/<recipe>/<time>")
    elif verb == "report":
        parser.add_argument(
            "--calibration",
            action="store_true",
            required=True,
            help="predicted beside measured, of all runs",
        )
    else:
        parser.add_argument(
            "first", metavar="A", help="a recipe (its newest run), a run's name, or its folder"
        )
        parser.add_argument("second", metavar="B", help="likewise")
        parser.add_argument(
            "--anyway", action="store_true", help="also where model, data or effective batch differ"
        )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    recipe_arguments.reject(arguments, others)
    workspace = Workspace.here()
    if arguments.verb == "watch":
        return _watch(workspace, arguments)
    if arguments.verb == "compare":
        from launch.report import compare  # rich's tables

        return compare.run(workspace, arguments.first, arguments.second, arguments.anyway)
    if arguments.verb == "report":
        lines = Ledger(workspace.ledger_file, print).calibration_lines()
    else:
        lines = sample_audit.lines(RunDir(arguments.run))
    print("\n".join(lines))
    return 0


def _watch(workspace: Workspace, arguments: Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from launch.status.watcher import Watcher, cards

    watcher = Watcher(workspace, arguments.run)
    if arguments.json:
        state = {
            "runs": [asdict(run) for run in watcher.runs()],
            "waiting": watcher.waiting(),
            "cards": [asdict(card) for card in cards()],
        }
        print(json.dumps(state, indent=1))
        return 0
    console = Console()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        console.print(watcher.page(), soft_wrap=True)
        return 0
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(watcher.page(), refresh=True)
                time.sleep(INTERVAL_S)
    except Interrupted as stopped:  # Ctrl-C is how one leaves it
        return stopped.exit_code
