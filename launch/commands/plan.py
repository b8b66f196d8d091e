"""`python -m launch plan`: what would run, and why."""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial

from launch.base import compile_caches
from launch.base.errors import ConfigError
from launch.base.files import to_json
from launch.base.text import columns, shown
from launch.commands import recipe_arguments
from launch.plan.resolve import resolve
from launch.queue import admission
from launch.report import first_screen, plan_lines
from launch.schema.machine import NOT_LEASED

FLAGS = {
    **recipe_arguments.RECIPE_FLAGS,
    **recipe_arguments.EXPLAIN,
    "--json": {
        "action": "store_true",
        "help": "print the plan for scripts, as plan.json in a run (docs/plan_json.md)",
    },
    **recipe_arguments.MACHINE_FLAGS,
    "--rows-of": {
        "metavar": "TOKENS",
        "help": "plan for rows that are all this long, so that none is padded; nothing is"
        " tokenised",
    },
}


def main(arguments: Namespace, unparsed: Sequence[str]) -> None:
    if arguments.json and arguments.explain:
        raise ConfigError("--json and --explain: expected one of them; --json has the whole plan")
    typed = recipe_arguments.read(arguments, unparsed)
    expected = "a number of tokens from 1 to data.max_length, such as --rows-of 512"
    rows_of = arguments.rows_of
    if rows_of is not None:
        rows_of = recipe_arguments.whole_number("--rows-of", rows_of, 1, math.inf, expected)
    compile_caches.settle()
    described = recipe_arguments.described_machine(arguments)
    choice = resolve(
        typed.recipe,
        typed.overrides,
        described,
        typed.wishes,
        NOT_LEASED if described else admission.leased_now(),
        partial(print, file=sys.stderr) if typed.download else lambda line: None,
        rows_of=rows_of,
        as_folder=True,
        download=typed.download,
    )
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    if arguments.json:
        rows = [asdict(fact) for fact in plan_lines.facts(recipe, machine, plan)]
        print(to_json({**asdict(plan), "facts": rows}, indent=1))
    elif arguments.explain:
        print(shown("\n".join(plan_lines.full_text(recipe, machine, plan))))
    else:
        screen = first_screen.lines(recipe, machine, plan, datetime.now(), columns=columns())
        print(shown("\n".join(screen)))
