"""What this machine offers, whether its GPUs reach each other, what a job's processes import, and
what is wrong with it: one fix per problem."""

from __future__ import annotations

import os
import resource
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base import compile_caches, environment
from launch.base.errors import ResourceError
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.probe import import_memory, link_causes, link_test, torch_build
from launch.probe import machine as probe_machine
from launch.schema.machine import GIB, Link, Machine

MIN_DISK_BYTES = GIB  # below it not even a small model's checkpoints have room
LOW_DISK_BYTES = 10 * GIB
MIN_HOST_BYTES = GIB  # torch and a data loader alone take two thirds of it
SHM_BYTES = GIB
SHM_BYTES_PER_RANK = 64 << 20  # docker's default is this much for all of them
MIN_OPEN_FILES = 1024


@dataclass(frozen=True)
class Problem:
    """What is wrong and what mends it."""

    what: str
    fix: str
    stops: bool = False  # nothing trains until it is mended

    def __str__(self) -> str:
        return f"{'problem' if self.stops else 'note'}: {self.what}; fix: {self.fix}"


def examine(
    cache: Path, run_dir: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> bool:
    """Say everything about this machine; True if nothing stops training."""
    machine = probe_machine.machine(run_dir=run_dir)
    for line in probe_machine.describe(machine):
        say(line)
    found = [*_torch_problems(machine), *problems(machine)]
    stops = any(problem.stops for problem in found)
    if len(machine.gpus) < 2:
        say(f"link: not tested: {len(machine.gpus)} GPU(s), a link needs two")
    elif stops:
        say("link: not tested: see the problem below first")
    else:
        link = link_test.link(
            machine, len(machine.gpus), cache, environment.passed(environ), say=say, fresh=True
        )
        for line in link_test.lines(link):
            say(line)
        stops = is_blocked(link)
    if not stops:
        try:
            held = import_memory.measure(cache, "cuda" if machine.gpus else "cpu")
        except ResourceError as error:
            found.append(import_problem(error))
            stops = True
        else:
            say(
                f"imports: a rank holds {_gib(held.rank_bytes)}, accelerate"
                f" {_gib(held.agent_bytes)}, libraries once {_gib(held.mapped_bytes)} of host RAM;"
                " plans count with that"
            )
    for problem in found:
        say(str(problem))
    return not stops


def problems(machine: Machine) -> list[Problem]:
    """What is wrong with a machine; torch and the link aside."""
    found: list[Problem] = []
    if machine.gpus_obstacle:
        what, _, fix = machine.gpus_obstacle.rpartition("; fix: ")
        found.append(
            Problem(
                what, f"{fix}; to train on the CPU on purpose add --launch.mode=cpu", stops=True
            )
        )
    shm_wanted = max(SHM_BYTES, SHM_BYTES_PER_RANK * len(machine.gpus))
    if len(machine.gpus) > 1 and machine.shm_bytes < shm_wanted:
        found.append(
            Problem(
                f"/dev/shm has {_gib(machine.shm_bytes)}, {len(machine.gpus)} ranks want"
                f" {_gib(shm_wanted)}",
                link_causes.BY_NAME["shm_too_small"].fix,
            )
        )
    if machine.disk_free_bytes < LOW_DISK_BYTES:
        stops = machine.disk_free_bytes < MIN_DISK_BYTES
        said = f"{_gib(machine.disk_free_bytes)} of disk are {machine.disk_reason}"
        found.append(
            Problem(said, "free some, or set LOWMEM_ROOT to a folder on a larger disk", stops)
        )
    if machine.host_available_bytes < MIN_HOST_BYTES:
        said = (
            f"{_gib(machine.host_available_bytes)} of host memory are available"
            f" ({machine.host_available_reason})"
        )
        found.append(Problem(said, "end other programs, or raise that limit", stops=True))
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files < MIN_OPEN_FILES:
        found.append(
            Problem(
                f"a process may open {open_files} files, data loaders want {MIN_OPEN_FILES}",
                "ulimit -n 4096",
            )
        )
    return found


def is_blocked(link: Link) -> bool:
    """No choice of transport mends it: training on one GPU fails as the test did."""
    return any(
        not link_causes.BY_NAME[attempt.cause].cards_work
        for attempt in link.tries
        if not attempt.ok
    )


def _torch_problems(machine: Machine) -> list[Problem]:
    build = torch_build.installed()
    if build is None:
        return [
            Problem(
                "torch is not installed", "python -m pip install -r requirements.txt", stops=True
            )
        ]
    said = torch_build.refusal(build, machine.gpus, machine.cuda_driver, os.environ)
    what, _, fix = said.partition("; fix: ")
    return [Problem(what, fix, stops=True)] if said else []


def import_problem(error: ResourceError) -> Problem:
    """What a process that imports a rank's packages, and computes a step, failed with."""
    cause, _ = link_causes.find(str(error), "failed")
    if cause.name in ("driver", "card_busy"):
        return Problem(str(error), cause.fix, stops=True)
    return Problem(
        str(error), "install the packages anew: make clean, then start again", stops=True
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def add_parser(subparsers: Any) -> ArgumentParser:
    text = "show what this machine offers, test the link between its GPUs, name what is wrong"
    parser = subparsers.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "--machine",
        type=Path,
        help="a described machine (configs/machines/*.yaml) instead of this one",
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    """The exit code is 3 when something stops training."""
    recipe_arguments.reject(arguments, others)
    compile_caches.settle()
    if arguments.machine:
        print("\n".join(probe_machine.describe(probe_machine.described(arguments.machine))))
        print("link: not tested: a described machine")
        return 0
    workspace = Workspace.here()
    is_fine = examine(
        workspace.cache, workspace.root, os.environ, lambda line: print(line, flush=True)
    )
    return 0 if is_fine else 3
