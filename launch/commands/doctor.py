"""`python -m launch doctor`: describe this machine, test the link between its GPUs, and name each
problem with its fix."""

import os
import resource
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from launch.base import compile_caches, environment
from launch.base.errors import ResourceError
from launch.base.text import size
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.commands.recipe_arguments import say
from launch.data.worker import WORKER
from launch.predict.history import core_figures
from launch.probe import import_memory, link_causes, link_test, torch_build
from launch.probe import machine as probe_machine
from launch.schema.machine import GIB, CoreFigures, Link, Machine

_MIN_DISK_BYTES = GIB  # below it not even a small model's checkpoints have room
_LOW_DISK_BYTES = 10 * GIB
_MIN_HOST_BYTES = GIB  # torch and a data loader alone take two thirds of it
_SHM_BYTES = GIB
_SHM_BYTES_PER_RANK = 64 << 20  # docker's default is this much for all of them
_MIN_OPEN_FILES = 1024
FLAGS = recipe_arguments.MACHINE_FLAGS
_COOLER = (
    "see its fans, air flow, power cables and power limit; `nvidia-smi -q -d PERFORMANCE,POWER`"
    " shows the reasons"
)


@dataclass(frozen=True)
class _Problem:
    """A problem of the machine, and its fix."""

    what: str
    fix: str
    stops: bool = False  # nothing trains until it is mended

    def __str__(self) -> str:
        return f"{'problem' if self.stops else 'note'}: {self.what}; fix: {self.fix}"


def _examine(workspace: Workspace) -> bool:
    """Describe this machine and its problems; True if none of them stops training."""
    machine = probe_machine.machine(run_dir=workspace.root)
    say("\n".join(probe_machine.describe(machine)))
    all_problems = [*_torch_problems(machine), *problems(machine)]
    stops = any(problem.stops for problem in all_problems)
    if len(machine.gpus) < 2:
        say(f"link: not tested: {len(machine.gpus)} GPU(s), a link needs two")
    elif stops:
        say("link: not tested: see the problem below first")
    else:
        link = link_test.link(
            *(machine, len(machine.gpus), workspace.cache, environment.passed(os.environ)),
            say=say,
            fresh=True,
        )
        say("\n".join(link_test.lines(link)))
        stops = is_blocked(link)
    if not stops:
        try:
            memory = import_memory.measure(workspace.cache, "cuda" if machine.gpus else "cpu")
        except ResourceError as error:
            all_problems.append(import_problem(error))
            stops = True
        else:
            say(
                f"imports: a rank takes {size(memory.rank_bytes)}, accelerate"
                f" {size(memory.agent_bytes)}, shared libraries {size(memory.mapped_bytes)} of"
                " host RAM; plans count this memory"
            )
            with WORKER:
                say(_cores(core_figures.measure(workspace.traces, machine.cpu_count)))
            if card := memory.card.context_bytes and memory.card:
                say(
                    f"context: a rank takes {size(card.context_bytes)} of its {card.name} outside"
                    f" torch's allocator, measured here by {card.context_source}; plans count this"
                    " memory"
                )
    for problem in all_problems:
        say(str(problem))
    return not stops


def _cores(measured: Sequence[CoreFigures]) -> str:
    """A line on the rates of the cores, by which plans predict seconds."""
    if not measured:
        return "cores: not measured, because other programs have them; plans assume rates"
    rates, memory = measured[-1].flops_per_s, measured[-1].bytes_per_s["large"]
    return (
        f"cores: products at {rates['float32'] / 1e9:,.0f} GFLOP/s in float32,"
        f" {rates['bfloat16'] / 1e9:,.0f} in bfloat16, memory at {memory / 1e9:,.0f} GB/s; plans"
        " predict seconds by these and 12 kinds of kernels, with a card by the memory alone"
    )


def problems(machine: Machine) -> list[_Problem]:
    """Problems of a machine; torch and the link aside."""
    obstacle, _, fix = machine.gpus_obstacle.rpartition("; fix: ")
    shm_needed = max(_SHM_BYTES, _SHM_BYTES_PER_RANK * len(machine.gpus))
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows = [  # is it there, what it is, its fix, whether it stops training
        (
            machine.gpus_obstacle != "",
            obstacle,
            f"{fix}; to train on the CPU on purpose add --launch.mode=cpu",
            True,
        ),
        *(
            (
                gpu.slowdown != "",
                f"GPU {gpu.index} ({gpu.name}) is slower now: {gpu.slowdown}",
                _COOLER,
                False,
            )
            for gpu in machine.gpus
        ),
        (
            any(gpu.vendor == "amd" for gpu in machine.gpus),
            "ROCm is unverified: lowmem has not run on an AMD card; its builds, cards and figures"
            " are from documents",
            "python -m launch selfcheck compares the predictions with your card",
            False,
        ),
        (
            len(machine.gpus) > 1 and machine.shm_bytes < shm_needed,
            f"/dev/shm has {size(machine.shm_bytes)}, {len(machine.gpus)} ranks need"
            f" {size(shm_needed)}",
            link_causes.BY_NAME["shm_too_small"].fix,
            False,
        ),
        (
            machine.disk_free_bytes < _LOW_DISK_BYTES,
            f"{size(machine.disk_free_bytes)} of disk are {machine.disk_reason}",
            "free some, or set LOWMEM_ROOT to a folder on a larger disk",
            machine.disk_free_bytes < _MIN_DISK_BYTES,
        ),
        (
            machine.host_available_bytes < _MIN_HOST_BYTES,
            f"{size(machine.host_available_bytes)} of host memory are available"
            f" ({machine.host_available_reason})",
            "end other programs, or raise that limit",
            True,
        ),
        (
            open_files < _MIN_OPEN_FILES,
            f"a process may open {open_files} files, data loaders need {_MIN_OPEN_FILES}",
            "ulimit -n 4096",
            False,
        ),
    ]
    return [_Problem(what, fix, stops) for is_there, what, fix, stops in rows if is_there]


def is_blocked(link: Link) -> bool:
    """True if no choice of transport mends it: training on one GPU fails as the test did."""
    return any(
        not link_causes.BY_NAME[attempt.cause].cards_work
        for attempt in link.tries
        if not attempt.ok
    )


def _torch_problems(machine: Machine) -> list[_Problem]:
    refusal = "torch is not installed; fix: python -m pip install -r requirements.txt"
    if build := torch_build.installed():
        refusal = torch_build.refusal(build, machine.gpus, machine.cuda_driver, os.environ)
    what, _, fix = refusal.partition("; fix: ")
    return [_Problem(what, fix, stops=True)] if refusal else []


def import_problem(error: ResourceError) -> _Problem:
    """The problem of a process that could not import a rank's packages, or compute a step."""
    cause, _ = link_causes.find(str(error), "failed")
    is_of_card = cause.name in ("driver", "card_busy")
    fix = cause.fix if is_of_card else "install the packages anew: make clean, then start again"
    return _Problem(str(error), fix, stops=True)


def main(arguments: Namespace) -> int:
    """The exit code is 3 when something stops training."""
    compile_caches.settle()
    if machine := recipe_arguments.described_machine(arguments):
        assumed = [f"assumed: {machine.assumed}"] if machine.assumed else []
        print(
            *probe_machine.describe(machine),
            *assumed,
            "link: not tested: a described machine",
            sep="\n",
        )
        return 0
    return 0 if _examine(Workspace.here()) else 3
