"""`python -m launch plan`: what would run, and why."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.base import compile_caches
from launch.base.text import shown
from launch.commands import recipe_arguments
from launch.plan.resolve import resolve
from launch.report import text


def add_parser(subparsers: Any) -> ArgumentParser:
    parser = recipe_arguments.add_parser(
        subparsers, "plan", "show what would run, and why", "[BATCH] [--machine FILE]"
    )
    parser.add_argument(
        "--machine", type=Path, help="plan for a described machine (configs/machines/*.yaml)"
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    typed = recipe_arguments.read("plan", others, arguments.switches)
    compile_caches.settle()
    choice = resolve(typed.recipe, typed.overrides, arguments.machine, typed.constraints)
    print(shown("\n".join(text.plan_lines(choice.recipe, choice.machine, choice.plan))))
    return 0
