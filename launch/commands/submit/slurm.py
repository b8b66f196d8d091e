"""A Slurm job: memory, cards, processors and time of a plan, above the script of configs/slurm."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import FILES
from launch.plan.planner import Choice
from launch.schema.machine import GIB

SCRIPT = FILES / "configs" / "slurm" / "train.sbatch"
BEGIN = "set -euo pipefail\n"  # of the part of it that does not ask for anything
HOST_MARGIN = 1.1  # times the predicted host RAM, beside launch.host_reserve_gib
_TIME_MARGIN = 1.25  # times the predicted steps
START_S = 900.0  # packages, tokenising, planning, evaluations
COMMAND_S = 60.0
# The address of the node on which the script runs; its name may lead to itself alone (127.0.1.1)
MEETING_PLACE = """first() { awk 'NR == 1 { print $1 }'; }
head="$(getent ahostsv4 "$SLURMD_NODENAME" | first)" || head=""
[[ -n "$head" && "$head" != 127.* ]] || head="$(hostname -I | first)"
"""


@dataclass(frozen=True)
class Request:
    """The needs of a job, for each of its nodes."""

    host_bytes: int | None  # None: not predicted
    gpus: int
    cpus: int
    seconds: float | None  # None: not predicted
    nodes: int

    @classmethod
    def from_choice(cls, choice: Choice) -> Request:
        """The needs of a plan, with margins."""
        recipe, plan, strategy = choice.recipe, choice.plan, choice.plan.strategy
        ranks = strategy.processes_per_machine
        is_on_cards = strategy.device == "cuda"
        steps, host = plan.total_steps(recipe), plan.estimate.host_bytes
        reserve = recipe.launch.host_reserve_gib * GIB
        workers = ranks * strategy.dataloader_num_workers
        pace = plan.seconds_per_step
        return cls(
            math.ceil(host * HOST_MARGIN + reserve) if host else None,
            ranks if is_on_cards else 0,
            ranks + workers + 1 if is_on_cards else choice.machine.cpu_count,
            steps * pace * _TIME_MARGIN + START_S if steps and pace else None,
            strategy.num_machines,
        )

    def over(self, other: Request) -> Request:
        """The larger of each need, for jobs of one array."""
        return Request(
            _larger(self.host_bytes, other.host_bytes),
            max(self.gpus, other.gpus),
            max(self.cpus, other.cpus),
            _larger(self.seconds, other.seconds),
            self.nodes,
        )

    def options(self) -> list[str]:
        """The options of sbatch that ask for it."""
        asked = [f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self.cpus}"]
        if self.host_bytes is not None:
            asked.append(f"--mem={math.ceil(self.host_bytes / (1 << 20))}M")
        if self.gpus:
            asked.append(f"--gpus-per-node={self.gpus}")
        if self.seconds is not None:
            asked.append(f"--time={_time(self.seconds)}")
        return asked


def _larger(*needs: Any) -> Any:
    """The larger of two needs; None where one of them is not predicted."""
    return None if None in needs else max(needs)


@dataclass(frozen=True)
class Command:
    """The line that a job runs. `has_parts`: it is a job's script, which takes --part."""

    name: str
    argv: tuple[str, ...]
    folder: str  # for its output
    has_parts: bool = True


def script(
    command: Command, request: Request, more: Sequence[str], tasks: Sequence[Sequence[str]]
) -> str:
    """The batch script of a job. `more` are options of the user, in place of those of the plan;
    `tasks` are the keys of each task of an array."""
    options = [
        f"--job-name={command.name}",
        f"--output={command.folder}/slurm-{'%A_%a' if tasks else '%j'}.out",
        "--open-mode=append",
        *request.options(),
        "--signal=B:USR1@120",
        "--requeue",
        "--export=NONE",
    ]
    if tasks:
        options.append(f"--array=0-{len(tasks) - 1}")
    theirs = {option.partition("=")[0] for option in more}
    ours = [option for option in options if option.partition("=")[0] not in theirs]
    if broken := next((each for each in (*ours, *more) if re.search(r"[\r\n]", each)), None):
        raise ConfigError(
            f"submit slurm: {broken!r} holds a line break, and what follows it would be a line of"
            " the script; start it in a folder, and with options, without one"
        )
    body = SCRIPT.read_text("utf-8").partition(BEGIN)[2]
    lines = "".join(f"#SBATCH {_quoted(option)}\n" for option in (*ours, *more))
    return f"#!/usr/bin/env bash\n{lines}{BEGIN}{_arguments(command, request, tasks)}{body}"


def submit(file: str) -> str:
    """Give a batch script to Slurm; the number of the job. Raises ResourceError."""
    if shutil.which("sbatch") is None:
        raise ResourceError(
            f"no sbatch here: submit it on a node of the cluster (sbatch {file}), or make a Slurm"
            " of this machine with scripts/slurm_one_box.sh"
        )
    argv = ["sbatch", "--parsable", file]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise ResourceError(f"sbatch {file}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # a cluster's name may follow


def _arguments(command: Command, request: Request, tasks: Sequence[Sequence[str]]) -> str:
    """The lines that make the command the script's arguments."""
    line = shlex.join(command.argv)
    if request.nodes > 1:
        part = '--part="-node$SLURM_NODEID" ' if command.has_parts else ""
        of_node = '--launch.machine_rank="$SLURM_NODEID" --launch.main_process_ip="$0"'
        # srun passes no variables on in a job that was submitted without any
        return (
            f'{MEETING_PLACE}set -- srun --export=ALL bash -c \'exec "$@" {part}{of_node}\' "$head"'
            f" {line}\n"
        )
    if not tasks:
        return f"set -- {line}\n"
    cases = "".join(
        f"    {number}) set -- {line} {f'--part=-{number} ' if command.has_parts else ''}"
        f"{shlex.join(overrides)} ;;\n"
        for number, overrides in enumerate(tasks)
    )
    return f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'


def _quoted(option: str) -> str:
    """An option as a line of #SBATCH takes it."""
    return option if re.fullmatch(r"[\w./:%=,@+-]+", option) else f'"{option}"'


def _time(seconds: float) -> str:
    """days-hours:minutes:seconds, rounded up to minutes."""
    rounded = timedelta(minutes=math.ceil(seconds / 60))
    hours, minutes = divmod(rounded.seconds // 60, 60)
    return f"{rounded.days}-{hours:02}:{minutes:02}:00"
