"""`python -m launch plan`: what would run, and why."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.base import compile_caches
from launch.base.errors import ConfigError
from launch.base.files import to_json
from launch.base.text import shown
from launch.commands import recipe_arguments
from launch.plan.resolve import resolve
from launch.report import first_screen, text


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    parser = recipe_arguments.add_parser(
        subparsers,
        verb,
        "show what would run, and why",
        "[BATCH] [--machine FILE] [--explain | --json]",
    )
    recipe_arguments.add_explain(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the plan for scripts, as plan.json in a run (docs/plan_json.md)",
    )
    parser.add_argument(
        "--machine", type=Path, help="plan for a described machine (configs/machines/*.yaml)"
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    if arguments.json and arguments.explain:
        raise ConfigError("--json and --explain: expected one of them; --json has the whole plan")
    typed = recipe_arguments.read(arguments, others)
    compile_caches.settle()
    choice = resolve(typed.recipe, typed.overrides, arguments.machine, typed.constraints)
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    if arguments.json:
        print(to_json(asdict(plan), indent=1))
        return 0
    if arguments.explain:
        lines = text.plan_lines(recipe, machine, plan)
    else:
        lines = first_screen.lines(recipe, machine, plan, datetime.now())
    print(shown("\n".join(lines)))
    return 0
