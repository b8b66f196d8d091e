"""Facts of a start, each read once: machine, recipe, model, data, packages, links."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from launch.base import environment, files
from launch.base.errors import ResourceError
from launch.base.workspace import FILES, Workspace
from launch.data import columns, token_cache
from launch.plan import context as plan_context
from launch.plan import planner
from launch.plan.candidates import CPU_MODES, NO_CONSTRAINTS, ONE_PROCESS, LaunchConstraints
from launch.plan.planner import Choice
from launch.predict import model_config
from launch.predict.estimate import PlanContext
from launch.predict.memory.allocator import TORCH_DEFAULTS, AllocatorConfig
from launch.predict.traces import Traces
from launch.probe import import_memory, link_causes, link_test, packages, torch_build
from launch.probe import machine as probe_machine
from launch.recipe import load
from launch.recipe.paths import (
    absolute_override,
    use_existing_model,
    use_existing_tokenizer,
    with_absolute_paths,
)
from launch.schema.machine import Device, Link, Machine
from launch.schema.plan import ModelSize, Strategy
from launch.schema.recipe import Recipe

TOKENIZER_FILES = ("token*", "*.model", "vocab*")  # names in a folder; *.model: sentencepiece
SAMPLE_FILES = ("data/sft_train_small_train.parquet", "data/sft_train_small_valid.parquet")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """Everything that a start is decided with."""

    workspace: Workspace
    context: PlanContext
    constraints: LaunchConstraints


def resolve(
    recipe_name: str,
    overrides: Sequence[str],
    machine_file: Path | None = None,
    constraints: LaunchConstraints = NO_CONSTRAINTS,
    say: Say = lambda line: None,
    trace: bool = True,
) -> Choice:
    """The plan for a recipe, with the lengths of its rows if they are tokenised, else with
    max_length."""
    facts = read(recipe_name, overrides, machine_file, constraints, say, trace=trace)
    planner.refuse_hopeless(facts.context, facts.constraints)
    return planner.choose(facts.context, facts.constraints)


def read(
    recipe_name: str,
    overrides: Sequence[str],
    machine_file: Path | None = None,
    constraints: LaunchConstraints = NO_CONSTRAINTS,
    say: Say = lambda line: None,
    test_link: bool = False,
    trace: bool = True,
) -> Facts:
    """Read, probe and count; imports no torch. Writes nothing but sample data that a recipe names.

    `trace` False: plans count model states alone, as where many ranks start at once."""
    workspace = Workspace.here()
    machine = (
        probe_machine.described(machine_file)
        if machine_file
        else probe_machine.machine(run_dir=workspace.root)
    )
    if constraints.num_processes == 1:
        machine = _with_one_gpu(machine)
    if machine_file is None:
        packages.refuse_old()
    has_gpu = bool(machine.gpus) and not constraints.force_cpu
    recipe, changed = load.load(
        recipe_name, [absolute_override(text) for text in overrides], has_gpu
    )
    if machine_file is None and not constraints.force_cpu and recipe.launch.mode not in CPU_MODES:
        _refuse_cards(recipe, machine, constraints)
    is_file = "/" in recipe_name or recipe_name.endswith((".yaml", ".yml"))
    recipe, of_model = use_existing_model(
        with_absolute_paths(recipe, Path.cwd() if is_file else workspace.root)
    )
    recipe, of_tokenizer = use_existing_tokenizer(recipe)
    for name in ("runs", "logs", ".cache"):
        files.refuse_strangers(workspace.root / name)
    files.check_output(Path(recipe.output_dir))
    if recipe.log_dir:
        files.refuse_strangers(Path(recipe.log_dir))
    if recipe.tokenizer.path and not Path(recipe.tokenizer.path).is_dir():
        raise ResourceError(
            f"tokenizer.path: there is no folder {recipe.tokenizer.path}; give one, or leave it out"
        )
    config, parameters = model_config.read(recipe.model, root=FILES)
    tokenizer = Path(recipe.tokenizer.path or recipe.model.path or "")
    model_config.check_tokenizer(tokenizer)
    if (
        machine_file is None
        and tokenizer.parts
        and not any(file for form in TOKENIZER_FILES for file in tokenizer.glob(form))
    ):
        raise ResourceError(
            f"{tokenizer}: found no tokenizer.json or its like; name a tokenizer with"
            " --tokenizer.path=FOLDER"
        )
    _write_sample_data(recipe, workspace, say)
    known = token_cache.known_files(workspace.cache)
    data_format = columns.detect(recipe.data, workspace.root, known)
    rows = None if recipe.data.streaming else columns.row_count(Path(recipe.data.train_file), known)
    constraints = replace(
        constraints, has_deepspeed=machine_file is not None or find_spec("deepspeed") is not None
    )
    if recipe.training.compiles and machine_file is None:
        constraints = replace(
            constraints, no_compiler=packages.no_compiler(has_gpu, environment.passed(os.environ))
        )
    if machine_file is None:
        packages.refuse_missing(recipe)
    if machine_file is None and has_gpu:
        flash = (
            None
            if recipe.model.attn_implementation in ("sdpa", "eager")
            else import_memory.no_flash_attn(workspace.cache)
        )
        liger = packages.no_liger(environment.passed(os.environ))
        constraints = replace(constraints, no_flash_attn=flash, no_liger=liger)
        constraints = replace(
            constraints, link=_link(recipe, machine, constraints, workspace, say, test_link)
        )
    context = plan_context.build(recipe, machine, config, parameters, data_format)
    device: Device = "cuda" if has_gpu else "cpu"
    tokens = token_cache.token_cache(workspace.cache, recipe, context.shape, data_format)
    has_base = recipe.lora is not None and recipe.model.path is not None
    context = replace(
        context,
        changes=(*changed, *of_model, *of_tokenizer),
        rows=rows,
        tokens=replace(tokens, rows=rows),
        base_fingerprint=(
            model_config.weights_fingerprint(Path(str(recipe.model.path))) if has_base else None
        ),
        imports=import_memory.known(workspace.cache, device),
    )
    if machine_file is None and workspace.ledger_file.exists():
        context = replace(context, recall=_recall(workspace, machine, say))
    if trace:
        context = replace(
            context,
            traces=Traces(recipe, context.shape, context.lora_targets, workspace.traces, say),
            allocator=(
                AllocatorConfig.parse(_allocator_settings(os.environ))
                if has_gpu
                else TORCH_DEFAULTS
            ),
            error_margin=_error_margin(workspace, machine, device, say),
        )
    return Facts(workspace, plan_context.with_rows(context), constraints)


def _with_one_gpu(machine: Machine) -> Machine:
    """The machine as a single process of another launcher uses it: of its GPUs the one with the
    most free memory, the first of several."""
    if len(machine.gpus) < 2:
        return machine
    chosen = max(machine.gpus, key=lambda gpu: gpu.free_bytes)
    reason = (
        f"{machine.gpus_reason}; one process uses one of {len(machine.gpus)} GPUs: {chosen.index},"
        " which has the most free memory"
    )
    return replace(machine, gpus=(chosen,), gpus_reason=reason)


def _refuse_cards(recipe: Recipe, machine: Machine, constraints: LaunchConstraints) -> None:
    """Raises ResourceError for cards that are here and cannot be used: nobody asked for the CPU."""
    if machine.gpus_obstacle and not machine.gpus:
        raise ResourceError(
            f"{machine.gpus_obstacle}; or train on the CPU on purpose: --launch.mode=cpu"
        )
    launch = recipe.launch
    asked = 1 if launch.mode == "single_gpu" else constraints.num_processes or launch.num_processes
    count = asked // max(launch.nodes, constraints.num_machines) if asked else len(machine.gpus)
    torch_build.refuse(machine, machine.gpus[:count])


def _allocator_settings(environ: Mapping[str, str]) -> str:
    """What the ranks' allocator will be told; torch reads the first that is set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next((environ[name] for name in names if environ.get(name)), "")


