"""Facts of a start, each read once: machine, recipe, model, data, packages, link."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from launch.base import environment, files
from launch.base.errors import ResourceError
from launch.base.workspace import FILES, Workspace
from launch.data import chat_templates, columns, sources, token_cache, token_hashes
from launch.plan import context as plan_context
from launch.plan import new_tokens, planner
from launch.plan.candidates import NO_CONSTRAINTS, LaunchConstraints
from launch.plan.new_tokens import ModelFacts
from launch.plan.planner import Choice
from launch.predict import model_config
from launch.predict.facts import PlanContext
from launch.predict.history.calibration import NO_MARGIN, Margin
from launch.predict.memory import stored_weights
from launch.predict.memory.allocator_config import AllocatorConfig, users_settings
from launch.predict.memory.stored_weights import StoredWeights
from launch.predict.traces import Traces
from launch.probe import architectures, import_memory, link_causes, link_test, packages, torch_build
from launch.probe import machine as probe_machine
from launch.queue import admission, leases, limits
from launch.queue.leases import Lease
from launch.recipe import load
from launch.recipe.paths import (
    absolute_override,
    unused_tokenizer_keys,
    use_existing_model,
    use_existing_tokenizer,
    with_absolute_paths,
)
from launch.schema.machine import Device, Link, Machine, OptionalPackage
from launch.schema.plan import Change, DataFormat, ModelSize, Strategy
from launch.schema.recipe import Recipe

TOKENIZER_FILES = ("token*", "*.model", "vocab*")  # names in a folder; *.model: sentencepiece
SAMPLE_FILES = ("data/sft_train_small_train.parquet", "data/sft_train_small_valid.parquet")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """All facts that decide a start."""

    workspace: Workspace
    context: PlanContext
    constraints: LaunchConstraints


def resolve(
    recipe_name: str,
    overrides: Sequence[str],
    described: Machine | None = None,
    constraints: LaunchConstraints = NO_CONSTRAINTS,
    say: Say = lambda line: None,
    trace: bool = True,
    rows_of: int | None = None,
    as_folder: bool = False,
) -> Choice:
    """Plan a recipe, with the lengths of its rows if they are tokenised, or with max_length.

    `rows_of`: with rows that all have this number of tokens. `as_folder`: a shape that cannot be
    meant with random weights, because it gets an adapter or stands on a described machine, is
    planned as its folder will be."""
    facts = read(recipe_name, overrides, described, constraints, say, trace=trace)
    context = facts.context
    if as_folder and context.stored is None and (described or context.recipe.lora):
        context = plan_context.as_folder(context)
    if rows_of is not None:
        context = plan_context.with_rows_of(context, rows_of)
    planner.refuse_hopeless(context, facts.constraints)
    return planner.choose(context, facts.constraints)


def read(
    recipe_name: str,
    overrides: Sequence[str],
    described: Machine | None = None,
    constraints: LaunchConstraints = NO_CONSTRAINTS,
    say: Say = lambda line: None,
    test_link: bool = False,
    trace: bool = True,
) -> Facts:
    """Read, probe and count, without torch. Only sample data that a recipe names is written.

    `trace` False: plans count model states alone, for starts of many ranks at once."""
    workspace = Workspace.here()
    machine = described or probe_machine.machine(run_dir=workspace.root)
    if constraints.num_processes == 1:
        machine = _with_one_gpu(machine)
    if described is None:
        packages.refuse_old()
    has_gpu = bool(machine.gpus) and not constraints.force_cpu
    recipe, changes = _recipe(recipe_name, overrides, has_gpu, workspace)
    machine, constraints = _available(recipe, machine, constraints, described is None, say)
    model, stored = _model(recipe, described is None, workspace)
    recipe = model.recipe
    _write_sample_data(recipe, workspace, say)
    data_format, rows = _rows(model, workspace)
    # a described machine is planned for the torch that is installed here
    constraints = replace(constraints, no_varlen_attn=packages.no_varlen_attn())
    if described is None:
        packages.refuse_missing(recipe)
        constraints = _with_packages(recipe, constraints, workspace, has_gpu)
        if has_gpu:
            link = _link(recipe, machine, constraints, workspace, say, test_link)
            constraints = replace(constraints, link=link)
    elif machine.packages is not None:
        constraints = _with_described_packages(constraints, machine.packages)
    context = plan_context.build(
        recipe, machine, model.config, model.parameters, model.family, data_format
    )
    tokens = token_cache.token_cache(workspace.cache, recipe, context.model, data_format)
    if tokens.row_counts is not None:
        rows = sum(part.rows for part in sources.trained_rows(recipe.data, tokens.row_counts))
    context = replace(
        context,
        changes=(*changes, *model.changes),
        rows=rows,
        stored=stored,
        tokens=replace(tokens, rows=rows),
    )
    device: Device = "cuda" if has_gpu else "cpu"
    context = _with_measurements(context, workspace, device, described is None, say)
    if trace:
        context = replace(
            context,
            traces=Traces(recipe, context.model, context.lora_targets, workspace.traces, say),
            error_margin=_error_margin(workspace, machine, device, say),
        )
    if tokens.folder.exists() and token_hashes.counts(tokens.folder) is None:
        say(f"the tokenised rows in {tokens.folder} are damaged: a start tokenises again")
    return Facts(workspace, plan_context.with_rows(context), constraints)


def _recipe(
    recipe_name: str, overrides: Sequence[str], has_gpu: bool, workspace: Workspace
) -> tuple[Recipe, list[Change]]:
    """The recipe, whose paths are absolute, and the values that it replaces itself. Raises
    ResourceError for folders that are another user's or that hold something else."""
    recipe, changed = load.load(
        recipe_name, [absolute_override(text) for text in overrides], has_gpu
    )
    above = Path.cwd() if load.is_file(recipe_name) else workspace.root
    recipe, of_model = use_existing_model(with_absolute_paths(recipe, above))
    recipe, of_tokenizer = use_existing_tokenizer(recipe)
    unused = (
        change
        for change in unused_tokenizer_keys(recipe)
        if load.is_written(recipe_name, overrides, change.key)
    )
    for folder in (*(workspace.root / name for name in ("runs", "logs", ".cache")), recipe.log_dir):
        if folder:
            files.refuse_strangers(Path(folder))
    files.check_output(Path(recipe.output_dir))
    return recipe, [*changed, *of_model, *of_tokenizer, *unused]


