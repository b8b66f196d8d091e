"""Facts of a start, each read once: machine, recipe, model, data, packages, link."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from launch.base import compile_caches, environment, files, processes
from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import FILES, Workspace
from launch.data import chat_templates, columns, sources, token_cache
from launch.hub import download as hub_download
from launch.hub.names import HubName
from launch.plan import candidates, planner
from launch.plan import facts as plan_facts
from launch.predict import budgets
from launch.predict.facts import Facts, History, Installed, Limits, Rows, Wishes
from launch.predict.history import cache_keys, calibration, core_figures
from launch.predict.history.ledger import Ledger
from launch.predict.memory import stored_weights
from launch.predict.memory.allocator_config import AllocatorConfig, users_settings
from launch.predict.models import model_config, new_tokens, weight_files
from launch.predict.models.new_tokens import ModelFacts
from launch.predict.traces import Traces
from launch.probe import architectures, import_memory, link_causes, link_test, packages, torch_build
from launch.probe import machine as probe_machine
from launch.recipe import load
from launch.recipe.paths import (
    absolute_override,
    unused_tokenizer_keys,
    use_existing_model,
    use_existing_tokenizer,
    with_absolute_paths,
    with_downloads,
)
from launch.recipe.strict_yaml import show
from launch.schema.machine import NOT_LEASED, Device, Leased, Link, Machine
from launch.schema.plan import Change, DataFormat, ModelSize, Strategy
from launch.schema.recipe import Recipe

TOKENIZER_FILES = ("token*", "*.model", "vocab*")  # names in a folder; *.model: sentencepiece
SAMPLE_FILES = ("data/sft_train_small_train.parquet", "data/sft_train_small_valid.parquet")
Say = Callable[[str], None]
_NO_WISHES = Wishes()


def resolve(
    recipe_name: str,
    overrides: Sequence[str],
    described: Machine | None = None,
    wishes: Wishes = _NO_WISHES,
    leased: Leased = NOT_LEASED,
    say: Say = lambda line: None,
    trace: bool = True,
    rows_of: int | None = None,
    as_folder: bool = False,
    download: bool = False,
) -> planner.Choice:
    """Plan a recipe, with the lengths of its rows if they are tokenised, or with max_length.

    `rows_of`: with rows that all have this number of tokens. `as_folder`: a shape that cannot be
    meant with random weights, because it gets an adapter or stands on a described machine, is
    planned as its folder will be."""
    facts = read(
        *(recipe_name, overrides, described, wishes, leased, say), trace=trace, download=download
    )
    if as_folder and facts.model.stored is None and (described or facts.recipe.lora):
        facts = plan_facts.as_folder(facts)
    if rows_of is not None:
        facts = replace(facts, rows=plan_facts.of_length(facts.rows, facts.recipe.data, rows_of))
    planner.refuse_hopeless(facts)
    return planner.choose(facts)


def read(
    recipe_name: str,
    overrides: Sequence[str],
    described: Machine | None = None,
    wishes: Wishes = _NO_WISHES,
    leased: Leased = NOT_LEASED,
    say: Say = lambda line: None,
    test_link: bool = False,
    trace: bool = True,
    download: bool = False,
) -> Facts:
    """Read, probe and count, without torch. Only sample data that a recipe names is written.

    `leased`: memory of this machine that others hold. `trace` False: plans count model states
    alone, for starts of many ranks at once. `download`: fetch what is named on a hub, if it is not
    here."""
    workspace, is_here = Workspace.here(), described is None
    machine = described or probe_machine.machine(run_dir=workspace.root)
    if wishes.num_processes == 1:
        machine = _with_one_gpu(machine)
    if is_here:
        machine = replace(machine, cores_taken=processes.taken_cores())
        packages.refuse_old()
    device: Device = "cuda" if machine.gpus and not wishes.force_cpu else "cpu"
    folder_of = partial(hub_download.find, root=workspace.root, say=say if download else None)
    recipe, changes = _recipe(recipe_name, overrides, device == "cuda", workspace, folder_of)
    machine, limits = _available(recipe, machine, wishes, leased)
    if is_here and not wishes.force_cpu and recipe.launch.device != "cpu":
        _refuse_cards(recipe, machine, wishes)
    model, stored = _model(recipe, is_here, workspace)
    recipe = model.recipe
    if is_here and trace:
        machine = replace(
            machine, cores=core_figures.kept_or_measured(workspace.traces, machine.cpu_count)
        )
    _write_sample_data(recipe, workspace, say)
    data_format, count = _rows(model, workspace)
    installed = _installed(recipe, machine, workspace, device, is_here)
    if is_here:
        packages.refuse_missing(recipe)
        if device == "cuda":
            installed = replace(
                installed, link=_link(recipe, machine, wishes, workspace, say, test_link)
            )
    facts = plan_facts.build(
        recipe, machine, model.config, model.parameters, model.family, data_format
    )
    counted = facts.model
    fingerprint = (
        weight_files.weights_fingerprint(Path(recipe.model.path))
        if recipe.lora and recipe.model.path
        else None
    )
    facts = replace(
        facts,
        model=replace(counted, stored=stored, base_fingerprint=fingerprint),
        rows=_tokenised(facts, count, workspace, say),
        installed=installed,
        wishes=wishes,
        history=_history(workspace, machine, counted.size, device, is_here, trace, say),
        limits=limits,
        traces=(
            Traces(recipe, counted.size, counted.lora_targets, workspace.traces, say)
            if trace
            else None
        ),
        changes=(*changes, *model.changes),
    )
    is_written = load.is_written(recipe_name, overrides, "training.dataloader_num_workers")
    return facts if is_written else _with_useful_workers(facts)


def _tokenised(facts: Facts, count: int | None, workspace: Workspace, say: Say) -> Rows:
    """The rows with their cache of tokens, as far as it is there. `count`: of the rows as read."""
    tokens = token_cache.token_cache(
        workspace.cache, facts.recipe, facts.model.size, facts.rows.format
    )
    if tokens.row_counts is not None:
        trained = sources.trained_rows(facts.recipe.data, tokens.row_counts)
        count = sum(part.rows for part in trained)
    if tokens.folder.exists() and token_cache.counts(tokens.folder) is None:
        say(f"the tokenised rows in {tokens.folder} are damaged: a start tokenises again")
    return plan_facts.with_counts(replace(facts.rows, tokens=replace(tokens, rows=count)))


def _with_useful_workers(facts: Facts) -> Facts:
    """Facts in which a number of data workers that cores or rows leave without use is planned."""
    recipe, training = facts.recipe, facts.recipe.training
    ranks = facts.wishes.num_processes or recipe.launch.num_processes or len(facts.machine.gpus)
    if (training.dataloader_num_workers or 0) <= candidates.useful_workers(facts, ranks or 1):
        return facts
    training = training.model_copy(update={"dataloader_num_workers": None})
    return replace(facts, recipe=recipe.model_copy(update={"training": training}))


def _recipe(
    recipe_name: str,
    overrides: Sequence[str],
    has_gpu: bool,
    workspace: Workspace,
    folder_of: Callable[[HubName], Path],
) -> tuple[Recipe, list[Change]]:
    """The recipe, whose paths are absolute, and the values that it replaces itself. Raises
    ResourceError for folders that are another user's or that hold something else."""
    recipe, changed = load.load(
        recipe_name, [absolute_override(text) for text in overrides], has_gpu
    )
    above = Path.cwd() if load.is_file(recipe_name) else workspace.root
    recipe, of_hub = with_downloads(with_absolute_paths(recipe, above), folder_of)
    recipe, of_model = use_existing_model(recipe)
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
    return recipe, [*changed, *of_hub, *of_model, *of_tokenizer, *unused]


