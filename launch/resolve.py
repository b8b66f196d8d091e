"""From what was typed to a recipe and a plan: the one path that plan, run and the guides' direct start all take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from launch import (
    columns,
    concessions,
    environment,
    host_memory,
    imports,
    link_causes,
    packages,
    planner,
    preflight,
    probe,
    recipes,
    rundir,
    shapes,
    token_hashes,
    torch_build,
)
from launch.allocator import TORCH_DEFAULTS, AllocatorConfig
from launch.candidates import CPU_MODES, ONE_PROCESS, Given
from launch.errors import DoesNotFit, ResourceError
from launch.estimate import Subject, host_budget_bytes
from launch.rundir import CODE, House
from launch.schema import Change, Device, Link, Machine, Plan, Recipe, Strategy
from launch.traces import Traces

PATH_KEYS = (
    "data.train_file",
    "data.validation_file",
    "model.path",
    "model.path_if_there",
    "tokenizer.path",
    "tokenizer.path_if_there",
    "output_dir",
    "log_dir",
)
TOKENIZER_FILES = ("token*", "*.model", "vocab*")  # names in a folder; *.model: sentencepiece
SAMPLE_FILES = ("data/sft_train_small_train.parquet", "data/sft_train_small_valid.parquet")


@dataclass(frozen=True)
class Resolved:
    """A start, decided but not begun."""

    house: House
    recipe: Recipe
    machine: Machine
    plan: Plan
    about: Subject | None = None  # what the plan was chosen with


def resolve(
    recipe_name: str,
    overrides: Sequence[str],
    machine_file: Path | None = None,
    given: Given = Given(),  # noqa: B008  a frozen value
    say: Callable[[str], None] = lambda line: None,
    test_link: bool = False,
    trace: bool = True,
) -> Resolved:
    """Read, probe, count and plan; imports no torch. Writes nothing but traces, and sample data that a recipe names.

    `trace` False: the plan counts model states alone, as where many ranks start at once."""
    house = House.here()
    machine = probe.described(machine_file) if machine_file else probe.machine(run_dir=house.root)
    if given.num_processes == 1:
        machine = _with_one_gpu(machine)
    if machine_file is None:
        packages.refuse_old()
    has_gpu = bool(machine.gpus) and not given.force_cpu
    recipe, changed = recipes.load(recipe_name, [_absolute(text) for text in overrides], has_gpu)
    if machine_file is None and not given.force_cpu and recipe.launch.mode not in CPU_MODES:
        _refuse_cards(recipe, machine, given)
    is_file = "/" in recipe_name or recipe_name.endswith((".yaml", ".yml"))
    recipe, first = _model_that_is_there(_rooted(recipe, Path.cwd() if is_file else house.root))
    recipe, found = _tokenizer_that_is_there(recipe)
    for name in ("runs", "logs", ".cache"):
        rundir.refuse_strangers(house.root / name)
    rundir.check_output(Path(recipe.output_dir))
    if recipe.log_dir:
        rundir.refuse_strangers(Path(recipe.log_dir))
    if recipe.tokenizer.path and not Path(recipe.tokenizer.path).is_dir():
        raise ResourceError(f"tokenizer.path: there is no folder {recipe.tokenizer.path}; give one, or leave it out")
    config, parameter_shapes = shapes.read(recipe.model, root=CODE)
    cut = Path(recipe.tokenizer.path or recipe.model.path or "")
    if machine_file is None and cut.parts and not any(file for form in TOKENIZER_FILES for file in cut.glob(form)):
        raise ResourceError(
            f"{cut}: found no tokenizer.json or its like; name a tokenizer with --tokenizer.path=FOLDER"
        )
    _write_sample_data(recipe, house, say)
    known = rundir.known_files(house.cache)
    data_format = columns.detect(recipe.data, house.root, known)
    rows = None if recipe.data.streaming else columns.row_count(Path(recipe.data.train_file), known)
    given = replace(given, has_deepspeed=machine_file is not None or find_spec("deepspeed") is not None)
    if recipe.training.compiles and machine_file is None:
        given = replace(given, no_compiler=packages.no_compiler(has_gpu, environment.passed(os.environ)))
    if machine_file is None:
        packages.refuse_missing(recipe)
    if machine_file is None and has_gpu:
        flash = None if recipe.model.attn_implementation in ("sdpa", "eager") else imports.no_flash_attn(house.cache)
        liger = packages.no_liger(environment.passed(os.environ))
        given = replace(given, no_flash_attn=flash, no_liger=liger)
        given = replace(given, link=_link(recipe, machine, given, house, say, test_link))
    changes = (*changed, *first, *found)

    def planned(recipe: Recipe, changes: Sequence[Change]) -> Resolved:
        about = planner.subject(recipe, machine, config, parameter_shapes, data_format)
        base = shapes.weights_fingerprint(Path(recipe.model.path)) if recipe.lora and recipe.model.path else None
        about = replace(with_counts(house, about), rows=rows, base_fingerprint=base)
        device = "cuda" if has_gpu else "cpu"
        if trace:
            about = replace(
                about,
                traces=Traces(recipe, about.shape, about.lora_targets, house.traces, say),
                imports=imports.known(house.cache, device),
                allocator=AllocatorConfig.parse(_allocator_settings(os.environ)) if has_gpu else TORCH_DEFAULTS,
                usual=_usual(house, machine, device, say),
            )
        wants_tuned = given.wants_tuned and machine_file is None and house.ledger_file.exists()
        tuned = _tuned(house, about, say) if wants_tuned else None
        known = replace(given, tuned=tuned, assume_fits=recipe.launch.assume_fits, offers_ways=not recipe.allow)
        with suppress(DoesNotFit):  # what ran out once is planned within the budgets, where that can be
            if known.assume_fits and given.exceeded.ran_out:
                plan = planner.choose(about, changes, replace(known, assume_fits=False), rows)
                return Resolved(house, recipe, machine, plan, about)
        return Resolved(house, recipe, machine, planner.choose(about, changes, known, rows), about)

    try:
        if recipe in given.exceeded.spent:
            raise DoesNotFit(
                f"{recipe.name}: all plans of this start took more memory than there is, each less than the one"
                " before; the same line again tries a smaller one, from the last checkpoint if there is one"
            )
        return planned(recipe, changes)
    except DoesNotFit as refusal:
        if not recipe.allow:
            raise
        given_up: tuple[Change, ...] = ()
        for gentler, given_up in concessions.rungs(recipe, config["model_type"]):
            with suppress(DoesNotFit):  # the next one gives up more
                if gentler not in given.exceeded.spent:
                    return planned(gentler, (*changes, *given_up))
        raise DoesNotFit(
            f"{refusal}. Nor does it fit with all that allow: [{', '.join(recipe.allow)}] gives up"
            f" ({', '.join(f'{change.key} {change.effective}' for change in given_up) or 'nothing here'})"
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


def _refuse_cards(recipe: Recipe, machine: Machine, given: Given) -> None:
    """Raises ResourceError for cards that are here and cannot be used: nobody asked for the CPU."""
    if machine.gpus_obstacle and not machine.gpus:
        raise ResourceError(f"{machine.gpus_obstacle}; or train on the CPU on purpose: --launch.mode=cpu")
    launch = recipe.launch
    asked = 1 if launch.mode == "single_gpu" else given.num_processes or launch.num_processes
    count = asked // max(launch.nodes, given.num_machines) if asked else len(machine.gpus)
    torch_build.refuse(machine, machine.gpus[:count])


def _allocator_settings(environ: Mapping[str, str]) -> str:
    """What the ranks' allocator will be told; torch reads the first that is set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next((environ[name] for name in names if environ.get(name)), "")