def _available(
    recipe: Recipe, machine: Machine, constraints: LaunchConstraints, is_here: bool, say: Say
) -> tuple[Machine, LaunchConstraints]:
    """The machine with the memory that the recipe may take beside other runs, and the constraints
    with lines on it. Raises ResourceError for cards that cannot be used."""
    live = granted_leases(say) if is_here and constraints.num_processes is None else []
    machine, notes = limits.limited(admission.beside(machine, live), recipe, live)
    if constraints.num_processes is None:
        machine = _by_free_memory(machine)
    if is_here and not constraints.force_cpu and recipe.launch.device != "cpu":
        _refuse_cards(recipe, machine, constraints)
    return machine, _beside(constraints, notes, live)


def _model(
    recipe: Recipe, is_here: bool, workspace: Workspace
) -> tuple[ModelFacts, StoredWeights | None]:
    """The model with its added tokens and with lines of the plan on it, and the weights of its
    folder. Raises ResourceError for a folder that cannot be read."""
    if recipe.tokenizer.path and not Path(recipe.tokenizer.path).is_dir():
        raise ResourceError(
            f"tokenizer.path: there is no folder {recipe.tokenizer.path}; give one, or leave it out"
        )
    config, parameters, family = model_config.read(recipe.model, root=FILES, cache=workspace.cache)
    tokenizer = Path(recipe.tokenizer.path or recipe.model.path or "")
    model_config.check_tokenizer(tokenizer)
    if (
        is_here
        and tokenizer.parts
        and not any(file for form in TOKENIZER_FILES for file in tokenizer.glob(form))
    ):
        raise ResourceError(
            f"{tokenizer}: found no tokenizer.json or its like; name a tokenizer with"
            " --tokenizer.path=FOLDER"
        )
    model = new_tokens.with_tokens(recipe, config, parameters, family, workspace.cache)
    notes = plan_context.copied_modules(model.recipe, model.parameters, model.family)
    if unread := dict.fromkeys(model_config.unread_keys(config)):
        notes += (
            f"private keys of config.json that transformers does not read: {', '.join(unread)}",
        )
    notes += plan_context.exported_dtype(model.recipe, model.config)
    notes += plan_context.own_head(family, parameters)
    stored = model_config.stored_weights(Path(recipe.model.path)) if recipe.model.path else None
    if stored is not None:
        probe_machine.check_mapping(Path(str(recipe.model.path)), stored.largest_file_bytes)
        grown = stored_weights.grown(parameters, model.parameters)
        stored = replace(stored, grown=tuple(grown))
    return replace(model, notes=(*model.notes, *notes)), stored


