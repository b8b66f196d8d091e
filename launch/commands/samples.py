"""`python -m launch samples`: which rows a run has trained."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.commands import recipe_arguments
from launch.run_folder import sample_audit
from launch.run_folder.layout import RunDir


def add_parser(subparsers: Any) -> ArgumentParser:
    text = "show that a run has trained each row once an epoch"
    parser = subparsers.add_parser("samples", help=text, description=text, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a folder runs/<recipe>/<time>")
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    recipe_arguments.reject(arguments, others)
    print("\n".join(sample_audit.lines(RunDir(arguments.run))))
    return 0
