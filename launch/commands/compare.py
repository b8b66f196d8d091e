"""`python -m launch compare`: two runs side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from launch.base.workspace import Workspace
from launch.commands import recipe_arguments


def add_parser(subparsers: Any) -> ArgumentParser:
    text = "show two runs side by side: speed, memory, losses; a table and a page"
    parser = subparsers.add_parser("compare", help=text, description=text, allow_abbrev=False)
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
    from launch.report import compare  # rich's tables

    return compare.run(Workspace.here(), arguments.first, arguments.second, arguments.anyway)