def _rows(model: ModelFacts, workspace: Workspace) -> tuple[DataFormat, int | None]:
    """The format of the training rows, with the plan's lines on rows and model; and their number,
    if it is known without tokenising."""
    recipe, is_pair = model.recipe, model.family.is_encoder_decoder
    file_facts = token_cache.known_files(workspace.cache)
    unread = () if is_pair else chat_templates.unread_keys(recipe)
    data_format = columns.detect(recipe.data, workspace.root, file_facts, unread)
    data_format = _with_template(data_format, recipe, is_pair)
    notes = *data_format.notes, *sources.trained_and_held_out(recipe.data), *model.notes
    data_format = replace(data_format, notes=notes)
    if recipe.data.streaming or sources.are_counted(recipe.data):
        return data_format, None
    rows = columns.row_count(recipe.data.paths[0], file_facts)
    is_of_several = data_format.kind == "oasst" or data_format.file_type in sources.SEVERAL_LINES
    if rows is not None and is_of_several:  # lines of the file make a row
        rows = sum(sources.count_rows(recipe.data, data_format, file_facts)[0])
    return data_format, rows


def _with_measurements(
    context: PlanContext, workspace: Workspace, device: Device, is_here: bool, say: Say
) -> PlanContext:
    """Add settings of the allocator, and what was measured or read before: the base of an adapter,
    memory of imports, the fastest strategies of trials."""
    machine = context.machine
    if device == "cuda":
        settings = users_settings(os.environ)
        kernel = platform.release() if is_here else ""
        expands = settings is None and architectures.expands_segments(machine.gpus, kernel)
        allocator = AllocatorConfig.parse(settings or "")
        context = replace(context, allocator=allocator, may_expand=expands)
    adapted = context.recipe.model.path if context.recipe.lora is not None else None
    context = replace(
        context,
        base_fingerprint=model_config.weights_fingerprint(Path(adapted)) if adapted else None,
        import_memory=import_memory.measured_or_assumed(workspace.cache, device),
    )
    if is_here and workspace.ledger_file.exists():
        context = replace(context, recall=_recall(workspace, machine, say))
    return context


def granted_leases(say: Say = lambda line: None) -> list[Lease]:
    """The leases beside which this machine's memory is planned; none, and a line, if there is no
    folder for them."""
    try:
        live = leases.live(leases.folder())
    except ResourceError as error:
        say(f"memory is planned without leases: {error}")
        return []
    return [lease for lease in live if lease.record.state == "granted"]


def with_memory_of_now(
    context: PlanContext, constraints: LaunchConstraints, folder: Path, say: Say
) -> tuple[PlanContext, LaunchConstraints]:
    """The facts of a start with the memory that is free now, beside the leases of others."""
    live = granted_leases(say)
    now = probe_machine.with_memory_of_now(context.machine, folder)
    machine, notes = limits.limited(admission.beside(now, live), context.recipe, live)
    if constraints.num_processes is None:
        machine = _by_free_memory(machine)
    return replace(context, machine=machine), _beside(constraints, notes, live)


def machines_to_wait_for(context: PlanContext, folder: Path) -> list[Machine]:
    """The machine as it will be when the leases of now have ended, and as it would be without any
    program: a run that waits is planned for the first of them that it fits."""
    now = probe_machine.with_memory_of_now(context.machine, folder)
    later = (admission.alone(now, granted_leases()), admission.empty(now))
    return [_by_free_memory(limits.limited(machine, context.recipe)[0]) for machine in later]


def _beside(
    constraints: LaunchConstraints, limits: Sequence[str], live: Sequence[Lease]
) -> LaunchConstraints:
    """The constraints with lines on what limits memory, and the leases that do."""
    notes = (*limits, *admission.notes(live))
    return replace(constraints, budget_notes=notes, beside=tuple(lease.number for lease in live))


def _with_template(data_format: DataFormat, recipe: Recipe, is_pair: bool) -> DataFormat:
    """The format with its chat template, and a note on tags that the vocabulary lacks."""
    template = chat_templates.describe(recipe, is_pair, data_format.kind == "text")
    if template.startswith("none"):
        return replace(data_format, template=template)
    missing = chat_templates.missing_tags(recipe)
    if not missing:
        return replace(data_format, template=template)
    template += (
        f"; {len(missing)} of its tags {'is no token' if len(missing) == 1 else 'are no tokens'}"
    )
    notes = (*data_format.notes, chat_templates.tags_note(missing))
    return replace(data_format, template=template, notes=notes)


def _with_packages(
    recipe: Recipe, constraints: LaunchConstraints, workspace: Workspace, has_gpu: bool
) -> LaunchConstraints:
    """Add the packages of this machine: why one that the recipe may use cannot work."""
    variables = environment.passed(os.environ)
    constraints = replace(
        constraints,
        has_deepspeed=find_spec("deepspeed") is not None,
        no_every_n_layers=packages.no_every_n_layers(),
    )
    if recipe.training.compiles:
        no_compiler = packages.no_compiler(has_gpu, variables)
        constraints = replace(constraints, no_compiler=no_compiler)
    if not has_gpu:
        return constraints
    is_open = recipe.model.attn_implementation not in ("sdpa", "eager")
    return replace(
        constraints,
        no_flash_attn=import_memory.no_flash_attn(workspace.cache) if is_open else None,
        no_liger=packages.no_liger(variables),
    )


