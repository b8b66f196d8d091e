"""From what was typed to a recipe and a plan: the one path that plan, run and the guides' direct
start all take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from launch.base import environment, files
from launch.base.errors import DoesNotFit, ResourceError
from launch.base.workspace import FILES, Workspace
from launch.data import columns, token_cache, token_hashes
from launch.plan import context as plan_context
from launch.plan import planner, relax
from launch.plan.candidates import CPU_MODES, ONE_PROCESS, LaunchConstraints
from launch.predict import model_config
from launch.predict.estimate import PlanContext, host_budget_bytes
from launch.predict.memory import host_memory
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
from launch.schema.plan import Change, Plan, Strategy
from launch.schema.recipe import Recipe

TOKENIZER_FILES = ("token*", "*.model", "vocab*")  # names in a folder; *.model: sentencepiece
SAMPLE_FILES = ("data/sft_train_small_train.parquet", "data/sft_train_small_valid.parquet")


@dataclass(frozen=True)
class Resolved:
    """A start, decided but not begun."""

    workspace: Workspace
    recipe: Recipe
    machine: Machine
    plan: Plan
    context: PlanContext | None = None  # what the plan was chosen with


def resolve(
    recipe_name: str,
    overrides: Sequence[str],
    machine_file: Path | None = None,
    constraints: LaunchConstraints = LaunchConstraints(),  # noqa: B008  a frozen value
    say: Callable[[str], None] = lambda line: None,
    test_link: bool = False,
    trace: bool = True,
) -> Resolved:
    """Read, probe, count and plan; imports no torch. Writes nothing but traces, and sample data
    that a recipe names.

    `trace` False: the plan counts model states alone, as where many ranks start at once."""
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
    recipe, first = use_existing_model(
        with_absolute_paths(recipe, Path.cwd() if is_file else workspace.root)
    )
    recipe, found = use_existing_tokenizer(recipe)
    for name in ("runs", "logs", ".cache"):
        files.refuse_strangers(workspace.root / name)
    files.check_output(Path(recipe.output_dir))
    if recipe.log_dir:
        files.refuse_strangers(Path(recipe.log_dir))
    if recipe.tokenizer.path and not Path(recipe.tokenizer.path).is_dir():
        raise ResourceError(
            f"tokenizer.path: there is no folder {recipe.tokenizer.path}; give one, or leave it out"
        )
    config, parameters_by_name = model_config.read(recipe.model, root=FILES)
    cut = Path(recipe.tokenizer.path or recipe.model.path or "")
    model_config.check_tokenizer(cut)
    if (
        machine_file is None
        and cut.parts
        and not any(file for form in TOKENIZER_FILES for file in cut.glob(form))
    ):
        raise ResourceError(
            f"{cut}: found no tokenizer.json or its like; name a tokenizer with"
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
    changes = (*changed, *first, *found)

    def planned(recipe: Recipe, changes: Sequence[Change]) -> Resolved:
        context = plan_context.build(recipe, machine, config, parameters_by_name, data_format)
        base = (
            model_config.weights_fingerprint(Path(recipe.model.path))
            if recipe.lora and recipe.model.path
            else None
        )
        context = replace(with_counts(workspace, context), rows=rows, base_fingerprint=base)
        device = "cuda" if has_gpu else "cpu"
        if trace:
            context = replace(
                context,
                traces=Traces(recipe, context.shape, context.lora_targets, workspace.traces, say),
                imports=import_memory.known(workspace.cache, device),
                allocator=(
                    AllocatorConfig.parse(_allocator_settings(os.environ))
                    if has_gpu
                    else TORCH_DEFAULTS
                ),
                error_margin=_usual(workspace, machine, device, say),
            )
        wants_tuned = (
            constraints.wants_tuned and machine_file is None and workspace.ledger_file.exists()
        )
        tuned = _tuned(workspace, context, say) if wants_tuned else None
        known = replace(
            constraints,
            tuned=tuned,
            assume_fits=recipe.launch.assume_fits,
            offers_ways=not recipe.allow,
        )
        # what ran out once is planned within the budgets, where that can be
        with suppress(DoesNotFit):
            if known.assume_fits and constraints.oom_history.ran_out:
                plan = planner.choose(context, changes, replace(known, assume_fits=False), rows)
                return Resolved(workspace, recipe, machine, plan, context)
        return Resolved(
            workspace, recipe, machine, planner.choose(context, changes, known, rows), context
        )

    try:
        if recipe in constraints.oom_history.spent:
            raise DoesNotFit(
                f"{recipe.name}: all plans of this start took more memory than there is, each less"
                " than the one before; the same line again tries a smaller one, from the last"
                " checkpoint if there is one"
            )
        return planned(recipe, changes)
    except DoesNotFit as refusal:
        if not recipe.allow:
            raise
        given_up: tuple[Change, ...] = ()
        for gentler, given_up in relax.rungs(recipe, config["model_type"]):
            with suppress(DoesNotFit):  # the next one gives up more
                if gentler not in constraints.oom_history.spent:
                    return planned(gentler, (*changes, *given_up))
        relaxed = ", ".join(f"{change.key} {change.effective}" for change in given_up)
        raise DoesNotFit(
            f"{refusal}. Nor does it fit with all that allow: [{', '.join(recipe.allow)}] gives up"
            f" ({relaxed or 'nothing here'})"
        ) from refusal


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


def _usual(
    workspace: Workspace, machine: Machine, device: Device, say: Callable[[str], None]
) -> float:
    """By which share of itself a prediction has to be exceeded here to be a surprise; 0 while too
    few runs tell."""
    if not workspace.ledger_file.exists():
        return 0.0
    from launch.predict.history.cache_keys import machine_key
    from launch.predict.history.ledger import Ledger

    ledger = Ledger(workspace.ledger_file, say)
    return max(
        ledger.margin("reserved_bytes", device, machine_key(machine), prior=0.0).fraction, 0.0
    )


def _tuned(
    workspace: Workspace, context: PlanContext, say: Callable[[str], None]
) -> Strategy | None:
    """What trials have found before for this machine, model and recipe."""
    from launch.predict.history import cache_keys
    from launch.predict.history.ledger import Ledger

    of = (
        cache_keys.machine_key(context.machine),
        cache_keys.model_key(context.shape),
        cache_keys.recipe_key(context.recipe),
    )
    found = Ledger(workspace.ledger_file, say).recall(*of)
    return found.strategy if found else None


def with_counts(workspace: Workspace, context: PlanContext) -> PlanContext:
    """The subject with what is known of its tokenised rows; as it is where none have been tokenised
    yet."""
    tokens = token_cache.token_cache(
        workspace.cache, context.recipe, context.shape, context.data_format
    )
    counts = token_hashes.counts(tokens)
    # not tokenised yet, or damaged: they will be again; streamed
    if counts is None or "train" not in counts:
        return context
    parts = [part for part in counts.values() if isinstance(part, dict)]
    if not all("shortest_input" in part for part in parts):  # written by an older version
        return context
    longest = max(part["longest_input"] for part in parts)
    return replace(
        context,
        lengths=(longest, max(part["longest_target"] for part in parts)),
        is_ragged=any(part["shortest_input"] < longest for part in parts),
        counts=counts["train"],
        cache_bytes=sum(file.stat().st_size for file in tokens.glob("*.arrow")),
    )


def tokenising_processes(resolved: Resolved) -> int:
    """How many processes may tokenise this start's data side by side."""
    device = resolved.plan.strategy.device
    budget = host_budget_bytes(resolved.recipe, resolved.machine)
    held = import_memory.known(resolved.workspace.cache, device)
    return host_memory.tokenising_processes(
        resolved.recipe.data, held, resolved.machine.cpu_count, budget
    )


def _link(
    recipe: Recipe,
    machine: Machine,
    constraints: LaunchConstraints,
    workspace: Workspace,
    say: Callable[[str], None],
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


def _write_sample_data(recipe: Recipe, workspace: Workspace, say: Callable[[str], None]) -> None:
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