def _error_margin(workspace: Workspace, machine: Machine, device: Device, say: Say) -> float:
    """Share by which measured memory exceeds a prediction here in the usual run; 0 while too few
    runs have been measured."""
    if not workspace.ledger_file.exists():
        return 0.0
    from launch.predict.history.cache_keys import machine_key
    from launch.predict.history.ledger import Ledger

    ledger = Ledger(workspace.ledger_file, say)
    margin = ledger.margin("reserved_bytes", device, machine_key(machine), prior=0.0)
    return max(margin.fraction, 0.0)


def _recall(
    workspace: Workspace, machine: Machine, say: Say
) -> Callable[[ModelSize, Recipe], Strategy | None]:
    """A reader of the strategies that trials on this machine have found."""
    from launch.predict.history import cache_keys
    from launch.predict.history.ledger import Ledger

    def recall(shape: ModelSize, recipe: Recipe) -> Strategy | None:
        keys = cache_keys.model_key(shape), cache_keys.recipe_key(recipe)
        tuned = Ledger(workspace.ledger_file, say).recall(cache_keys.machine_key(machine), *keys)
        return tuned.strategy if tuned else None

    return recall


def _link(
    recipe: Recipe,
    machine: Machine,
    constraints: LaunchConstraints,
    workspace: Workspace,
    say: Say,
    test: bool,
) -> Link | None:
    """What carries an all-reduce between this machine's GPUs: as known, or tested now. None: it
    does not matter."""
    launch = recipe.launch
    count = (launch.num_processes or len(machine.gpus) * launch.nodes) // launch.nodes
    settled = (
        constraints.num_processes is not None
        or constraints.force_gloo
        or launch.mode == "dual_gpu_gloo"
    )
    if settled or launch.mode in ONE_PROCESS or not 1 < count <= len(machine.gpus):
        return None
    variables = environment.passed(os.environ)
    if not test:
        return link_test.known(machine, count, workspace.cache, variables)
    link = link_test.link(machine, count, workspace.cache, variables, say=say)
    if driver := next((attempt for attempt in link.tries if attempt.cause == "driver"), None):
        cause = link_causes.BY_NAME["driver"]
        raise ResourceError(f"link test: {cause.what}: {driver.said}; fix: {cause.fix}")
    return link


def _write_sample_data(recipe: Recipe, workspace: Workspace, say: Say) -> None:
    """The guides' small data set, when a recipe asks for it and nobody has put it there."""
    train, valid = (workspace.root / name for name in SAMPLE_FILES)
    if Path(recipe.data.train_file) != train or train.exists():
        return
    if recipe.data.validation_file and Path(recipe.data.validation_file) != valid:
        return
    say(f"{SAMPLE_FILES[0]} is not there: writing the sample data (scripts/make_sample_data.py)")
    script = FILES / "scripts" / "make_sample_data.py"
    argv = [sys.executable, str(script), "--out-dir", str(train.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(f"{script.name} failed: {done.stderr.strip()}")