def _available(
    recipe: Recipe, machine: Machine, wishes: Wishes, leased: Leased
) -> tuple[Machine, Limits]:
    """The machine with the memory that a recipe may take beside other runs, and its limits."""
    machine, notes = budgets.limited(budgets.beside(machine, leased), recipe, leased)
    if wishes.num_processes is None:
        machine = budgets.by_free_memory(machine)
    return machine, Limits((*notes, *leased.notes), leased.numbers)


def _model(
    recipe: Recipe, is_here: bool, workspace: Workspace
) -> tuple[ModelFacts, stored_weights.StoredWeights | None]:
    """The model with its added tokens and with lines of the plan on it, and the weights of its
    folder. Raises ResourceError for a folder that cannot be read."""
    if recipe.tokenizer.path and not Path(recipe.tokenizer.path).is_dir():
        raise ResourceError(
            f"tokenizer.path: there is no folder {recipe.tokenizer.path}; give one, or leave it"
            " out; of a model on a hub, python -m launch download OWNER/NAME names the folder"
        )
    config, parameters, family = model_config.read(recipe.model, root=FILES, cache=workspace.cache)
    recipe = as_packed(recipe)
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
    unread = ", ".join(dict.fromkeys(model_config.unread_keys(config)))
    foreign = f"private keys of config.json that transformers does not read: {unread}"
    notes = (
        *model.notes,
        *plan_facts.copied_modules(model.recipe, model.parameters, model.family),
        *([foreign] if unread else []),
        *plan_facts.exported_dtype(model.recipe, model.config),
        *plan_facts.own_head(family, parameters),
    )
    stored = weight_files.stored_weights(Path(recipe.model.path)) if recipe.model.path else None
    if stored is not None:
        probe_machine.check_mapping(Path(str(recipe.model.path)), stored.largest_file_bytes)
        stored = replace(stored, grown=tuple(stored_weights.grown(parameters, model.parameters)))
    return replace(model, notes=notes), stored


