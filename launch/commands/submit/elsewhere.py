"""Trainings on other machines: a Slurm job, whose memory, cards, processors and time are those of a
plan, above the script of configs/slurm; and files of SkyPilot and dstack for a rented machine.

Keys of those: docs.skypilot.co/en/latest/reference/yaml-spec.html, dstack.ai/docs/reference."""

import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import FILES
from launch.plan.planner import Choice
from launch.recipe import load, strict_yaml
from launch.run_folder import disk_space, manifest
from launch.schema.machine import GIB, MIB

_SCRIPT = FILES / "configs" / "slurm" / "train.sbatch"
_BEGIN = "set -euo pipefail\n"  # of the part of it that does not ask for anything
_HOST_MARGIN = 1.1  # times the predicted host RAM, beside launch.host_reserve_gib
_TIME_MARGIN = 1.25  # times the predicted steps
_START_S = 900.0  # packages, tokenising, planning, evaluations
_COMMAND_S = 60.0
# The address of the node on which the script runs; its name may lead to itself alone (127.0.1.1)
_FIND_HEAD = """first() { awk 'NR == 1 { print $1 }'; }
head="$(getent ahostsv4 "$SLURMD_NODENAME" | first)" || head=""
[[ -n "$head" && "$head" != 127.* ]] || head="$(hostname -I | first)"
"""
_STATE = "/lowmem"  # where the volume is, with runs, caches and models
_FILES_THERE = "/lowmem-files"  # the recipe's own files
_SYSTEM_GIB = 2  # host RAM for all that runs there besides
_PACKAGES_GIB = 30  # disk for .venv and caches
_GO_ON = 75
_KEY = f"{_FILES_THERE}/{manifest.CLOUD_KEY_NAME}"  # seals checkpoints of the volume's machines
_SETUP = (
    f"chmod 600 {_KEY} && scripts/install.sh"  # files that come through a bucket lose their mode
)
_HEAD = (
    "# A preempted machine goes on from its last checkpoint if this volume outlives it. The file\n"
    "# that LOWMEM_KEY names seals the checkpoints: keep it, and give it to nobody.\n"
)


@dataclass(frozen=True)
class Request:
    """The needs of a job, for each of its nodes."""

    host_bytes: int | None  # None: not predicted
    gpus: int
    cpus: int
    seconds: float | None  # None: not predicted
    nodes: int

    @classmethod
    def from_choice(cls, choice: Choice) -> Self:
        """The needs of a plan, with margins."""
        recipe, plan, strategy = choice.recipe, choice.plan, choice.plan.strategy
        ranks = strategy.processes_per_machine
        is_on_cards = strategy.device == "cuda"
        steps, host = plan.total_steps(recipe), plan.estimate.host_bytes
        pace = plan.seconds_per_step
        return cls(
            math.ceil(host * _HOST_MARGIN + recipe.launch.host_reserve_gib * GIB) if host else None,
            ranks if is_on_cards else 0,
            ranks * (1 + strategy.dataloader_num_workers) + 1
            if is_on_cards
            else choice.machine.cpu_count,
            steps * pace * _TIME_MARGIN + _START_S if steps and pace else None,
            strategy.num_machines,
        )

    @classmethod
    def from_choices(cls, choices: Sequence[Choice]) -> Self:
        """The largest of each need, for jobs of one array; None where one of them is not
        predicted."""
        needs = zip(*(astuple(cls.from_choice(choice)) for choice in choices), strict=True)
        largest: list[Any] = [None if None in each else max(each) for each in needs]
        return cls(*largest)

    def options(self) -> list[str]:
        """The options of sbatch that ask for it."""
        return [
            *(f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self.cpus}"),
            *([] if self.host_bytes is None else [f"--mem={math.ceil(self.host_bytes / MIB)}M"]),
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([] if self.seconds is None else [f"--time={_time(self.seconds)}"]),
        ]


