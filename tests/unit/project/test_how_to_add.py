"""The lists of CONTRIBUTING, "How to add": what they name is enough, shown on a copy of the
code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def files_named(kind: str) -> set[str]:
    """The Python files of launch/ and training/ that CONTRIBUTING names for adding `kind`."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    items = re.findall(r"^- \*\*(.+?)\*\*((?:.|\n(?!- |\n))*)", page, re.MULTILINE)
    (item,) = [text for name, text in items if name == kind]
    return set(re.findall(r"`((?:launch|training)/\S+\.py)`", item))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The code with what is compiled of it, which holds as long as a file's time does."""
    for folder in ("launch", "training", "configs", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def add(copy: Path, file: str, after: str, text: str) -> str:
    """Insert `text` after the first `after` of a file; return the file."""
    source = (copy / file).read_text(encoding="utf-8")
    before, found, behind = source.partition(after)
    assert found, f"{file} has no {after!r}"
    (copy / file).write_text(before + found + text + behind, encoding="utf-8")
    return file


def run(copy: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "LOWMEM_ROOT": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MAIN = "import sys; from launch.__main__ import main; sys.exit(main(sys.argv[1:]))"


def test_a_launch_mode(copy):
    modes = "launch/schema/modes.py"
    row = (
        '\n    "dual_gpu_dummy": LaunchMode("ddp", "MULTI_GPU", "cuda", "several", refuses=_WHOLE),'
    )
    changed = {
        add(copy, modes, "\nMode = Literal[", '\n    "dual_gpu_dummy",'),
        add(copy, modes, "\nLAUNCH_MODES: Mapping[Mode, LaunchMode] = {", row),
    }
    assert changed == files_named("A launch mode")
    script = """
from scripts import render_configs
from launch.render import accelerate
_, recipe, plan = render_configs.planned("2x3080-20g-16g", ["--launch.mode=dual_gpu_dummy"])
strategy = plan.strategy
config = accelerate.accelerate_config(plan, None)
print(strategy.mode, strategy.launch_mode.engine, strategy.num_processes, strategy.backend)
print("distributed_type: MULTI_GPU" in config)
"""
    assert run(copy, script) == "dual_gpu_dummy ddp 2 nccl\nTrue\n"


DUMMY = """
    Lever(
        name="smoothed",
        module="smoothed",
        switch="smoothing",
        key="training.smoothed",
        exactness="other function",
        text=lambda _: "targets smoothed",
        off="targets as they are",
        requested=lambda recipe: recipe.training.smoothed,
        tried=(False, True),
        same=lambda _: "it is a dummy",
        mode_refusal=lambda mode, _: "has not been smoothed" if mode.zero_stage else None,
    ),"""
APPLIED = """
from __future__ import annotations

from typing import Any

from launch.schema.levers import Levers


def apply(trainer: Any, levers: Levers) -> None:
    if levers.smoothed:
        trainer.args.label_smoothing_factor = 0.1
"""


def test_a_lever(copy):
    rows = "launch/schema/levers.py"
    key = "\n    smoothed: Annotated[bool | None, PLANNED] = Field(default=None)\n"
    applied = "training/levers/smoothed.py"
    (copy / applied).write_text(APPLIED, encoding="utf-8")
    changed = {
        add(copy, rows, '"""The levers\' own keys."""\n', key),
        add(copy, rows, 'are those of a plain step."""\n', "\n    smoothed: bool = False"),
        add(copy, rows, "\nLEVERS = (", DUMMY),
    }
    assert changed == files_named("A lever")
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "data").mkdir()
    row = json.dumps({"prompt": "What is two and two?", "response": "Four."})
    (copy / "data/rows.jsonl").write_text(f"{row}\n" * 64, encoding="utf-8")
    flags = ("--model.shape=llama-tiny", "--data.train_file=data/rows.jsonl", "--model.path=null")
    machine = ("--machine", "configs/machines/a5000-16g.yaml")
    plans = [
        json.loads(run(copy, MAIN, "plan", "single_gpu", *machine, *flags, *asked, "--json"))
        for asked in ((), ("--training.smoothed=true",))
    ]
    assert [plan["strategy"]["levers"]["smoothed"] for plan in plans] == [False, True]
    rows_of = [{each["name"]: each for each in plan["switches"]} for plan in plans]
    assert [each["smoothing"]["runs"] for each in rows_of] == [
        "targets as they are",
        "targets smoothed",
    ]
    assert "targets smoothed" in "".join(plans[1]["table"])
    # the recorder applied it: a smoothed loss takes more memory and time
    assert plans[1]["seconds_per_step"] > plans[0]["seconds_per_step"]
    refused = "--training.smoothed=true", "--launch.mode=deepspeed_zero2_offload"
    with pytest.raises(AssertionError, match="has not been smoothed"):
        run(copy, MAIN, "plan", "single_gpu", *machine, *flags, *refused, "--json")


KEY = """
    colour: Annotated[Literal["red", "blue"], affects("rows")] = Field(
        default="red", description="The colour of packed rows."
    )
"""
UNREAD = """
    (
        ("data.colour",),
        lambda recipe: not recipe.data.packing,
        "rows are not packed",
    ),"""


def test_a_recipe_key(copy):
    section, unread = "launch/schema/data_section.py", "launch/recipe/unread_keys.py"
    table = "\nROWS: Sequence[tuple[tuple[str, ...], Callable[[Recipe], bool], str]] = ("
    changed = {
        add(copy, section, 'unless they are named here."""\n', KEY),
        add(copy, unread, table, UNREAD),
    }
    assert changed == files_named("A recipe key")
    shutil.copy(ROOT / "pyproject.toml", copy)
    text = run(copy, MAIN, "keys", "data.colour")
    assert text.startswith("data.colour: red | blue; default red\n    The colour of packed rows.")
    script = """
from launch.recipe import load, unread_keys
recipe, _ = load.load("sft_fast", ["data.colour=blue"], False)
whys = [why for _, key, why in unread_keys.of_recipe(recipe) if key == "colour"]
print(recipe.data.colour, *whys)
"""
    assert run(copy, script) == "blue rows are not packed\n"


VERB = """
FLAGS = {"name": {"help": "who is greeted"}}


def main(arguments):
    print(f"good morning, {arguments.name}")
    return 0
"""


def test_a_verb(copy):
    (copy / "launch/commands/greet.py").write_text(VERB, encoding="utf-8")
    changed = {
        add(
            copy,
            "launch/__main__.py",
            "\nVERBS = {",
            '\n    "greet": ("greet", "say good morning"),',
        )
    }
    assert changed == files_named("A verb")
    shutil.copy(ROOT / "pyproject.toml", copy)
    assert run(copy, MAIN, "greet", "Ada") == "good morning, Ada\n"
    assert "say good morning" in run(copy, MAIN, "--help")


def test_a_file_type(copy):
    changed = {
        add(copy, "launch/schema/plan.py", "\nFileType = Literal[", '"psv", '),
        add(
            copy,
            "launch/data/files/folders.py",
            "SUFFIXES: dict[str, FileType] = {",
            '".psv": "psv", ',
        ),
        add(copy, "launch/data/files/text_files.py", "\nDELIMITERS = {", '"psv": "|", '),
    }
    assert changed < files_named("A file type")
    (copy / "rows.psv").write_text("prompt|response\nWhat is red?|A colour.\n", encoding="utf-8")
    script = """
from pathlib import Path
from launch.data import columns, rows
from launch.schema.data_section import DataSection
found = columns.detect(DataSection(train_file="rows.psv"), Path("."))
(sample,) = rows.read_samples(Path("rows.psv"), found)
print(found.file_type, *(turn["content"] for turn in sample.messages), sep="\\n")
"""
    assert run(copy, script) == "psv\nWhat is red?\nA colour.\n"


def test_a_failure_kind(copy):
    row = """
    Pattern(
        "coffee",
        11,
        "the coffee machine is empty",
        "fill it",
        (r"BeanError: no beans",),
    ),"""
    changed = {
        add(copy, "launch/supervise/failure_patterns.py", "\nPATTERNS = (", row),
        add(copy, "launch/supervise/restarts.py", "PASSING = frozenset({", '"coffee", '),
    }
    assert changed == files_named("A failure kind")
    script = """
from launch.schema.result import AttemptRecord, Ended
from launch.supervise import failures, restarts
evidence = AttemptRecord(
    ended=Ended(1), rank_errors=(), log_tail="step 3\\nkitchen.BeanError: no beans left",
    oom_kills=0, host_limit_bytes=3 << 30, completed=False,
)
failure = failures.classify(evidence)
following = restarts.decide(failure, restarts.History(), 0, 3, 2, limit=10)
print(failure.kind, failure.exit_code, failure.proof, following.action, sep="|")
"""
    assert run(copy, script) == "coffee|11|kitchen.BeanError: no beans left|again\n"


def test_a_data_format(copy):
    row = """
    (
        "riddle",
        "prompt_response",
        {"prompt": "riddle", "response": "solution"},
        None,
    ),"""
    changed = {add(copy, "launch/data/columns.py", "str | None], ...] = (", row)}
    assert changed == files_named("A data format")
    riddle = {"riddle": "What has teeth and cannot bite?", "solution": "A comb."}
    (copy / "riddles.jsonl").write_text(json.dumps(riddle) + "\n", encoding="utf-8")
    script = """
from pathlib import Path
from launch.data import columns, rows
from launch.schema.data_section import DataSection
found = columns.detect(DataSection(train_file="riddles.jsonl"), Path("."))
(sample,) = rows.read_samples(Path("riddles.jsonl"), found)
print(found.reason, *(turn["content"] for turn in sample.messages), sep="|")
"""
    reason, question, answer = run(copy, script).strip().split("|")
    assert reason == "riddle: data.train_file has the columns riddle, solution"
    assert {"riddle": question, "solution": answer} == riddle


@pytest.mark.parametrize("kind", ["An engine", "A model family", "A version of torch"])
def test_the_files_that_are_named_are_there(kind):
    assert files_named(kind)
    assert [file for file in files_named(kind) if not (ROOT / file).is_file()] == []