def as_packed(recipe: Recipe) -> Recipe:
    """The recipe, with the quantization of a folder whose weights are packed in 4 bits. Raises
    ConfigError for another one that the recipe names."""
    folder, section = recipe.model.path, recipe.quantization
    packing = weight_files.packing(Path(folder)) if folder else None
    if packing is None:
        return recipe
    if section is None:
        raise ConfigError(
            f"model.path: {folder} holds linear weights of 4 bits (bitsandbytes,"
            f" {packing.bnb_4bit_quant_type}), which train under LoRA alone; add"
            f" --quantization.load_in_4bit=true{'' if recipe.lora else ' --lora.r=16'}, or take the"
            " model in 16 or 32 bits"
        )
    for key, value in asdict(packing).items():
        requested = getattr(section, key)
        if key in section.model_fields_set and requested != value:
            raise ConfigError(
                f"quantization.{key}: {show(requested)}, but the weights in {folder} are packed"
                f" with {show(value)}; leave it out"
            )
    return recipe.model_copy(update={"quantization": section.model_copy(update=asdict(packing))})


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


def _installed(
    recipe: Recipe, machine: Machine, workspace: Workspace, device: Device, is_here: bool
) -> Installed:
    """The packages of the machine, why one that the recipe may use cannot work, settings of the
    allocator, and the memory of imports."""
    installed = Installed(
        import_memory=import_memory.measured_or_assumed(workspace.cache, device),
        # a described machine is planned for the torch that is installed here
        no_varlen_attn=packages.no_varlen_attn(),
    )
    if device == "cuda":
        settings = users_settings(os.environ)
        kernel = platform.release() if is_here else ""
        installed = replace(
            installed,
            allocator=AllocatorConfig.parse(settings or ""),
            may_expand=settings is None and architectures.expands_segments(machine.gpus, kernel),
        )
    if is_here:
        return _with_packages(recipe, installed, workspace, device == "cuda")
    if machine.packages is None:
        return installed
    no_flash_attn, no_liger = (
        None if name in machine.packages else f"the package {name} is not installed there"
        for name in ("flash_attn", "liger_kernel")
    )
    no_compiler = None if "triton" in machine.packages else installed.no_compiler
    return replace(
        installed, no_flash_attn=no_flash_attn, no_liger=no_liger, no_compiler=no_compiler
    )


def _history(
    workspace: Workspace,
    machine: Machine,
    model: ModelSize,
    device: Device,
    is_here: bool,
    trace: bool,
    say: Say,
) -> History:
    """Results of runs and trials on this machine."""
    history = _past_runs(workspace, machine, model, device, say) if trace else History()
    return (
        replace(history, recall=partial(_recall, workspace, machine, say)) if is_here else history
    )


def with_memory_of_now(facts: Facts, leased: Leased, folder: Path) -> Facts:
    """The facts of a start with the memory that is free now, beside the leases of others."""
    machine, limits = _available(
        facts.recipe,
        probe_machine.with_memory_of_now(facts.machine, folder),
        facts.wishes,
        leased,
    )
    return replace(facts, machine=machine, limits=limits)