def slurm_script(
    name: str,
    argv: Sequence[str],
    folder: Path,
    request: Request,
    more: Sequence[str],
    tasks: Sequence[Sequence[str]],
    has_parts: bool = True,
) -> str:
    """The batch script of a job that runs a line and writes its output into a folder. `more` are
    options of the user, in place of those of the plan; `tasks` are the keys of each task of an
    array. `has_parts`: the line is a job's script, which takes --part."""
    options = [
        f"--job-name={name}",
        f"--output={folder}/slurm-{'%A_%a' if tasks else '%j'}.out",
        "--open-mode=append",
        *request.options(),
        "--signal=B:USR1@120",
        "--requeue",
        "--export=NONE",
        *([f"--array=0-{len(tasks) - 1}"] if tasks else []),
    ]
    theirs = {option.partition("=")[0] for option in more}
    ours = [option for option in options if option.partition("=")[0] not in theirs]
    if broken := next((each for each in (*ours, *more) if re.search(r"[\r\n]", each)), None):
        raise ConfigError(
            f"submit slurm: {broken!r} holds a line break, and what follows it would be a line of"
            " the script; start it in a folder, and with options, without one"
        )
    body = _SCRIPT.read_text("utf-8").partition(_BEGIN)[2]
    lines = "".join(f"#SBATCH {_quoted(option)}\n" for option in (*ours, *more))
    command = _arguments(shlex.join(argv), has_parts, request, tasks)
    return f"#!/usr/bin/env bash\n{lines}{_BEGIN}{command}{body}"


