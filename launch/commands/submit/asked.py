"""A line of submit: what stands behind `run`, a sweep over it, and the plans of both."""

import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from launch.base.errors import ConfigError, DoesNotFit
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments, run
from launch.commands.recipe_arguments import Parser, RecipeArguments, say
from launch.plan import planner, resolve
from launch.plan.planner import Choice
from launch.predict.facts import Facts
from launch.probe import machine as probe_machine
from launch.queue import admission
from launch.recipe import load, strict_yaml
from launch.recipe.strict_yaml import show
from launch.schema.machine import NOT_LEASED
from launch.schema.recipe import Recipe

_MEETING_PLACE = "--launch.main_process_ip=the-first-node"  # until Slurm has chosen it


class Asked:
    """A line of `run` that is submitted, and a sweep over it."""

    def __init__(self, arguments: Namespace, unparsed: Sequence[str]) -> None:
        self.arguments, self.argv = arguments, list(unparsed)
        self.typed, self.resume = read(self.argv)
        self.sweep = [_values(text) for text in arguments.sweep]
        # what is printed may be read by a program
        self.say = partial(print, file=sys.stderr) if arguments.print else say

    def choice(self, typed: RecipeArguments) -> tuple[Choice, Facts]:
        """The plan on the machine that was described, or on this one."""
        has_head = self.arguments.place == "slurm" and _nodes(typed) > 1
        overrides = [*typed.overrides, *([_MEETING_PLACE] if has_head else [])]
        described = recipe_arguments.described_machine(self.arguments)
        leased = NOT_LEASED if described else admission.leased_now(self.say)
        facts = resolve.read(
            *(typed.recipe, overrides, described, typed.wishes, leased, self.say),
            download=typed.download,
        )
        planner.refuse_hopeless(facts)
        return planner.choose(facts), facts

    def with_keys(self, overrides: Sequence[str]) -> RecipeArguments:
        """The line with more keys."""
        return replace(self.typed, overrides=[*self.typed.overrides, *overrides])

    def combinations(self, recipe: Recipe) -> Iterator[list[str]]:
        """The keys of each job of the sweep, if there is one."""
        if not self.sweep:
            return
        for number, values in enumerate(itertools.product(*(values for _, values in self.sweep))):
            text = "-".join(re.sub(r"[^\w.]+", "_", value) for value in values)
            end = f"-{text}" if len(recipe.name) + len(text) < 60 else f"-{number}"
            names = (name for name, _ in self.sweep)
            yield [
                *(f"--{name}={value}" for name, value in zip(names, values, strict=True)),
                f"--name={recipe.name}{end}",
                f"--output_dir={recipe.output_dir}{end}",
            ]


def read(argv: Sequence[str]) -> tuple[RecipeArguments, str]:
    """The arguments of `launch run`: recipe, batch and keys; and --resume. Raises ConfigError."""
    arguments, others = run_arguments(argv)
    recipe_arguments.refuse(
        *(
            (
                getattr(arguments, flag.replace("-", "_")),
                f"submit: --{flag} is for launch run; leave it out",
            )
            for flag in ("dry-run", "explain", "from-environment")
        ),
        (
            arguments.resume == "never",
            "submit: with --resume never each start of the job would begin anew; give it a --name"
            " and an --output_dir of its own instead",
        ),
    )
    return recipe_arguments.read(arguments, others), arguments.resume


def run_arguments(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser(prog="python -m launch run", allow_abbrev=False)
    recipe_arguments.add_flags(parser, run.FLAGS)
    arguments, unparsed = parser.parse_known_args(argv)
    arguments.verb = "submit"
    return arguments, unparsed


def _values(text: str) -> tuple[str, list[str]]:
    """(key, values) of --sweep. Raises ConfigError."""
    key, equals, values = text.partition("=")
    key = key.lstrip("-").replace("-", "_")
    each = [value for value in values.split(",") if value]
    if not equals or len(each) < 2 or len(set(each)) < len(each):
        raise ConfigError(
            f"--sweep {show(text)[1:-1]}: expected a key and several values, such as"
            " --sweep training.learning_rate=1e-5,3e-5"
        )
    return key, each


def _nodes(typed: RecipeArguments) -> int:
    """launch.nodes of a recipe that cannot be loaded before its nodes are known."""
    of_file = strict_yaml.read_yaml(load.find(typed.recipe))[0]
    launch = of_file.get("launch") if isinstance(of_file, dict) else None
    counts = [launch.get("nodes", 1)] if isinstance(launch, dict) else [1]
    counts += [
        text.partition("=")[2] for text in typed.overrides if re.match(r"--launch.nodes=", text)
    ]
    return int(counts[-1]) if str(counts[-1]).isdigit() else 1


def facts_here(typed: RecipeArguments) -> Facts:
    """The facts of a start on this machine, which must fit there once the others have ended."""
    leased = admission.leased_now(say)
    facts = resolve.read(
        *(typed.recipe, typed.overrides, None, typed.wishes, leased, say), download=typed.download
    )
    now = probe_machine.with_memory_of_now(facts.machine, Workspace.here().root)
    machines = [facts.machine, *admission.machines_to_wait_for(now, facts.recipe)]
    for machine in machines:
        try:
            planner.refuse_hopeless(replace(facts, machine=machine))
            return facts
        except DoesNotFit:
            if machine is machines[-1]:
                raise
    raise AssertionError("no machine")