def _usual(house: House, machine: Machine, device: Device, say: Callable[[str], None]) -> float:
    """By which share of itself a prediction has to be exceeded here to be a surprise; 0 while too few runs tell."""
    if not house.ledger_file.exists():
        return 0.0
    from launch.keys import machine_key
    from launch.ledger import Ledger

    ledger = Ledger(house.ledger_file, say)
    return max(ledger.margin("reserved_bytes", device, machine_key(machine), prior=0.0).fraction, 0.0)


def _tuned(house: House, about: Subject, say: Callable[[str], None]) -> Strategy | None:
    """What trials have found before for this machine, model and recipe."""
    from launch import keys
    from launch.ledger import Ledger

    of = keys.machine_key(about.machine), keys.model_key(about.shape), keys.recipe_key(about.recipe)
    found = Ledger(house.ledger_file, say).recall(*of)
    return found.strategy if found else None


def with_counts(house: House, about: Subject) -> Subject:
    """The subject with what is known of its tokenised rows; as it is where none have been tokenised yet."""
    tokens = rundir.token_cache(house.cache, about.recipe, about.shape, about.data_format)
    counts = token_hashes.counts(tokens)
    if counts is None or "train" not in counts:  # not tokenised yet, or damaged: they will be again; streamed
        return about
    parts = [part for part in counts.values() if isinstance(part, dict)]
    if not all("shortest_input" in part for part in parts):  # written by an older version
        return about
    longest = max(part["longest_input"] for part in parts)
    return replace(
        about,
        lengths=(longest, max(part["longest_target"] for part in parts)),
        is_ragged=any(part["shortest_input"] < longest for part in parts),
        counts=counts["train"],
        cache_bytes=sum(file.stat().st_size for file in tokens.glob("*.arrow")),
    )


