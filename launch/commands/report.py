"""`python -m launch report`: predictions beside what all runs so far measured."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.predict.history.ledger import Ledger


def add_parser(subparsers: Any) -> ArgumentParser:
    text = "show how well predictions agreed with the runs so far"
    parser = subparsers.add_parser("report", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "--calibration",
        action="store_true",
        required=True,
        help="predicted beside measured, of all runs",
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    recipe_arguments.reject(arguments, others)
    print("\n".join(Ledger(Workspace.here().ledger_file, print).calibration_lines()))
    return 0
