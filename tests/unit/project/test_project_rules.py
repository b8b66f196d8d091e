"""What holds for every module of launch/ and training/, and for every recipe on every described
machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks import sources as result_sources
from launch.base.errors import DoesNotFit
from launch.base.files import to_json
from launch.plan.resolve import SAMPLE_FILES, resolve
from launch.probe import described
from launch.schema.plan import Plan

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))
MACHINES = sorted((ROOT / "configs" / "machines").glob("*.yaml"))
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy", "pyarrow"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A house of its own with the sample data, which the first recipe that asks for it has
    written."""
    root = tmp_path_factory.mktemp("a house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWMEM_ROOT", str(root))
        resolve("sft", [], described.from_file(ROOT / "configs" / "machines" / "cpu.yaml"))
        yield root


# folders (and modules beside them) from the bottom up: each imports what stands before it
LAYERS = {
    "launch": (
        *("schema", "base", "probe", "data", "hub", "predict", "recipe", "plan", "queue"),
        *("run_folder", "render", "supervise", "status", "report", "commands", "__main__"),
    ),
    "training": (
        "log",
        "compat",
        "checkpoints",
        "control",
        "data",
        "model",
        "engines",
        "levers",
        "loop",
        "run",
        "trace",
        "core_rates",
        "worker",
        "children",
    ),
}
# folders of launch/ that training/ imports
OF_BOTH_SIDES = {"base", "data", "run_folder", "schema"}
MOST_MODULES = 15  # of a folder


def sources(*folders: str) -> list[Path]:
    """Every module below these folders."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 20, f"{folders}: {len(found)} modules; the search does not go down"
    return [path for path in found if path.name != "__init__.py"]


def name_of(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts)


def modules_used(source: Path) -> set[str]:
    """launch.base.errors, training.data.encode, torch, ...: each module that a file imports,
    wherever in it."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    return used


def test_every_module_of_launch_imports_without_the_heavy_libraries():
    modules = [
        name for path in sources("launch") if not (name := name_of(path)).endswith("__main__")
    ]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("source", sources("launch", "training"), ids=name_of)
def test_imports_between_folders_run_one_way(source):
    package, layer, *_ = name_of(source).split(".")
    order = LAYERS[package]
    used = {name.split(".")[1] for name in modules_used(source) if name.startswith(f"{package}.")}
    assert {folder for folder in used if order.index(folder) > order.index(layer)} == set()


@pytest.mark.parametrize("source", sources("launch"), ids=name_of)
def test_launch_never_imports_training(source):
    assert not [name for name in modules_used(source) if name.partition(".")[0] == "training"]


@pytest.mark.parametrize("source", sources("training"), ids=name_of)
def test_training_imports_only_what_both_sides_share(source):
    used = {name.split(".")[1] for name in modules_used(source) if name.startswith("launch.")}
    assert used <= OF_BOTH_SIDES


def test_no_folder_holds_more_modules_than_a_reader_can_survey():
    modules = Counter(path.parent for path in sources("launch", "training", "tests"))
    assert {str(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


# Loaders that cannot run a folder's code: peft has no such option, the quantizer is handed a
# configuration in memory
CODELESS = {
    "GenerationConfig": "local_files_only",
    "PeftModel": "local_files_only",
    "PeftConfig": "local_files_only",
    "AutoHfQuantizer": None,
}
RUNS_CODE = {"pipeline", "get_class_from_dynamic_module", "load_custom_generate", "AutoPeftModel"}


def calls_that_may_run_a_folders_code(source: Path) -> list[str]:
    """file:line of each from_pretrained() and from_config() that does not rule out code and
    downloads in so many words, of each that hides behind another name, and of what runs a folder's
    code by itself."""
    found = []
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        where = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += (
                [where]
                if not (isinstance(node.value, ast.Constant) and node.value.value is False)
                else []
            )
        if isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            found += [where] if name in RUNS_CODE or name == "from_pretrained" else []
        if not isinstance(node, ast.Attribute) or node.attr not in (
            "from_pretrained",
            "from_config",
        ):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        wanted = {"trust_remote_code": False} | (
            {"local_files_only": True} if node.attr == "from_pretrained" else {}
        )
        if owner in CODELESS:
            wanted = {CODELESS[owner]: True} if CODELESS[owner] else {}
        call = called.get(id(node))
        keywords = call.keywords if call else []
        said = {
            word.arg: word.value.value for word in keywords if isinstance(word.value, ast.Constant)
        }
        if call is None or any(said.get(name) is not value for name, value in wanted.items()):
            found.append(where)
    return found


def test_no_loader_of_folders_may_run_their_code_or_download():
    files = [
        *sources("launch", "training"),
        *(ROOT / "scripts").glob("*.py"),
        ROOT / "train_low_mem.py",
    ]
    loaders = [
        path.name for path in files if ".from_pretrained(" in path.read_text(encoding="utf-8")
    ]
    # else the test looks past them
    assert {"build.py", "tokenizer.py", "export_check.py", "peft_private.py"} <= set(loaders)
    assert [line for file in files for line in calls_that_may_run_a_folders_code(file)] == []


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


def test_a_plan_from_a_warm_cache_imports_little_and_no_torch(workspace):
    """Its seconds are measured by benchmarks/plan_time.py; most of them are imports."""
    argv = [sys.executable, "-X", "importtime", "-m", "launch", "plan", "sft_fast"]
    for _ in range(2):  # the first may trace
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("plan for sft_fast on ")
    imported = re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)
    assert "launch.plan.resolve" in imported
    assert not {"torch", "transformers", "accelerate", "deepspeed", "datasets"} & set(imported)
    assert len(imported) < 600  # 422 in November 2026


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_plan_or_does_not_fit_on_every_described_machine(
    name, machine, workspace
):
    keys = ("data.train_file", "data.validation_file")
    overrides = [
        f"--{key}={workspace / file}" for key, file in zip(keys, SAMPLE_FILES, strict=True)
    ]
    try:
        plan = resolve(name, overrides, described.from_file(machine), trace=False).plan
    except DoesNotFit as error:
        assert "Nearest" in str(error)
    else:
        assert isinstance(plan, Plan)
        assert plan.recipe_name == name
        assert plan.estimate.model_state_bytes <= plan.budget_bytes
        written = to_json(asdict(plan))
        read = TypeAdapter(Plan).validate_json(written, strict=True)
        assert to_json(asdict(read)) == written


def _top_level_names(source: Path) -> Iterator[str]:
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            )


def test_a_name_is_public_only_if_another_file_uses_it():
    files = [
        *sources("launch", "training", "tests", "benchmarks"),
        *(ROOT / "scripts").rglob("*.*"),
        *(ROOT / "tests").rglob("*.sh"),
        *ROOT.glob("*.py"),
    ]
    words = {
        path: {*re.findall(r"\w+", path.read_text(encoding="utf-8"))}
        for path in files
        if path.suffix in (".py", ".sh")
    }
    users = Counter(word for of_file in words.values() for word in of_file)
    # a change in them makes an hour of measurements necessary (benchmarks/sources.py)
    measured = {*result_sources.files(result_sources.ENGINES)}
    alone = [
        f"{name_of(path)}.{name}"
        for path in files
        if path.relative_to(ROOT).parts[0] in ("launch", "training") and path not in measured
        for name in _top_level_names(path)
        if not name.startswith("_") and name != "main" and users[name] == 1
    ]
    assert not alone, f"{len(alone)} names want an underscore"
