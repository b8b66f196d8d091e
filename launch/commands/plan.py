"""`python -m launch plan`: what would run, and why."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.base import compile_caches
from launch.base.text import shown
from launch.commands import recipe_arguments
from launch.plan.resolve import resolve
from launch.report import first_screen, text


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    parser = recipe_arguments.add_parser(
        subparsers, verb, "show what would run, and why", "[BATCH] [--machine FILE] [--explain]"
    )
    recipe_arguments.add_explain(parser)
    parser.add_argument(
        "--machine", type=Path, help="plan for a described machine (configs/machines/*.yaml)"
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    typed = recipe_arguments.read(arguments, others)
    compile_caches.settle()
    choice = resolve(typed.recipe, typed.overrides, arguments.machine, typed.constraints)
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    if arguments.explain:
        lines = text.plan_lines(recipe, machine, plan)
    else:
        lines = first_screen.lines(recipe, machine, plan, datetime.now())
    print(shown("\n".join(lines)))
    return 0
