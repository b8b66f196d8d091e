"""What tests are made of: small data, recipes in a workspace of their own, real launches."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from launch.base import compile_caches
from launch.base.workspace import Workspace
from launch.plan import facts as plan_facts
from launch.plan import planner
from launch.plan.planner import Choice
from launch.predict import optimizers, trained_parameters
from launch.predict.facts import Facts
from launch.predict.models import model_config
from launch.render import run_files
from launch.run_folder import resume as run_resume
from launch.run_folder.layout import DRY_RUN, AttemptDir, RunDir
from launch.schema.machine import GIB, Gpu, Machine
from launch.schema.model_sections import LoraSection, ModelSection
from launch.schema.plan import DataFormat, ModelSize, Plan
from launch.schema.recipe import Recipe
from launch.supervise import stop_signals, tokenising

CODE = Path(__file__).resolve().parent.parent
CACHE = CODE / ".cache"
TRACES = {"LOWMEM_TRACES": str(CODE / ".cache" / "traces-of-tests")}
exit_codes: list[int] = []  # of the launches of the test that runs now
WORDS = [
    *"一二三山水火风",
    "red",
    "blue",
    "green",
    "stone",
    "river",
    "cloud",
    "lamp",
    "paper",
    "seven",
]


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts and responses of very different lengths; the response can be learned from the
    prompt."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        words = rng.choices(WORDS, k=rng.randint(1, 12))
        found.append(
            {
                "prompt": f"{i}: {' '.join(words)}",
                "response": " ".join(reversed(words[: rng.randint(1, 8)])),
            }
        )
    return found


def write_parquet(path: Path, data: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(data)), path)
    return path


def recipe(
    folder: Path, shape: str = "llama-tiny", count: int = 45, **sections: dict[str, Any]
) -> Path:
    """A recipe file with its data beside it: a few steps of a tiny model on `count` rows."""
    write_parquet(folder / "train.parquet", rows(count))
    write_parquet(folder / "valid.parquet", rows(10, seed=1))
    content: dict[str, Any] = {
        "name": "tiny",
        "task": "sft",
        "model": {"shape": shape},
        "data": {
            "train_file": str(folder / "train.parquet"),
            "validation_file": str(folder / "valid.parquet"),
            "max_length": 64,
        },
        "training": {
            "per_device_train_batch_size": 8,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 3,
            "logging_steps": 1,
            "save_steps": 4,
        },
        "output_dir": str(folder / "model"),
    }
    for name, section in sections.items():
        content[name] = (
            {**content.get(name, {}), **section} if isinstance(section, dict) else section
        )
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return path


def environment(workspace: Path, **extra: str) -> dict[str, str]:
    """The environment of a launch whose runs, logs and caches go under `workspace`."""
    workspace.mkdir(parents=True, exist_ok=True)
    # those torch has set in the tests' own process
    ours = ("SLURM_", "LOWMEM_", *compile_caches.FOLDERS)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {
        **inherited,
        "PYTHONPATH": str(CODE),
        "LOWMEM_ROOT": str(workspace),
        "LOWMEM_LEASES": str(workspace / "leases"),
        "HF_HUB_OFFLINE": "1",
        **TRACES,
        **extra,
    }


def launch(workspace: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch ...` to its end."""
    argv = [sys.executable, "-m", "launch", *words]
    done = subprocess.run(
        argv, env=environment(workspace, **extra), capture_output=True, text=True, timeout=300
    )
    exit_codes.append(done.returncode)
    return done


def on_terminal(argv: Sequence[str], workspace: Path, **extra: str) -> str:
    """The output of a program on a terminal of 100 columns, to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    env = environment(workspace, TERM="xterm-256color", **extra)
    child = subprocess.Popen(argv, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    content = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the child has closed its end
            part = b""
        if not part:
            break
        content += part
    os.close(ours)
    assert child.wait() == 0, content
    return content.decode()


def accelerate(workspace: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch ...` to its end, from the workspace."""
    argv = [sys.executable, "-m", "accelerate.commands.launch", *words]
    return subprocess.run(
        argv,
        env=environment(workspace, **extra),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=workspace,
    )


def events(run: Path) -> list[dict[str, Any]]:
    """Every step that the attempts of a run wrote, in order of writing."""
    found = []
    for path in sorted(run.glob("attempts/*/events.jsonl")):
        found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def only_run(workspace: Path, name: str = "tiny") -> Path:
    """The one run folder of a recipe, or that of its dry run where nothing was trained."""
    runs = RunDir.all(workspace / "runs", name)
    dry_run = RunDir(workspace / "runs" / name / DRY_RUN)
    (run,) = runs or [dry_run]
    assert run.plan_file.exists()
    return run.root


