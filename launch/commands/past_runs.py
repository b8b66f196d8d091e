"""`python -m launch report`, `compare` and `samples`: figures of past runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.predict.history.ledger import Ledger
from launch.run_folder import sample_audit
from launch.run_folder.layout import RunDir

DESCRIPTIONS = {
    "report": "show how well predictions agreed with the runs so far",
    "compare": "show two runs side by side: speed, memory, losses; a table and a page",
    "samples": "show that a run has trained each row once an epoch",
}


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    parser = recipe_arguments.add_simple_parser(subparsers, verb, DESCRIPTIONS[verb])
    if verb == "samples":
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
    if arguments.verb == "compare":
        from launch.report import compare  # rich's tables

        return compare.run(workspace, arguments.first, arguments.second, arguments.anyway)
    if arguments.verb == "report":
        lines = Ledger(workspace.ledger_file, print).calibration_lines()
    else:
        lines = sample_audit.lines(RunDir(arguments.run))
    print("\n".join(lines))
    return 0