def _with_described_packages(
    constraints: LaunchConstraints, installed: Sequence[OptionalPackage]
) -> LaunchConstraints:
    """Add the packages that a machine's file lists."""
    no_flash_attn, no_liger = (
        None if name in installed else f"the package {name} is not installed there"
        for name in ("flash_attn", "liger_kernel")
    )
    return replace(constraints, no_flash_attn=no_flash_attn, no_liger=no_liger)


def _by_free_memory(machine: Machine) -> Machine:
    """The machine whose cards with the most free memory come first, and of equal memory the newest:
    a plan takes the first cards. Ranks that another launcher has started have their cards."""
    order = sorted(machine.gpus, key=lambda gpu: gpu.architecture, reverse=True)
    return replace(machine, gpus=tuple(sorted(order, key=lambda gpu: -gpu.free_bytes)))


def _with_one_gpu(machine: Machine) -> Machine:
    """The machine with a single GPU, for a single process of another launcher: the GPU with the
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
    """Raise ResourceError for cards that cannot be used, since the recipe does not name the CPU."""
    if machine.gpus_obstacle and not machine.gpus:
        raise ResourceError(
            f"{machine.gpus_obstacle}; or train on the CPU on purpose: --launch.mode=cpu"
        )
    launch, mode = recipe.launch, recipe.launch.named_mode
    is_single = mode is not None and mode.processes == "one"
    asked = 1 if is_single else constraints.num_processes or launch.num_processes
    count = asked // max(launch.nodes, constraints.num_machines) if asked else len(machine.gpus)
    torch_build.refuse(machine, machine.gpus[:count])


def _error_margin(workspace: Workspace, machine: Machine, device: Device, say: Say) -> Margin:
    """Share by which measured memory exceeds a prediction on this machine as a rule; 0 until enough
    runs have been measured."""
    if not workspace.ledger_file.exists():
        return NO_MARGIN
    from launch.predict.history.cache_keys import machine_key
    from launch.predict.history.ledger import Ledger

    ledger = Ledger(workspace.ledger_file, say)
    margin = ledger.margin("reserved_bytes", device, machine_key(machine), prior=0.0)
    return replace(margin, fraction=max(margin.fraction, 0.0))


def _recall(
    workspace: Workspace, machine: Machine, say: Say
) -> Callable[[ModelSize, Recipe], Strategy | None]:
    """A reader of the fastest strategies in trials on this machine."""
    from launch.predict.history import cache_keys
    from launch.predict.history.ledger import Ledger

    def recall(model: ModelSize, recipe: Recipe) -> Strategy | None:
        tuned = Ledger(workspace.ledger_file, say).recall(
            cache_keys.machine_key(machine),
            cache_keys.model_key(model),
            cache_keys.recipe_key(recipe),
        )
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
    """The link that carries an all-reduce between this machine's GPUs, from the cache or a test.
    None: no plan depends on it, or it was not tested."""
    launch, mode = recipe.launch, recipe.launch.named_mode
    count = (launch.num_processes or len(machine.gpus) * launch.nodes) // launch.nodes
    settled = constraints.num_processes is not None or (
        mode is not None and mode.processes == "one"
    )
    if settled or not 1 < count <= len(machine.gpus):
        return None
    variables = environment.passed(os.environ)
    if constraints.force_gloo or (mode is not None and mode.backend == "gloo"):
        # nothing to search for: its speed, if selfcheck has measured it
        link = link_test.last_result(machine, count, workspace.cache, variables, backends=("gloo",))
        return link if link and link.backend else None
    if not test:
        return link_test.last_result(machine, count, workspace.cache, variables)
    link = link_test.link(machine, count, workspace.cache, variables, say=say)
    if driver := next((attempt for attempt in link.tries if attempt.cause == "driver"), None):
        cause = link_causes.BY_NAME["driver"]
        raise ResourceError(f"link test: {cause.what}: {driver.said}; fix: {cause.fix}")
    return link


def _write_sample_data(recipe: Recipe, workspace: Workspace, say: Say) -> None:
    """Write the guides' small data set if a recipe names it and it does not exist."""
    train, valid = (workspace.root / name for name in SAMPLE_FILES)
    paths = set(recipe.data.paths)
    is_sample = train in paths and paths <= {train, valid}
    if not is_sample or train.exists():
        return
    say(f"{SAMPLE_FILES[0]} is not there: writing the sample data")
    script = FILES / "scripts" / "make_sample_data.py"
    argv = [sys.executable, str(script), "--out-dir", str(train.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(f"{script.name} failed: {done.stderr.strip()}")
