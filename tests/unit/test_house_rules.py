"""What holds for every module of launch/ and training/, and for every recipe on every described machine."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.errors import DoesNotFit
from launch.resolve import SAMPLE_FILES, resolve
from launch.schema import Plan

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))
MACHINES = sorted((ROOT / "configs" / "machines").glob("*.yaml"))
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy", "pyarrow"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A house of its own with the sample data, which the first recipe that asks for it has written."""
    root = tmp_path_factory.mktemp("a house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWMEM_ROOT", str(root))
        resolve("sft", [], ROOT / "configs" / "machines" / "cpu.yaml")
        yield root


def modules_used(source: Path) -> set[str]:
    """launch.errors, training.data, torch, ...: every module that a file imports, wherever in it."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            names = [alias.name for alias in node.names]
            used |= {f"{node.module}.{name}" for name in names} if node.module == "launch" else {str(node.module)}
    return used


def test_every_module_of_launch_imports_without_the_heavy_libraries():
    code = """
import importlib, pkgutil, sys, launch
for module in pkgutil.iter_modules(launch.__path__):
    importlib.import_module(f"launch.{module.name}")
print(*{name.partition(".")[0] for name in sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("source", sorted((ROOT / "launch").glob("*.py")), ids=lambda path: path.stem)
def test_launch_never_imports_training(source):
    assert not [name for name in modules_used(source) if name.partition(".")[0] == "training"]


@pytest.mark.parametrize("source", sorted((ROOT / "training").glob("*.py")), ids=lambda path: path.stem)
def test_training_imports_only_the_nouns_and_the_files_of_launch(source):
    of_launch = {name for name in modules_used(source) if name.partition(".")[0] == "launch"}
    files = {"launch.rundir", "launch.manifest", "launch.shards", "launch.untrained", "launch.token_hashes"}
    assert of_launch <= {"launch.errors", "launch.schema"} | files


# Loaders that cannot run a folder's code: peft has no such option, the quantizer is handed a configuration in memory
CODELESS = {"PeftModel": "local_files_only", "PeftConfig": "local_files_only", "AutoHfQuantizer": None}
RUNS_CODE = {"pipeline", "get_class_from_dynamic_module", "load_custom_generate", "AutoPeftModel"}


def calls_that_may_run_a_folders_code(source: Path) -> list[str]:
    """file:line of each from_pretrained() and from_config() that does not rule out code and downloads in so many words,
    of each that hides behind another name, and of what runs a folder's code by itself."""
    found = []
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        where = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [where] if not (isinstance(node.value, ast.Constant) and node.value.value is False) else []
        if isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            found += [where] if name in RUNS_CODE or name == "from_pretrained" else []
        if not isinstance(node, ast.Attribute) or node.attr not in ("from_pretrained", "from_config"):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        wanted = {"trust_remote_code": False} | ({"local_files_only": True} if node.attr == "from_pretrained" else {})
        if owner in CODELESS:
            wanted = {CODELESS[owner]: True} if CODELESS[owner] else {}
        call = called.get(id(node))
        keywords = call.keywords if call else []
        said = {word.arg: word.value.value for word in keywords if isinstance(word.value, ast.Constant)}
        if call is None or any(said.get(name) is not value for name, value in wanted.items()):
            found.append(where)
    return found


def test_no_loader_of_folders_may_run_their_code_or_download():
    sources = [path for folder in ("launch", "training", "scripts") for path in sorted((ROOT / folder).glob("*.py"))]
    sources.append(ROOT / "train_low_mem.py")
    loaders = [path.name for path in sources if ".from_pretrained(" in path.read_text(encoding="utf-8")]
    assert {"model.py", "tokenizer.py", "merge.py", "chat.py"} <= set(loaders)  # else the test looks past them
    assert [line for source in sources for line in calls_that_may_run_a_folders_code(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "AutoConfig.from_pretrained(folder, local_files_only=True)",
        "AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)",
        "AutoModelForCausalLM.from_config(config)",
        "PeftModel.from_pretrained(model, folder)",
        "read = AutoConfig.from_pretrained",
        "options = dict(trust_remote_code=True)",
        "from transformers import pipeline",
    ],
)
def test_that_check_sees_each_way_to_leave_it_open(tmp_path, line):
    source = tmp_path / "one.py"
    source.write_text(line + "\n")
    assert set(calls_that_may_run_a_folders_code(source)) == {"one.py:1"}


def test_a_plan_takes_less_than_half_a_second_and_no_torch(house):
    argv = [sys.executable, "-X", "importtime", "-m", "launch", "plan", "sft_fast"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds = []  # of CPU time, the fastest of three: the machine may be busy
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.startswith("plan for sft_fast on ")
    imported = re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)
    assert "launch.resolve" in imported
    assert not {"torch", "transformers", "accelerate", "deepspeed", "datasets"} & set(imported)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_plan_or_does_not_fit_on_every_described_machine(name, machine, house):
    keys = ("data.train_file", "data.validation_file")
    overrides = [f"--{key}={house / file}" for key, file in zip(keys, SAMPLE_FILES, strict=True)]
    try:
        plan = resolve(name, overrides, machine, trace=False).plan
    except DoesNotFit as error:
        assert "Nearest" in str(error)
    else:
        assert isinstance(plan, Plan)
        assert plan.recipe_name == name
        assert plan.estimate.model_state_bytes <= plan.budget_bytes