def _with_template(data_format: DataFormat, recipe: Recipe, is_pair: bool) -> DataFormat:
    """The format with its chat template, and a note on tags that the vocabulary lacks."""
    template = chat_templates.describe(recipe, is_pair, data_format.kind == "text")
    missing = () if template.startswith("none") else chat_templates.missing_tags(recipe)
    if not missing:
        return replace(data_format, template=template)
    template += (
        f"; {len(missing)} of its tags {'is no token' if len(missing) == 1 else 'are no tokens'}"
    )
    return replace(
        data_format,
        template=template,
        notes=(*data_format.notes, chat_templates.tags_note(missing)),
    )


def _with_packages(
    recipe: Recipe, installed: Installed, workspace: Workspace, has_gpu: bool
) -> Installed:
    """Add the packages of this machine: why one that the recipe may use cannot work."""
    variables, noexec = environment.passed(os.environ), compile_caches.noexec()
    installed = replace(
        installed,
        has_deepspeed=find_spec("deepspeed") is not None,
        no_every_n_layers=packages.no_every_n_layers(),
        no_compiler=packages.no_compiler(has_gpu, variables) or noexec,
    )
    if not has_gpu:
        return installed
    is_open = recipe.model.attn_implementation not in ("sdpa", "eager")
    return replace(
        installed,
        no_flash_attn=import_memory.no_flash_attn(workspace.cache) if is_open else None,
        no_liger=packages.no_liger(variables) or noexec,
    )


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


def _refuse_cards(recipe: Recipe, machine: Machine, wishes: Wishes) -> None:
    """Raise ResourceError for cards that cannot be used, since the recipe does not name the CPU."""
    if machine.gpus_obstacle and not machine.gpus:
        raise ResourceError(
            f"{machine.gpus_obstacle}; or train on the CPU on purpose: --launch.mode=cpu"
        )
    launch, mode = recipe.launch, recipe.launch.named_mode
    is_single = mode is not None and mode.processes == "one"
    num_requested = 1 if is_single else wishes.num_processes or launch.num_processes
    count = (
        num_requested // max(launch.nodes, wishes.num_machines)
        if num_requested
        else len(machine.gpus)
    )
    torch_build.refuse(machine, machine.gpus[:count])


def _past_runs(
    workspace: Workspace, machine: Machine, model: ModelSize, device: Device, say: Say
) -> History:
    """The share by which measured memory exceeds a prediction on this machine as a rule, 0 until
    enough runs have been measured; and by how much seconds do."""
    runs, machine_key = (
        Ledger(workspace.ledger_file, say).measurements(),
        cache_keys.machine_key(machine),
    )
    margin = calibration.margin(runs, "reserved_bytes", device, machine_key, prior=0.0)
    like, model_key = calibration.comparable_runs(runs, machine_key), cache_keys.model_key(model)
    correction = partial(calibration.seconds_correction, like, model_key)
    return History(
        error_margin=replace(margin, fraction=max(margin.fraction, 0.0)),
        correction=calibration.beside_others(correction, machine.cores_taken, machine.cpu_count),
    )


def _recall(
    workspace: Workspace, machine: Machine, say: Say, model: ModelSize, recipe: Recipe
) -> Strategy | None:
    """The fastest strategy in trials of a recipe on this machine."""
    tuned = Ledger(workspace.ledger_file, say).recall(
        cache_keys.machine_key(machine),
        cache_keys.model_key(model),
        cache_keys.recipe_key(recipe),
    )
    return tuned.strategy if tuned else None


def _link(
    recipe: Recipe,
    machine: Machine,
    wishes: Wishes,
    workspace: Workspace,
    say: Say,
    test: bool,
) -> Link | None:
    """The link that carries an all-reduce between this machine's GPUs, from the cache or a test.
    None: no plan depends on it, or it was not tested."""
    launch, mode = recipe.launch, recipe.launch.named_mode
    count = (launch.num_processes or len(machine.gpus) * launch.nodes) // launch.nodes
    settled = wishes.num_processes is not None or (mode is not None and mode.processes == "one")
    if settled or not 1 < count <= len(machine.gpus):
        return None
    variables = environment.passed(os.environ)
    if wishes.force_gloo or (mode is not None and mode.backend == "gloo"):
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
