"""Files of SkyPilot and dstack that train a recipe on a rented machine, as its plan needs it.

Their keys: docs.skypilot.co/en/latest/reference/yaml-spec.html, dstack.ai/docs/reference."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from launch.commands.submit.slurm import HOST_MARGIN
from launch.plan.planner import Choice
from launch.recipe import load, strict_yaml
from launch.run_folder import disk_space, manifest
from launch.schema.machine import GIB

STATE = "/lowmem"  # where the volume is, with runs, caches and models
FILES = "/lowmem-files"  # the recipe's own files
_SYSTEM_GIB = 2  # host RAM for all that runs there besides
_PACKAGES_GIB = 30  # disk for .venv and caches
_GO_ON = 75
KEY = f"{FILES}/{manifest.CLOUD_KEY_NAME}"  # seals the checkpoints of all machines of the volume
_SETUP = (
    f"chmod 600 {KEY} && scripts/install.sh"  # files that come through a bucket lose their mode
)
HEAD = (
    "# A preempted machine goes on from its last checkpoint if this volume outlives it. The file\n"
    "# that LOWMEM_KEY names seals the checkpoints: keep it, and give it to nobody.\n"
)


def skypilot(choice: Choice, argv: Sequence[str]) -> str:
    """A file for `sky jobs launch`: exit code 75 goes on."""
    resources = {
        **({"accelerators": f"{_card(choice)}:{_num_cards(choice)}"} if _num_cards(choice) else {}),
        "memory": f"{_host_gib(choice)}+",
        "disk_size": _disk_gib(choice),
        "job_recovery": {"recover_on_exit_codes": [_GO_ON]},
    }
    task = {
        "name": _name(choice),
        "workdir": ".",
        "resources": resources,
        "file_mounts": {
            **{there: here for here, there in _files(choice, argv).items()},
            KEY: str(manifest.cloud_key_file()),
        },
        "volumes": {STATE: "lowmem"},
        "setup": _SETUP,
        "run": _line(choice, argv),
    }
    return HEAD + strict_yaml.dump({key: value for key, value in task.items() if value})


def dstack(choice: Choice, argv: Sequence[str]) -> str:
    """A file for `dstack apply -f`: exit code 75 goes on."""
    resources = {"memory": f"{_host_gib(choice)}GB..", "disk": f"{_disk_gib(choice)}GB.."}
    if _num_cards(choice):
        resources["gpu"] = f"{_card(choice)}:{_num_cards(choice)}"
    again = (
        f"code={_GO_ON}; while [ $code -eq {_GO_ON} ]; do code=0; {{}} || code=$?; done; exit $code"
    )
    task = {
        "type": "task",
        "name": _name(choice),
        "repos": ["."],
        "files": [
            *(f"{here}:{there}" for here, there in _files(choice, argv).items()),
            f"{manifest.cloud_key_file()}:{KEY}",
        ],
        "volumes": [f"lowmem:{STATE}"],
        "commands": [_SETUP, again.format(_line(choice, argv))],
        "resources": resources,
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "7d"},
    }
    return HEAD + strict_yaml.dump({key: value for key, value in task.items() if value})


def _line(choice: Choice, argv: Sequence[str]) -> str:
    """The line that trains there, with the recipe's files where they are there."""
    data, there = choice.recipe.data, _files(choice, argv)
    sources = [
        {**source.model_dump(exclude_unset=True), "path": there[source.path]}
        for source in data.sources
    ]
    train = sources[0]["path"] if len(sources) == 1 else json.dumps(sources, ensure_ascii=False)
    overrides = [f"--data.train_file={train}"]
    overrides += [f"--{key}={there[path]}" for key, path in _named(choice).items()]
    overrides.append(f"--output_dir={STATE}/model_save/{Path(choice.recipe.output_dir).name}")
    argv_there = [there.get(argv[0], argv[0]), *argv[1:]]
    line = shlex.join(["-m", "launch", "run", *argv_there, *overrides])
    return f"LOWMEM_ROOT={STATE} LOWMEM_KEY={KEY} .venv/bin/python {line}"


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
        str(path): f"{FILES}/{number}-{Path(path).name}"
        for number, path in enumerate(dict.fromkeys(map(str, paths)))
    }


def _host_gib(choice: Choice) -> int:
    host, launch = choice.plan.estimate.host_bytes, choice.recipe.launch
    return math.ceil(host * HOST_MARGIN / GIB + launch.host_reserve_gib + _SYSTEM_GIB)


def _disk_gib(choice: Choice) -> int:
    checkpoints = disk_space.num_kept(choice.recipe) + 1
    return math.ceil(checkpoints * choice.plan.checkpoint_bytes / GIB) + _PACKAGES_GIB


def _num_cards(choice: Choice) -> int:
    strategy = choice.plan.strategy
    return strategy.processes_per_machine if strategy.device == "cuda" else 0


def _card(choice: Choice) -> str:
    """A card's name as clouds write it: RTX3090, H100, A100-80GB."""
    gpu = choice.machine.gpus[0]
    name = re.sub(r"\b(NVIDIA|GeForce|AMD|Radeon|SXM\d?|PCIe|HBM\d?e?|\d+ ?GB)\b", "", gpu.name)
    plain = name.strip(" -").replace(" ", "")
    # the only one of which clouds have two sizes
    return "A100-80GB" if plain == "A100" and gpu.total_bytes > 60 * GIB else plain


def _name(choice: Choice) -> str:
    return re.sub(r"[^a-z0-9]+", "-", choice.recipe.name.lower()).strip("-")
