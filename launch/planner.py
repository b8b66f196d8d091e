"""Which way to run a recipe on a machine: every candidate, the first that fits, and why the others do not.

Pure: values in, a Plan out. In this version a candidate is judged by its model states alone (weights, gradients,
optimizer); activations are not predicted yet, and the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch import architectures, predict, sharding
from launch.errors import ConfigError, DoesNotFit
from launch.schema import (
    GIB,
    Change,
    DataFormat,
    Gpu,
    LaunchSection,
    Link,
    LoraSection,
    Machine,
    MemoryEstimate,
    Mode,
    ModelShape,
    Plan,
    Precision,
    Recipe,
    Rendezvous,
)
from launch.schema import Strategy as Candidate

MAX_EVAL_BATCH = 64  # samples; the guides' 3x the training batch is a ceiling, and logits are the larger part of it

CPU_MODES = ("cpu", "multi_cpu")
ONE_PROCESS = ("cpu", "single_gpu")
SEVERAL_PROCESSES = ("multi_cpu", "dual_gpu_nccl", "dual_gpu_gloo")
GPU_MODES = ("single_gpu", "dual_gpu_nccl", "dual_gpu_gloo")
# Fastest first where the states fit: each row holds less on the cards than the one before and moves more bytes.
SHARDED: tuple[Mode, ...] = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
OFFLOADED: tuple[Mode, ...] = ("deepspeed_zero2_offload", "deepspeed_zero3_offload")


@dataclass(frozen=True)
class Given:
    """What a start outside our launcher has fixed already: ranks are running when we are asked."""

    num_processes: int | None = None
    num_machines: int = 1
    mode: Mode | None = None  # of DeepSpeed or FSDP2, when the launcher above has chosen one
    force_cpu: bool = False
    force_gloo: bool = False  # ACCELERATE_USE_GLOO=1
    link: Link | None = None  # what the test of this machine's GPUs found
    has_deepspeed: bool = True  # the package is installed


def choose(
    recipe: Recipe,
    machine: Machine,
    config: dict[str, Any],
    shapes: predict.Shapes,
    data_format: DataFormat,
    changes: Sequence[Change] = (),
    given: Given = Given(),
    rows: int | None = None,
) -> Plan:
    """The fastest candidate that fits. Raises DoesNotFit with the nearest misses, ConfigError for what cannot be."""
    model_type = config["model_type"]
    _check_length(recipe, config)
    parameters, trainable, lora_parameters = predict.count(shapes, recipe.model.freeze, recipe.lora, model_type)
    shape = ModelShape(recipe.model.shape or str(recipe.model.path), config, parameters, trainable, lora_parameters)
    whole = predict.model_state(
        shapes, recipe.model.freeze, recipe.lora, model_type, recipe.training.optim, recipe.model.dtype
    )
    rejected, is_about_memory = [], False
    for candidate in candidates(recipe, machine, given):
        refused = sharding.refusal(recipe, candidate) or _unavailable(candidate, given)
        if refused:
            if candidate.mode in (recipe.launch.mode, given.mode):
                raise ConfigError(f"launch.mode {refused}")
            rejected.append(refused)
            continue
        estimate = sharding.per_rank(whole, shapes, recipe, candidate, model_type)
        budget = budget_bytes(recipe, machine, candidate)
        is_about_memory = True
        misses = _misses(recipe, machine, candidate, estimate, budget)
        if misses:
            rejected.append(f"{candidate.mode} with {candidate.num_processes} process(es): {misses}")
            continue
        return Plan(
            recipe_name=recipe.name,
            strategy=candidate,
            shape=shape,
            data_format=data_format,
            estimate=estimate,
            budget_bytes=budget,
            rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
            lora_targets=_lora_targets(recipe, model_type, shapes),
            why=(*_why(recipe, machine, candidate, given), *_link_why(recipe, candidate, shape, whole, given.link)),
            changes=(*changes, *_precision_changes(recipe, machine, candidate), *_batch_changes(recipe, candidate)),
            rejected=tuple(rejected),
            rendezvous=_rendezvous(recipe.launch),
            link=given.link if candidate.device == "cuda" and candidate.processes_per_machine > 1 else None,
        )
    if not is_about_memory:
        raise ConfigError("; ".join(rejected))
    ways = list(_ways(recipe, machine, shapes, model_type, given))
    raise DoesNotFit(_does_not_fit(recipe, shape, whole, rejected, ways))


def _check_length(recipe: Recipe, config: dict[str, Any]) -> None:
    positions = config.get("n_positions") or config.get("max_position_embeddings")
    if config["model_type"] != "t5" and positions is not None and recipe.data.max_length > positions:
        raise ConfigError(
            f"data.max_length {recipe.data.max_length}, but the model has {positions} positions; lower it, or choose"
            " another model"
        )


def candidates(recipe: Recipe, machine: Machine, given: Given = Given()) -> Iterator[Candidate]:
    """Every way this version knows to run the recipe as it was asked for, fastest first."""
    launch, training = recipe.launch, recipe.training
    on_gpu = bool(machine.gpus) and not given.force_cpu and launch.mode not in CPU_MODES
    if launch.mode in GPU_MODES and not on_gpu:
        raise ConfigError(f"launch.mode {launch.mode} needs a GPU: {machine.gpus_reason}; use cpu or multi_cpu")
    for mode, num_processes, instead_of in _ways_to_start(launch, machine, given, on_gpu):
        several = num_processes > 1 or mode.startswith("deepspeed")
        gloo = not on_gpu or (num_processes > 1 and (mode == "dual_gpu_gloo" or given.force_gloo))
        yield Candidate(
            mode=mode,
            device="cuda" if on_gpu else "cpu",
            num_processes=num_processes,
            num_machines=max(launch.nodes, given.num_machines),
            backend=("gloo" if gloo else "nccl") if several else None,
            per_device_train_batch_size=training.per_device_train_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps * (instead_of // num_processes),
            per_device_eval_batch_size=training.per_device_eval_batch_size
            or max(training.per_device_train_batch_size, min(3 * training.per_device_train_batch_size, MAX_EVAL_BATCH)),
            mixed_precision=_precision(recipe, machine.gpus[:num_processes] if on_gpu else ()),
            gradient_checkpointing=training.gradient_checkpointing,
            dataloader_num_workers=_workers(recipe, machine, num_processes // launch.nodes, on_gpu),
        )


def _ways_to_start(
    launch: LaunchSection, machine: Machine, given: Given, on_gpu: bool
) -> Iterator[tuple[Mode, int, int]]:
    """(mode, number of ranks, number that the recipe's batch is meant for) of each candidate.

    Raises ConfigError for what cannot be.
    """
    per_node = len(machine.gpus) if on_gpu else 1
    asked = given.num_processes or launch.num_processes
    if on_gpu and asked is not None and asked > per_node * launch.nodes and given.num_machines == 1:
        raise ConfigError(
            f"launch.num_processes {asked}, but there are {per_node * launch.nodes} GPU(s): {machine.gpus_reason}"
        )
    if given.num_processes and launch.num_processes not in (None, given.num_processes):
        raise ConfigError(
            f"launch.num_processes {launch.num_processes}, but {given.num_processes} rank(s) were started; leave the"
            " key out, or start as many"
        )
    if given.mode and launch.mode not in ("auto", given.mode):
        raise ConfigError(f"launch.mode {launch.mode}, but the ranks were started as {given.mode}; make them the same")
    mode = given.mode or launch.mode
    if mode == "auto":
        yield from _automatic(asked, per_node, launch.nodes, on_gpu, given)
        return
    least = launch.nodes if launch.nodes > 1 or on_gpu else 2  # ranks; two show on a CPU what sharing out means
    count = asked or (1 if mode in ONE_PROCESS else max(per_node * launch.nodes, least))
    if mode in ONE_PROCESS and launch.nodes > 1:
        raise ConfigError(f"launch.mode {mode} is one process, launch.nodes says {launch.nodes}")
    if mode in ONE_PROCESS and count > 1:
        raise ConfigError(f"launch.mode {mode} is one process, launch.num_processes says {count}")
    if mode in SEVERAL_PROCESSES and count == 1:
        if asked:
            raise ConfigError(f"launch.mode {mode} needs two processes or more, launch.num_processes says 1")
        raise ConfigError(f"launch.mode {mode} needs two GPUs or more, there is {per_node}; use single_gpu")
    if mode == "dual_gpu_nccl" and given.force_gloo:
        yield "dual_gpu_gloo", count, count
    else:
        yield mode, count, count


def _automatic(
    asked: int | None, per_node: int, nodes: int, on_gpu: bool, given: Given
) -> Iterator[tuple[Mode, int, int]]:
    """What `launch.mode: auto` may mean. Where ranks are running already, their number and engine are fixed."""
    if not on_gpu:
        count = asked or nodes
        on_cpu: Mode = "multi_cpu" if count > 1 else "cpu"
        yield on_cpu, count, count
        return
    count = asked or per_node * nodes
    together: Mode = "dual_gpu_gloo" if given.force_gloo else "dual_gpu_nccl"
    first: Mode = "single_gpu" if count == 1 else together
    yield first, count, count
    if given.num_processes is not None:
        return
    nccl_fails = given.link is not None and given.link.backend != "nccl"
    if count == 1 or not (nccl_fails or given.force_gloo):
        for mode in (*(SHARDED if count > 1 else ()), *OFFLOADED):
            yield mode, count, count
        return
    if nccl_fails and not given.force_gloo:
        yield "dual_gpu_gloo", count, count
    if asked is None and nodes == 1:
        alone: tuple[Mode, ...] = ("single_gpu", *OFFLOADED)
        for mode in alone:
            yield mode, 1, count


def _unavailable(candidate: Candidate, given: Given) -> str | None:
    """Why this machine's packages or the link test rule a candidate out, or None."""
    if candidate.engine == "deepspeed" and not given.has_deepspeed:
        return f"{candidate.mode} cannot run: the package deepspeed is not installed"
    link = given.link
    if link is None or candidate.device == "cpu" or candidate.processes_per_machine == 1:
        return None
    if link.backend is None:
        return f"{candidate.mode} cannot run: {link.reason}; `python -m launch doctor` says why"
    if candidate.backend == "nccl" and link.backend == "gloo":
        return f"{candidate.mode} cannot run: NCCL does not work between these GPUs ({link.reason}); use dual_gpu_gloo"
    return None


def _misses(
    recipe: Recipe, machine: Machine, candidate: Candidate, estimate: MemoryEstimate, budget: int
) -> str | None:
    """Which budget the model states exceed, with numbers; None when they fit."""
    if estimate.model_state_bytes > budget:
        return f"model states {_gib(estimate.model_state_bytes)} each, budget {_gib(budget)}"
    host = max(machine.host_available_bytes - int(recipe.launch.host_reserve_gib * GIB), 0)
    offloaded = estimate.offloaded_bytes * candidate.processes_per_machine
    if candidate.device == "cpu":  # the host's RAM is the device's
        offloaded += estimate.model_state_bytes * candidate.processes_per_machine
    if offloaded > host:
        return f"{_gib(offloaded)} of states in host RAM, budget {_gib(host)}"
    return None


def _rendezvous(launch: LaunchSection) -> Rendezvous | None:
    if launch.nodes == 1:
        return None
    assert launch.main_process_ip is not None  # the schema has checked it
    return Rendezvous(
        launch.machine_rank,
        launch.main_process_ip,
        launch.main_process_port,
        launch.network_interface,
        launch.join_timeout_s,
    )


def budget_bytes(recipe: Recipe, machine: Machine, candidate: Candidate) -> int:
    """What one rank may use of its device: a share of the smallest card's free memory, or its part of the host's."""
    if candidate.device == "cuda":
        free = min(gpu.free_bytes for gpu in machine.gpus[: candidate.processes_per_machine])
        return int(free * recipe.launch.vram_fraction)
    reserve = int(recipe.launch.host_reserve_gib * GIB)
    return max(machine.host_available_bytes - reserve, 0) // candidate.processes_per_machine


def _precision(recipe: Recipe, gpus: Sequence[Gpu]) -> Precision:
    training = recipe.training
    if training.fp16 and not gpus:
        raise ConfigError("training.fp16: true has no effect on a CPU (it would train in fp32); use bf16 or neither")
    if training.extras.get("tf32") and (without := [gpu for gpu in gpus if not architectures.of(gpu).tf32]):
        raise ConfigError(
            f"training.tf32: true, but {without[0].name} ({without[0].architecture}) has no TF32; drop it"
        )
    if training.bf16:
        return "fp16" if architectures.without_bf16(gpus) else "bf16"
    return "fp16" if training.fp16 else "no"


def _precision_changes(recipe: Recipe, machine: Machine, candidate: Candidate) -> list[Change]:
    if recipe.training.bf16 and candidate.mixed_precision == "fp16":
        reason = architectures.without_bf16(machine.gpus[: candidate.num_processes])
        return [Change("training.bf16", "bf16", "fp16 with a loss scaler", reason)]
    return []


def _batch_changes(recipe: Recipe, candidate: Candidate) -> list[Change]:
    """Said where fewer ranks train than there are cards: the effective batch is held by accumulating."""
    asked, runs = recipe.training.gradient_accumulation_steps, candidate.gradient_accumulation_steps
    if asked == runs:
        return []
    reason = (
        f"{candidate.num_processes} process instead of {runs // asked}: the effective batch stays"
        f" {candidate.effective_batch_size}"
    )
    return [Change("training.gradient_accumulation_steps", str(asked), str(runs), reason)]


def _workers(recipe: Recipe, machine: Machine, num_processes: int, on_gpu: bool) -> int:
    if recipe.training.dataloader_num_workers is not None:
        return recipe.training.dataloader_num_workers
    return max(0, min(4, machine.cpu_count // num_processes - 1)) if on_gpu else 0


def _lora_targets(recipe: Recipe, model_type: str, shapes: predict.Shapes) -> tuple[str, ...]:
    if recipe.lora is None:
        return ()
    targets = recipe.lora.target_modules or predict.LORA_TARGETS[model_type]
    return tuple(target for target in targets if any(name.endswith(f".{target}.weight") for name in shapes))


def _why(recipe: Recipe, machine: Machine, candidate: Candidate, given: Given) -> Iterator[str]:
    if candidate.device == "cpu":
        cause = "asked for" if given.force_cpu or recipe.launch.mode in ("cpu", "multi_cpu") else machine.gpus_reason
        yield f"device cpu: {cause}"
        if candidate.processes_per_machine > machine.cpu_count:
            yield f"{candidate.processes_per_machine} processes share {machine.cpu_count} CPU(s): slower than one each"
    else:
        yield f"{candidate.num_processes} GPU(s): {machine.gpus_reason}"
        yield from architectures.attention_notes(machine.gpus[: candidate.num_processes])
    if candidate.num_machines > 1 and recipe.launch.nodes > 1:
        launch = recipe.launch
        meet = f"{launch.main_process_ip}:{launch.main_process_port}"
        yield f"{launch.nodes} machines, this one is number {launch.machine_rank}; they meet at {meet}"
    if candidate.offloads:
        yield "optimizer states in host RAM, updated there by the same optimizer: slower, and no compiled op is needed"
    if given.force_gloo and candidate.num_processes == 1:
        yield "ACCELERATE_USE_GLOO=1 has no effect on one process"
    elif given.force_gloo:
        yield "backend gloo: ACCELERATE_USE_GLOO=1"
    if recipe.training.dataloader_num_workers is None:
        yield f"data workers {candidate.dataloader_num_workers}: " + (
            "the rows are mapped and padding them is cheap; workers would take cores from training"
            if candidate.device == "cpu"
            else f"{machine.cpu_count} CPUs over {candidate.num_processes} process(es)"
        )


def _link_why(
    recipe: Recipe, candidate: Candidate, shape: ModelShape, whole: MemoryEstimate, link: Link | None
) -> Iterator[str]:
    """What the ranks talk over, and what it costs where every sample is as long as it may be."""
    if candidate.device == "cpu" or candidate.num_processes == 1:
        return
    if link is None:
        yield "link: not tested; `python -m launch doctor` or the first run does"
        return
    yield f"link: {link.reason}"
    from launch import preflight

    tokens = candidate.effective_batch_size * recipe.data.max_length
    backward = shape.parameters + shape.trainable_parameters  # activations' gradients, weights' gradients
    again = shape.parameters if candidate.gradient_checkpointing else 0
    step_flops = 2.0 * tokens * (shape.parameters + backward + again)
    cost = preflight.cost_line(link, whole.gradients_bytes, step_flops, candidate.num_processes)
    if cost:
        yield cost


def _does_not_fit(
    recipe: Recipe, shape: ModelShape, whole: MemoryEstimate, rejected: Sequence[str], ways: Sequence[str]
) -> str:
    advice = f"This would fit: {'; '.join(ways)}" if ways else "Use a smaller model (--model.shape=...)"
    return (
        f"{recipe.name}: {shape.name} ({shape.parameters:,} parameters, {shape.trainable_parameters:,} trained) needs"
        f" {_gib(whole.weights_bytes)} weights + {_gib(whole.gradients_bytes)} gradients +"
        f" {_gib(whole.optimizer_bytes)} optimizer before any activation. Tried: {'; '.join(rejected)}. {advice}"
    )


def _ways(recipe: Recipe, machine: Machine, shapes: predict.Shapes, model_type: str, given: Given) -> Iterator[str]:
    """Flags with which a candidate fits, its states beside them; only what was computed to fit is offered."""
    launch, model = recipe.launch, recipe.model
    places = [("", launch)]
    if launch.mode != "auto" and given.num_processes is None:
        places.append(("--launch.mode=auto ", launch.model_copy(update={"mode": "auto"})))
    if (launch.num_processes or 1) > 1 and launch.nodes == 1 and given.num_processes is None:
        alone = launch.model_copy(update={"mode": "auto", "num_processes": 1})
        places.append(("--launch.mode=auto --launch.num_processes=1 ", alone))
    half = model.model_copy(update={"dtype": "bfloat16"})
    models = [("", model), ("--model.dtype=bfloat16 ", half)] if model.dtype == "float32" else [("", model)]
    adapters = [("", recipe.lora), ("--lora.r=16 ", LoraSection())] if recipe.lora is None else [("", recipe.lora)]
    for flags, section, lora, place in (
        (lora_flag + model_flag + place_flag, section, lora, place)
        for lora_flag, lora in adapters
        for model_flag, section in models
        for place_flag, place in places
    ):
        variant = recipe.model_copy(update={"model": section, "lora": lora, "launch": place})
        whole = predict.model_state(shapes, section.freeze, lora, model_type, recipe.training.optim, section.dtype)
        for candidate in candidates(variant, machine, given):
            if sharding.refusal(variant, candidate) or _unavailable(candidate, given):
                continue
            estimate = sharding.per_rank(whole, shapes, variant, candidate, model_type)
            if not _misses(variant, machine, candidate, estimate, budget_bytes(variant, machine, candidate)):
                yield f"{flags.strip()} ({candidate.mode}, {_gib(estimate.model_state_bytes)})"
                break


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
