"""Which way to run a recipe on a machine: every candidate, the fastest that fits, and why the others do not.

Pure, but for the traces it asks for: values in, a Plan out. A user's batch is obeyed where it fits; else it is split at
the same effective batch, and the plan says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from launch import architectures, estimate, padding, predict, sharding
from launch.errors import ConfigError, DoesNotFit
from launch.estimate import NOTHING_EXCEEDED, Exceeded, Judged, Subject, describe, gib
from launch.schema import (
    Change,
    DataFormat,
    Gpu,
    LaunchSection,
    Link,
    LoraSection,
    Machine,
    Mode,
    ModelShape,
    Padding,
    Plan,
    Precision,
    QuantizationSection,
    Recipe,
    Rendezvous,
)
from launch.schema import Strategy as Candidate

MAX_EVAL_BATCH = 64  # samples; the guides' 3x the training batch is a ceiling, and logits are the larger part of it

OUTPUT_CHUNKS = 8  # where the plan decides, as many as torchtune's default
CHUNKED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "t5")  # their forward returns what the output projection gives
TABLE_ROWS = 10
MAX_WAYS = 3  # offered where nothing fits; each may have to be traced
AS_FAST = 1.05  # predicted seconds that differ by less are not told apart

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
    exceeded: Exceeded = NOTHING_EXCEEDED  # by which an attempt of this run has refuted its plan
    free_batch: bool = False  # any cut of the effective batch will do
    wants_tuned: bool = False  # no batch was typed: what tuning has found before is used
    assume_fits: bool = False  # whatever is predicted
    tuned: Candidate | None = None  # what short trials found the fastest here


def model_shape(recipe: Recipe, config: dict[str, Any], parameters: predict.Shapes) -> ModelShape:
    """The model of a recipe, counted."""
    total, trainable, lora = predict.count(parameters, recipe.model.freeze, recipe.lora, config["model_type"])
    return ModelShape(recipe.model.shape or str(recipe.model.path), config, total, trainable, lora)


def subject(
    recipe: Recipe, machine: Machine, config: dict[str, Any], parameters: predict.Shapes, data_format: DataFormat
) -> Subject:
    """What all candidates have in common. Raises ConfigError for what no candidate can be."""
    model_type = config["model_type"]
    _check_length(recipe, config)
    _check_packing(recipe, model_type)
    _check_chunks(recipe, model_type)
    shape = model_shape(recipe, config, parameters)
    whole = predict.model_state(
        parameters,
        recipe.model.freeze,
        recipe.lora,
        model_type,
        recipe.training.optim,
        recipe.model.dtype,
        recipe.quantized(_asked_precision(recipe)),
    )
    targets = _lora_targets(recipe, model_type, parameters)
    return Subject(recipe, machine, shape, parameters, whole, data_format, targets)


def choose(about: Subject, changes: Sequence[Change] = (), given: Given = Given(), rows: int | None = None) -> Plan:
    """The fastest candidate that fits. Raises DoesNotFit with the nearest misses, ConfigError for what cannot be."""
    about = replace(about, link=given.link, exceeded=given.exceeded, assume_fits=given.assume_fits)
    with about.asking():
        return _chosen(about, changes, given, rows)


def _chosen(about: Subject, changes: Sequence[Change], given: Given, rows: int | None) -> Plan:
    recipe, machine, shape = about.recipe, about.machine, about.shape
    possible, rejected = _possible(about, given)
    judged: list[tuple[Judged, str]] = []
    chosen: Judged | None = None
    for wave in _wanted(about, possible, given):
        chosen = chosen or _fastest(about, wave, judged)
    rejected += [
        f"{one.candidate.mode} with {one.candidate.num_processes} process(es): {one.misses}"
        for one, _ in judged
        if one.misses and one.memory.peak is None
    ]
    if chosen is None:
        raise DoesNotFit(_does_not_fit(about, judged, rejected, list(islice(_ways(about, given), MAX_WAYS))))
    candidate = chosen.candidate
    return Plan(
        recipe_name=recipe.name,
        strategy=candidate,
        shape=shape,
        data_format=about.data_format,
        estimate=chosen.memory,
        budget_bytes=chosen.budget_bytes,
        rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
        lora_targets=about.lora_targets,
        why=(*_why(recipe, machine, candidate, given), *_link_why(about, candidate), *_trace_why(about, chosen)),
        changes=(
            *changes,
            *_precision_changes(recipe, machine, candidate),
            *_batch_changes(about, candidate, judged, given),
        ),
        rejected=tuple(rejected),
        table=tuple(estimate.table(_sorted(judged))) if chosen.memory.peak else (),
        step_s=chosen.time.step_s if chosen.time else None,
        lengths=about.question(candidate).lengths,
        rendezvous=_rendezvous(recipe.launch),
        link=given.link if candidate.device == "cuda" and candidate.processes_per_machine > 1 else None,
        packing=recipe.data.packing,
        padding=_padding(about, candidate),
    )


def _padding(about: Subject, candidate: Candidate) -> Padding | None:
    if about.counts is None:
        return None
    return padding.of(about.counts, candidate, estimate.MULTIPLE[candidate.device], about.recipe.data)


def _possible(about: Subject, given: Given) -> tuple[list[Candidate], list[str]]:
    """(candidates with the recipe's own batch that this machine can start, why not the others)."""
    possible, refusals = [], []
    for candidate in candidates(about.recipe, about.machine, given):
        refused = sharding.refusal(about.recipe, candidate) or _unavailable(candidate, given)
        if not refused and candidate.num_output_chunks > 1 and _holds_head_in_parts(candidate):
            chunks = f"training.num_output_chunks {candidate.num_output_chunks}"
            refused = f"{candidate.mode} holds the output weights in parts, which {chunks} cannot use; leave one out"
        if refused and candidate.mode in (about.recipe.launch.mode, given.mode):
            raise ConfigError(f"launch.mode {refused}")
        if refused:
            refusals.append(refused)
        else:
            possible.append(candidate)
    if not possible:
        raise ConfigError("; ".join(refusals))
    return possible, refusals


def _behind(one: Judged, chosen: Judged) -> str:
    if not (one.time and chosen.time):
        return "comes later"
    ratio = one.seconds / chosen.seconds
    return f"slower: {ratio:.2f} x" if ratio > 1 else f"not clearly faster: {ratio:.2f} x"


def _fastest(about: Subject, wanted: Sequence[Candidate], judged: list[tuple[Judged, str]]) -> Judged | None:
    """The fastest of these that fits; all are added to `judged` with why they won or lost.

    Where no time is predicted the order given counts. The allocator is replayed for those that may win only."""
    hopeful = [one for one in wanted if estimate.judge_states(about, one) is None]
    about.fetch(hopeful)
    rough = [estimate.judge(about, _with_fewer_workers(about, _evaluated(about, one)), exact=False) for one in wanted]
    order = sorted(range(len(rough)), key=lambda at: (rough[at].time is None, rough[at].seconds, at))
    fitting = [at for at in order if rough[at].misses is None]
    if fitting:  # of those as fast as can be told apart, the simplest: the first of the order given
        near = [at for at in fitting if rough[at].seconds <= rough[fitting[0]].seconds * AS_FAST]
        order = [*sorted(near), *(at for at in order if at not in near)]
    chosen: Judged | None = None
    for at in order:
        one = rough[at]
        if one.misses is None and chosen is None:
            one = estimate.judge(about, one.candidate)
        if one.misses is not None:
            judged.append((one, f"does not fit: {one.misses}"))
        elif chosen is None:
            chosen = one
            judged.append((one, "chosen"))
        else:
            judged.append((one, _behind(one, chosen)))
    return chosen


def _evaluated(about: Subject, candidate: Candidate) -> Candidate:
    """The candidate with an evaluation batch that takes no more than training does; one that was asked for, no more
    than fits. Evaluation does not decide the weights, so it gives way first."""
    count = candidate.per_device_eval_batch_size
    for one in about.exceeded.ran_out:
        if one.section == "evaluation":
            count = max(1, min(count, one.candidate.per_device_eval_batch_size // 2))
    trace = about.trace(candidate)
    if trace is None:
        return replace(candidate, per_device_eval_batch_size=count)
    budget = estimate.budget_bytes(about.recipe, about.machine, candidate)
    is_asked = about.recipe.training.per_device_eval_batch_size is not None
    peaks = trace.peaks(candidate.per_device_train_batch_size, count)
    trains = max(peak.allocated_bytes for section, peak in peaks.items() if section != "evaluation")
    limit = budget if is_asked else min(trains, budget)
    while count > 1 and trace.peaks(1, count)["evaluation"].allocated_bytes > limit:
        count = max(1, count // 2)
    return replace(candidate, per_device_eval_batch_size=count)


def _with_fewer_workers(about: Subject, candidate: Candidate) -> Candidate:
    """The candidate with as many data workers as host RAM has room for, where their number was left to planning."""
    if about.recipe.training.dataloader_num_workers is not None:
        return candidate
    fewer = candidate
    while fewer.dataloader_num_workers:
        if estimate.misses_host(about, fewer, estimate.judge(about, fewer, exact=False).memory) is None:
            return fewer
        fewer = replace(fewer, dataloader_num_workers=fewer.dataloader_num_workers - 1)
    return fewer


def ranked(about: Subject, given: Given) -> list[Judged]:
    """Every way to cut the effective batch that fits, the fastest first; empty where nothing was traced."""
    about = replace(about, link=given.link)
    possible, _ = _possible(about, given)
    if about.traces is None:
        return []
    with about.asking():
        for wave in _free_waves(about, possible):
            judged: list[tuple[Judged, str]] = []
            if _fastest(about, wave, judged) is not None:
                fitting = [one for one, _ in judged if one.misses is None and one.time is not None]
                return sorted(fitting, key=lambda one: one.seconds)
    return []


def _wanted(about: Subject, possible: Sequence[Candidate], given: Given) -> Iterator[list[Candidate]]:
    """The waves of candidates: what tuning has found first, any cut of the batch where none was asked for."""
    if given.tuned is not None:
        tuned = given.tuned
        yield [
            replace(
                one,
                per_device_train_batch_size=tuned.per_device_train_batch_size,
                gradient_accumulation_steps=tuned.gradient_accumulation_steps,
                per_device_eval_batch_size=about.recipe.training.per_device_eval_batch_size
                or _eval_batch(tuned.per_device_train_batch_size),
                gradient_checkpointing=tuned.gradient_checkpointing,
                num_output_chunks=tuned.num_output_chunks,
            )
            for one in possible
            if (one.mode, one.num_processes, one.effective_batch_size)
            == (tuned.mode, tuned.num_processes, tuned.effective_batch_size)
        ]
    if given.free_batch and about.traces is not None:
        yield from _free_waves(about, possible)
    yield from _waves(about, possible)


def _free_waves(about: Subject, possible: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    whole = [one for one in possible if one.engine in ("plain", "ddp")]
    others = [one for one in possible if one not in whole]
    yield [cut for one in whole for cut in _cuts(about, one, any_size=True)]
    yield [cut for one in others for cut in _cuts(about, one, any_size=True)]


def _cuts(about: Subject, candidate: Candidate, any_size: bool = False) -> Iterator[Candidate]:
    """The same effective batch in smaller micro-batches (`any_size`: in all), with and without checkpointing, with the
    loss whole and in chunks, where that was left open; the largest first."""
    recipe = about.recipe
    asked = candidate.per_device_train_batch_size
    per_rank = asked * candidate.gradient_accumulation_steps
    may_checkpoint = "gradient_checkpointing" not in recipe.training.model_fields_set
    for micro_batch in range(per_rank if any_size else asked, 0, -1):
        if per_rank % micro_batch or (recipe.launch.exact_batch and micro_batch != asked):
            continue
        cut = replace(
            candidate,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=per_rank // micro_batch,
            per_device_eval_batch_size=recipe.training.per_device_eval_batch_size or _eval_batch(micro_batch),
        )
        if micro_batch != asked or any_size:
            yield cut
        checkpoints = (False, True) if may_checkpoint and not cut.gradient_checkpointing else (False,)
        chunks = (1, OUTPUT_CHUNKS) if _may_chunk(about, cut) else (cut.num_output_chunks,)
        for checkpointed, chunked in itertools.product(checkpoints, chunks):
            other = replace(cut, gradient_checkpointing=cut.gradient_checkpointing or checkpointed)
            other = replace(other, num_output_chunks=chunked)
            if other != cut:
                yield other


def _may_chunk(about: Subject, candidate: Candidate) -> bool:
    training = about.recipe.training
    return (
        training.num_output_chunks is None
        and about.shape.config["model_type"] in CHUNKED
        and not _holds_head_in_parts(candidate)
        and not training.extras.get("torch_compile")
    )


def _holds_head_in_parts(candidate: Candidate) -> bool:
    return candidate.engine == "fsdp2" or candidate.zero_stage == 3


def _waves(about: Subject, possible: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """What is tried, in order: as it was asked for, then whole copies in smaller pieces, then shared out or offloaded.

    What an earlier wave settles is not traced for a later one. Under mixed precision whole copies come first: they keep
    float32 weights and autocast, DeepSpeed and FSDP2 compute everything in 16 bits."""
    whole = [one for one in possible if one.engine in ("plain", "ddp")]
    shared = [one for one in possible if one not in whole and not one.offloads]
    offloaded = [one for one in possible if one.offloads]
    if about.recipe.training.bf16 or about.recipe.training.fp16:
        yield whole
        yield shared
    else:
        yield [*whole, *shared]
    if about.traces is None:
        yield offloaded
        if about.exceeded.ran_out:
            yield [cut for one in possible for cut in _cuts(about, one)]
        return
    cuts = [cut for one in whole for cut in _cuts(about, one)]
    yield [cut for cut in cuts if cut.per_device_train_batch_size > 1]
    rest = [cut for one in (*shared, *offloaded) for cut in _cuts(about, one)]
    yield [*offloaded, *rest, *(cut for cut in cuts if cut.per_device_train_batch_size == 1)]


def _eval_batch(micro_batch: int) -> int:
    return max(micro_batch, min(3 * micro_batch, MAX_EVAL_BATCH))


def _sorted(judged: Sequence[tuple[Judged, str]]) -> list[tuple[Judged, str]]:
    """The chosen one first, then the nearest: what fits by time, what does not by bytes; no more than people read."""
    ranked = sorted(
        judged,
        key=lambda one: (
            one[1] != "chosen",
            bool(one[0].misses),
            one[0].seconds if not one[0].misses else one[0].memory.device_bytes,
        ),
    )
    return ranked[:TABLE_ROWS]


def _check_length(recipe: Recipe, config: dict[str, Any]) -> None:
    positions = config.get("n_positions") or config.get("max_position_embeddings")
    if config["model_type"] != "t5" and positions is not None and recipe.data.max_length > positions:
        raise ConfigError(
            f"data.max_length {recipe.data.max_length}, but the model has {positions} positions; lower it, or choose"
            " another model"
        )


def _check_packing(recipe: Recipe, model_type: str) -> None:
    if not recipe.data.packing:
        return
    if model_type == "t5":
        raise ConfigError(
            "data.packing: true, but the model is a T5: its encoder attends both ways and its decoder to all of the"
            " encoder's output, and transformers keeps documents apart in neither; use data.group_by_length: true"
        )
    if recipe.training.extras.get("use_cache"):
        raise ConfigError(
            "training.use_cache: true, but transformers keeps packed documents apart only without a cache; leave it out"
            " (training has no use for one)"
        )


def _check_chunks(recipe: Recipe, model_type: str) -> None:
    asked = f"training.num_output_chunks: {recipe.training.num_output_chunks}"
    if (recipe.training.num_output_chunks or 1) == 1:
        return
    if model_type not in CHUNKED:
        raise ConfigError(f"{asked}, but the model is a {model_type}; logits in parts work for {', '.join(CHUNKED)}")
    if recipe.training.extras.get("torch_compile"):
        raise ConfigError(f"{asked} beside training.torch_compile: true, which would compile each part; leave one out")


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
            or _eval_batch(training.per_device_train_batch_size),
            mixed_precision=_precision(recipe, machine.gpus[:num_processes] if on_gpu else ()),
            gradient_checkpointing=training.gradient_checkpointing,
            num_output_chunks=training.num_output_chunks or 1,
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


def _asked_precision(recipe: Recipe) -> Precision:
    """Before a card is known, which may have fp16 instead of bf16: sizes are the same."""
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"


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


def _batch_changes(
    about: Subject, candidate: Candidate, judged: Sequence[tuple[Judged, str]], given: Given
) -> list[Change]:
    """Said where the batch is cut in another way than it was asked for: the effective batch is held."""
    training, held = about.recipe.training, f"the effective batch stays {candidate.effective_batch_size}"
    found: list[Change] = []
    asked, runs = training.per_device_train_batch_size, candidate.per_device_train_batch_size
    reasons = [one.misses for one, _ in judged if one.misses and one.candidate.per_device_train_batch_size == asked]
    missed = f"{asked} samples at once need {reasons[0]}" if reasons else "the fastest by prediction"
    tuned = given.tuned and replace(given.tuned, per_device_eval_batch_size=candidate.per_device_eval_batch_size)
    if tuned == replace(candidate, dataloader_num_workers=tuned.dataloader_num_workers if tuned else 0):
        missed = "tuned: the fastest of real trials on this machine"
    if asked != runs:
        reason = f"{missed}; {held}"
        found.append(Change("training.per_device_train_batch_size", str(asked), str(runs), reason))
    elif training.gradient_accumulation_steps != candidate.gradient_accumulation_steps:
        instead = candidate.gradient_accumulation_steps // training.gradient_accumulation_steps
        reason = f"{candidate.num_processes} process instead of {candidate.num_processes * instead}: {held}"
    else:
        reason = ""
    if training.gradient_accumulation_steps != candidate.gradient_accumulation_steps:
        steps = str(training.gradient_accumulation_steps), str(candidate.gradient_accumulation_steps)
        found.append(Change("training.gradient_accumulation_steps", *steps, reason))
    if candidate.gradient_checkpointing and not training.gradient_checkpointing:
        reason = f"{missed}; recomputing activations changes no result"
        found.append(Change("training.gradient_checkpointing", "false", "true", reason))
    if candidate.num_output_chunks > (training.num_output_chunks or 1):
        reason = f"{missed}; the loss is the same sum, its logits made in parts"
        found.append(Change("training.num_output_chunks", "1", str(candidate.num_output_chunks), reason))
    wanted = training.per_device_eval_batch_size
    if wanted is not None and wanted != candidate.per_device_eval_batch_size:
        runs_eval = str(candidate.per_device_eval_batch_size)
        reason = f"evaluating {wanted} samples at once does not fit; the result is the same"
        found.append(Change("training.per_device_eval_batch_size", str(wanted), runs_eval, reason))
    return found


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
    if given.assume_fits:
        yield "launch.assume_fits: what is predicted was not compared with what there is"
    if given.force_gloo and candidate.num_processes == 1:
        yield "ACCELERATE_USE_GLOO=1 has no effect on one process"
    elif given.force_gloo:
        yield "backend gloo: ACCELERATE_USE_GLOO=1"
    if quantized := recipe.quantized(candidate.mixed_precision):
        double = ", their scales in 8" if quantized.bnb_4bit_use_double_quant else ""
        yield (
            f"quantization: linear weights in 4 bits ({quantized.bnb_4bit_quant_type}){double}, computed in"
            f" {quantized.bnb_4bit_compute_dtype}; the rest keeps model.dtype {recipe.model.dtype}"
        )
    usual = _workers(recipe, machine, candidate.processes_per_machine, candidate.device == "cuda")
    if candidate.dataloader_num_workers < usual:
        yield f"data workers {candidate.dataloader_num_workers} instead of {usual}: host RAM has no room for more"
    elif recipe.training.dataloader_num_workers is None:
        yield f"data workers {candidate.dataloader_num_workers}: " + (
            "the rows are mapped and padding them is cheap; workers would take cores from training"
            if candidate.device == "cpu"
            else f"{machine.cpu_count} CPUs over {candidate.num_processes} process(es)"
        )


def _link_why(about: Subject, candidate: Candidate) -> Iterator[str]:
    """What the ranks talk over, and what it costs where every sample is as long as it may be."""
    link, shape = about.link, about.shape
    if candidate.device == "cpu" or candidate.num_processes == 1:
        return
    if link is None:
        yield "link: not tested; `python -m launch doctor` or the first run does"
        return
    yield f"link: {link.reason}"
    from launch import preflight

    tokens = candidate.effective_batch_size * about.recipe.data.max_length
    backward = shape.parameters + shape.trainable_parameters  # activations' gradients, weights' gradients
    again = shape.parameters if candidate.gradient_checkpointing else 0
    step_flops = 2.0 * tokens * (shape.parameters + backward + again)
    cost = preflight.cost_line(link, about.whole.gradients_bytes, step_flops, candidate.num_processes)
    if cost:
        yield cost


def _trace_why(about: Subject, chosen: Judged) -> Iterator[str]:
    if about.traces is not None and about.traces.failure:
        yield f"activations are not predicted: {about.traces.failure}"
    if chosen.time:
        yield f"time: {chosen.time.step_s:.3g} s a step predicted ({chosen.time.reason})"


def _does_not_fit(
    about: Subject, judged: Sequence[tuple[Judged, str]], rejected: Sequence[str], ways: Sequence[str]
) -> str:
    shape, whole, recipe = about.shape, about.whole, about.recipe
    advice = f"This would fit: {'; '.join(ways)}" if ways else "Use a smaller model (--model.shape=...)"
    traced = sorted((one for one, _ in judged if one.memory.peak), key=lambda one: one.memory.device_bytes)
    nearest = [f"{describe(one.candidate)}: {one.misses}" for one in traced[:3]]
    exact = " with launch.exact_batch" if recipe.launch.exact_batch else ""
    return (
        f"{recipe.name}: {shape.name} ({shape.parameters:,} parameters, {shape.trainable_parameters:,} trained) needs"
        f" {gib(whole.weights_bytes)} weights + {gib(whole.gradients_bytes)} gradients +"
        f" {gib(whole.optimizer_bytes)} optimizer before any activation. Nothing fits{exact}. Nearest:"
        f" {'; '.join(nearest or dict.fromkeys(rejected))}. {advice}"
    )


def _ways(about: Subject, given: Given) -> Iterator[str]:
    """Flags with which a candidate fits, its bytes beside them; only what was computed to fit is offered."""
    recipe = about.recipe
    launch, model = recipe.launch, recipe.model
    places = [("", launch)]
    if launch.mode != "auto" and given.num_processes is None:
        places.append(("--launch.mode=auto ", launch.model_copy(update={"mode": "auto"})))
    if (launch.num_processes or 1) > 1 and launch.nodes == 1 and given.num_processes is None:
        alone = launch.model_copy(update={"mode": "auto", "num_processes": 1})
        places.append(("--launch.mode=auto --launch.num_processes=1 ", alone))
    if launch.exact_batch:
        places.append(("--launch.exact_batch=false ", launch.model_copy(update={"exact_batch": False})))
    half = model.model_copy(update={"dtype": "bfloat16"})
    models = [("", model), ("--model.dtype=bfloat16 ", half)] if model.dtype == "float32" else [("", model)]
    lora_flag = "" if recipe.lora else "--lora.r=16 "
    adapters: list[tuple[str, LoraSection | None, QuantizationSection | None]]
    adapters = [("", recipe.lora, recipe.quantization)]
    if lora_flag:
        adapters.append((lora_flag, LoraSection(), None))
    if recipe.quantization is None and about.shape.config["model_type"] in predict.LORA_TARGETS:
        four_bit = QuantizationSection(load_in_4bit=True)
        adapters.append((f"{lora_flag}--quantization.load_in_4bit=true ", recipe.lora or LoraSection(), four_bit))
    for flags, section, lora, quantization, place in (
        (adapter_flags + model_flag + place_flag, section, lora, quantization, place)
        for adapter_flags, lora, quantization in adapters
        for model_flag, section in models
        for place_flag, place in places
    ):
        if not flags:
            continue
        update = {"model": section, "lora": lora, "quantization": quantization, "launch": place}
        variant = recipe.model_copy(update=update)
        other = subject(variant, about.machine, dict(about.shape.config), about.parameters, about.data_format)
        traces = about.traces and about.traces.of(variant, other.shape, other.lora_targets)
        other = replace(other, lengths=about.lengths, link=about.link, traces=traces, allocator=about.allocator)
        try:
            possible, _ = _possible(other, given)
        except ConfigError:  # this machine cannot start it: no way out
            continue
        # of each the most frugal cut; a batch of one with its checkpointing settled has none
        frugal = possible if traces is None else [[one, *_cuts(other, one)][-1] for one in possible]
        chosen = _fastest(other, frugal, [])
        if chosen is not None:
            yield f"{flags.strip()} ({chosen.candidate.mode}, {gib(chosen.memory.device_bytes)})"