def opened_run(choice: Choice, resume: str = "never") -> tuple[RunDir, AttemptDir]:
    """The run folder for a choice, its rows tokenised, and a new attempt."""
    workspace, facts, recipe = Workspace.here(), choice.facts, choice.recipe
    assert facts.rows.tokens is not None
    opened = run_resume.decide(
        *(workspace.runs, recipe, choice.plan, facts.rows.tokens, resume),
        lambda: RunDir.create(workspace.runs, recipe.name, datetime.now()),
    )
    print(opened.line)
    run = opened.run
    if not tokenising.are_there(facts.rows.tokens):
        with stop_signals.signals() as signals:
            tokenising.until_done(facts, run, print, signals)
    run.write_tokens(facts.rows.tokens)
    return run, run_files.write_run(run, recipe, choice.machine, choice.plan, workspace)


def weights(folder: Path) -> dict[str, Any]:
    """The tensors of a model folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def packed(original: Path, folder: Path) -> Path:
    """The folder of a model whose linear weights bitsandbytes has packed in 4 bits (nf4)."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors", "adapter"))
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        original, quantization_config=in_4_bits, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    return folder


def gpu(index: int = 0, **fields: Any) -> Gpu:
    """A card with 20 GiB, as the first system's."""
    constraints = {
        "vendor": "nvidia",
        "architecture": "8.6",
        "total_bytes": 20 * GIB,
        "free_bytes": 19 * GIB,
        **fields,
    }
    return Gpu(index=index, name="RTX 3080", driver="550", reason="described", **constraints)


def machine(gpus: int = 0, cards: tuple[Gpu, ...] = (), **fields: Any) -> Machine:
    """A machine with so many of those cards (or these), 16 GiB of host RAM and 8 CPUs."""
    facts: dict[str, Any] = {
        "name": "test",
        "gpus": cards or tuple(gpu(i) for i in range(gpus)),
        "gpus_reason": "described",
        "host_limit_bytes": 16 * GIB,
        "host_limit_reason": "described",
        "host_available_bytes": 12 * GIB,
        "host_available_reason": "described",
        "cpu_count": 8,
        "cpu_reason": "described",
        "shm_bytes": 8 * GIB,
        "shm_reason": "described",
        "disk_free_bytes": 100 * GIB,
        "disk_reason": "described",
    }
    return Machine(**{**facts, **fields})


def model_size(
    model: ModelSection, lora: LoraSection | None, vocab_size: int | None = None, *, root: Path
) -> ModelSize:
    """The model of a recipe's section, read and counted."""
    config, tensor_shapes, family = model_config.read(model, vocab_size, root=root, cache=CACHE)
    counts = trained_parameters.count(tensor_shapes, model.freeze, lora, family)
    name = model.shape or Path(model.path or "").name
    return ModelSize(name, config, *counts, optimizers.LORA_BYTES * counts[2], family=family)


def recipe_of(**sections: Any) -> Recipe:
    """A recipe as planning sees it."""
    content: dict[str, Any] = {
        "name": "wish",
        "task": "sft",
        "model": {"shape": "llama-tiny"},
        "data": {"train_file": "/data/train.parquet", "max_length": 128},
        "training": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        "output_dir": "/out",
    }
    for name, section in sections.items():
        content[name] = (
            {**content.get(name, {}), **section} if isinstance(section, dict) else section
        )
    return Recipe.model_validate(content)


RECORDS = ("model", "rows", "installed", "wishes", "history", "limits")  # of Facts
DATA_FORMAT = DataFormat(
    "prompt_response", {"prompt": "prompt", "response": "response"}, "parquet", "described"
)


def facts_of(recipe: Recipe, on: Machine, **values: Any) -> Facts:
    """The facts of a recipe on a machine, with other values of fields of their records."""
    config, shapes, family = model_config.read(recipe.model, root=CODE, cache=CACHE)
    return changed(plan_facts.build(recipe, on, config, shapes, family, DATA_FORMAT), **values)


def changed(facts: Facts, **values: Any) -> Facts:
    """The facts with other values of fields, of whatever record."""
    for name, value in values.items():
        if hasattr(facts, name):
            facts = replace(facts, **{name: value})
            continue
        (record,) = (key for key in RECORDS if hasattr(getattr(facts, key), name))
        of_record = replace(getattr(facts, record), **{name: value})
        facts = replace(facts, **{record: of_record})
    return facts


def plan(recipe: Recipe | None = None, on: Machine | None = None, **values: Any) -> Plan:
    """The planner's choice for a recipe on a machine."""
    return planner.choose(facts_of(recipe or recipe_of(), on or machine(), **values)).plan