def submit_to_slurm(file: str) -> str:
    """Give a batch script to Slurm; the number of the job. Raises ResourceError."""
    if shutil.which("sbatch") is None:
        raise ResourceError(
            f"no sbatch here: submit it on a node of the cluster (sbatch {file}), or make a Slurm"
            " of this machine with scripts/slurm_one_box.sh"
        )
    done = subprocess.run(
        ["sbatch", "--parsable", file],
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode:
        raise ResourceError(f"sbatch {file}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # a cluster's name may follow


def _arguments(line: str, has_parts: bool, request: Request, tasks: Sequence[Sequence[str]]) -> str:
    """The lines that make a command line the script's arguments."""
    if request.nodes > 1:
        part = '--part="-node$SLURM_NODEID" ' if has_parts else ""
        of_node = '--launch.machine_rank="$SLURM_NODEID" --launch.main_process_ip="$0"'
        # srun passes no variables on in a job that was submitted without any
        return (
            f'{_FIND_HEAD}set -- srun --export=ALL bash -c \'exec "$@" {part}{of_node}\' "$head"'
            f" {line}\n"
        )
    if not tasks:
        return f"set -- {line}\n"
    cases = "".join(
        f"    {number}) set -- {line} {f'--part=-{number} ' if has_parts else ''}"
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


# ---- clouds
# -------------------------------------------------------------------------------------


def skypilot(choice: Choice, argv: Sequence[str]) -> str:
    """A file for `sky jobs launch`: exit code 75 goes on."""
    cards = _cards(choice)
    return _HEAD + strict_yaml.dump(
        {
            "name": _name(choice),
            "workdir": ".",
            "resources": {
                **({"accelerators": cards} if cards else {}),
                "memory": f"{_host_gib(choice)}+",
                "disk_size": _disk_gib(choice),
                "job_recovery": {"recover_on_exit_codes": [_GO_ON]},
            },
            "file_mounts": {
                **{there: here for here, there in _files(choice, argv).items()},
                _KEY: str(manifest.cloud_key_file()),
            },
            "volumes": {_STATE: "lowmem"},
            "setup": _SETUP,
            "run": _line(choice, argv),
        }
    )


def dstack(choice: Choice, argv: Sequence[str]) -> str:
    """A file for `dstack apply -f`: exit code 75 goes on."""
    cards = _cards(choice)
    again = (
        f"code={_GO_ON}; while [ $code -eq {_GO_ON} ]; do code=0; {{}} || code=$?; done; exit $code"
    )
    return _HEAD + strict_yaml.dump(
        {
            "type": "task",
            "name": _name(choice),
            "repos": ["."],
            "files": [
                *(f"{here}:{there}" for here, there in _files(choice, argv).items()),
                f"{manifest.cloud_key_file()}:{_KEY}",
            ],
            "volumes": [f"lowmem:{_STATE}"],
            "commands": [_SETUP, again.format(_line(choice, argv))],
            "resources": {
                "memory": f"{_host_gib(choice)}GB..",
                "disk": f"{_disk_gib(choice)}GB..",
                **({"gpu": cards} if cards else {}),
            },
            "retry": {"on_events": ["no-capacity", "interruption"], "duration": "7d"},
        }
    )


def _line(choice: Choice, argv: Sequence[str]) -> str:
    """The line that trains there, with the recipe's files where they are there."""
    data, there = choice.recipe.data, _files(choice, argv)
    sources = [
        {**source.model_dump(exclude_unset=True), "path": there[source.path]}
        for source in data.sources
    ]
    train = sources[0]["path"] if len(sources) == 1 else json.dumps(sources, ensure_ascii=False)
    overrides = [
        f"--data.train_file={train}",
        *(f"--{key}={there[path]}" for key, path in _named(choice).items()),
        f"--output_dir={_STATE}/model_save/{Path(choice.recipe.output_dir).name}",
    ]
    argv_there = [there.get(argv[0], argv[0]), *argv[1:]]
    line = shlex.join(["-m", "launch", "run", *argv_there, *overrides])
    return f"LOWMEM_ROOT={_STATE} LOWMEM_KEY={_KEY} .venv/bin/python {line}"


def _named(choice: Choice) -> dict[str, str]:
    """Keys of the recipe that name one file or folder that is here, besides data.train_file."""
    recipe = choice.recipe
    named = {
        "data.validation_file": recipe.data.validation_file,
        "model.path": recipe.model.path,
        "tokenizer.path": recipe.tokenizer.path,
        "tokenizer.chat_template": recipe.tokenizer.chat_template,
    }
    return {key: path for key, path in named.items() if path and Path(path).exists()}


def _files(choice: Choice, argv: Sequence[str]) -> dict[str, str]:
    """{file or folder here: its place there}."""
    recipe = [argv[0]] if load.is_file(argv[0]) else []
    paths = [*recipe, *choice.recipe.data.paths, *_named(choice).values()]
    return {
        str(path): f"{_FILES_THERE}/{number}-{Path(path).name}"
        for number, path in enumerate(dict.fromkeys(map(str, paths)))
    }


def _host_gib(choice: Choice) -> int:
    host, launch = choice.plan.estimate.host_bytes, choice.recipe.launch
    return math.ceil(host * _HOST_MARGIN / GIB + launch.host_reserve_gib + _SYSTEM_GIB)


def _disk_gib(choice: Choice) -> int:
    checkpoints = disk_space.num_kept(choice.recipe) + 1
    return math.ceil(checkpoints * choice.plan.checkpoint_bytes / GIB) + _PACKAGES_GIB


def _cards(choice: Choice) -> str:
    """Cards as clouds write them: RTX3090:2, A100-80GB:8; "" of a plan for CPUs."""
    strategy = choice.plan.strategy
    if strategy.device != "cuda":
        return ""
    gpu = choice.machine.gpus[0]
    name = re.sub(r"\b(NVIDIA|GeForce|AMD|Radeon|SXM\d?|PCIe|HBM\d?e?|\d+ ?GB)\b", "", gpu.name)
    plain = name.strip(" -").replace(" ", "")
    # the only one of which clouds have two sizes
    plain = "A100-80GB" if plain == "A100" and gpu.total_bytes > 60 * GIB else plain
    return f"{plain}:{strategy.processes_per_machine}"


def _name(choice: Choice) -> str:
    return re.sub(r"[^a-z0-9]+", "-", choice.recipe.name.lower()).strip("-")