def tokenising_processes(resolved: Resolved) -> int:
    """How many processes may tokenise this start's data side by side."""
    device = resolved.plan.strategy.device
    budget = host_budget_bytes(resolved.recipe, resolved.machine)
    held = imports.known(resolved.house.cache, device)
    return host_memory.tokenising_processes(resolved.recipe.data, held, resolved.machine.cpu_count, budget)


def _link(
    recipe: Recipe, machine: Machine, given: Given, house: House, say: Callable[[str], None], test: bool
) -> Link | None:
    """What carries an all-reduce between this machine's GPUs: as known, or tested now. None: it does not matter."""
    launch = recipe.launch
    count = (launch.num_processes or len(machine.gpus) * launch.nodes) // launch.nodes
    settled = given.num_processes is not None or given.force_gloo or launch.mode == "dual_gpu_gloo"
    if settled or launch.mode in ONE_PROCESS or not 1 < count <= len(machine.gpus):
        return None
    variables = environment.passed(os.environ)
    if not test:
        return preflight.known(machine, count, house.cache, variables)
    link = preflight.link(machine, count, house.cache, variables, say=say)
    if driver := next((attempt for attempt in link.tries if attempt.cause == "driver"), None):
        cause = link_causes.BY_NAME["driver"]
        raise ResourceError(f"link test: {cause.what}: {driver.said}; fix: {cause.fix}")
    return link


def _model_that_is_there(recipe: Recipe) -> tuple[Recipe, list[Change]]:
    """model.path_if_there as model.path, where that folder holds a model and no other was named."""
    section = recipe.model
    folder = section.path_if_there
    if folder is None or section.path is not None:
        return recipe, []
    if not (Path(folder) / "config.json").is_file():
        reason = f"no model is in {folder} yet: training starts from random weights"
        return recipe, [Change("model.path_if_there", folder, "none", reason)]
    change = Change("model.shape", str(section.shape), folder, "the model of model.path_if_there is there")
    chosen = section.model_copy(update={"path": folder, "shape": None})
    return recipe.model_copy(update={"model": chosen}), [change]


def _tokenizer_that_is_there(recipe: Recipe) -> tuple[Recipe, list[Change]]:
    """tokenizer.path_if_there as tokenizer.path, where that folder exists and nothing else was named."""
    section = recipe.tokenizer
    named = section.path or recipe.model.path
    if named or section.path_if_there is None or not Path(section.path_if_there).is_dir():
        return recipe, []
    chosen = section.model_copy(update={"path": section.path_if_there})
    change = Change("tokenizer.path", "none", section.path_if_there, "the folder of tokenizer.path_if_there is there")
    return recipe.model_copy(update={"tokenizer": chosen}), [change]


def _absolute(override: str) -> str:
    """A path typed on the command line is relative to where it was typed; the text is kept for messages."""
    key, equals, value = override.partition("=")
    if not equals or key.lstrip("-").replace("-", "_") not in PATH_KEYS or value in ("", "null", "~"):
        return override
    made = recipes.Override(f"{key}={_join(Path.cwd(), value)}")
    made.typed = override.typed if isinstance(override, recipes.Override) and override.typed else override
    return made


def _rooted(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with every path absolute."""
    raw = recipe.model_dump(exclude_unset=True)  # what was left open stays open to planning
    for dotted in PATH_KEYS:
        *parents, key = dotted.split(".")
        section = raw
        for parent in parents:
            section = section.get(parent, {})
        if section.get(key) is not None:
            section[key] = _join(base, section[key])
    return Recipe.model_validate(raw)


def _join(base: Path, path: str) -> str:
    return os.path.normpath(base / Path(path).expanduser())


def _write_sample_data(recipe: Recipe, house: House, say: Callable[[str], None]) -> None:
    """The guides' small data set, when a recipe asks for it and nobody has put it there."""
    train, valid = (house.root / name for name in SAMPLE_FILES)
    if Path(recipe.data.train_file) != train or train.exists():
        return
    if recipe.data.validation_file and Path(recipe.data.validation_file) != valid:
        return
    say(f"{SAMPLE_FILES[0]} is not there: writing the sample data (scripts/make_sample_data.py)")
    script = CODE / "scripts" / "make_sample_data.py"
    argv = [sys.executable, str(script), "--out-dir", str(train.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(f"{script.name} failed: {done.stderr.strip()}")
