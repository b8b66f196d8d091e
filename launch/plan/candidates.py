"""Every way to run a recipe on a machine: modes and ranks, cuts of the batch, and the waves in
which they are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launch.base.errors import ConfigError, ResourceError
from launch.plan import kernels
from launch.predict import sharding
from launch.predict.estimate import PlanContext
from launch.predict.oom_history import NO_OOM_HISTORY, OomHistory
from launch.probe import architectures
from launch.schema.machine import Gpu, Link, Machine
from launch.schema.plan import Strategy as Candidate
from launch.schema.recipe import LaunchSection, Mode, Precision, Recipe

# samples; the guides' 3x the training batch is a ceiling, and logits are the larger part of it
MAX_EVAL_BATCH = 64
OUTPUT_CHUNKS = 8  # where the plan decides, as many as torchtune's default
# their forward returns what the output projection gives
CHUNKED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "t5")

CPU_MODES = ("cpu", "multi_cpu")
ONE_PROCESS = ("cpu", "single_gpu")
SEVERAL_PROCESSES = ("multi_cpu", "dual_gpu_nccl", "dual_gpu_gloo")
GPU_MODES = ("single_gpu", "dual_gpu_nccl", "dual_gpu_gloo")
# Fastest first where the states fit: each row holds less on the cards than the one before and moves
# more bytes.
SHARDED: tuple[Mode, ...] = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
OFFLOADED: tuple[Mode, ...] = ("deepspeed_zero2_offload", "deepspeed_zero3_offload")


@dataclass(frozen=True)
class LaunchConstraints:
    """What a start outside our launcher has fixed already: ranks are running when we are asked."""

    num_processes: int | None = None
    num_machines: int = 1
    mode: Mode | None = None  # of DeepSpeed or FSDP2, when the launcher above has chosen one
    force_cpu: bool = False
    force_gloo: bool = False  # ACCELERATE_USE_GLOO=1
    link: Link | None = None  # what the test of this machine's GPUs found
    has_deepspeed: bool = True  # the package is installed
    no_compiler: str | None = None  # why torch.compile cannot work here
    # why that package cannot be used; "": the machine's packages are not known
    no_flash_attn: str | None = ""
    no_liger: str | None = None
    oom_history: OomHistory = NO_OOM_HISTORY  # by which an attempt of this run has refuted its plan
    free_batch: bool = False  # any cut of the effective batch will do
    wants_tuned: bool = False  # no batch was typed: what tuning has found before is used
    tuned: Candidate | None = None  # what short trials found the fastest here


NO_CONSTRAINTS = LaunchConstraints()


def possible(
    context: PlanContext, constraints: LaunchConstraints
) -> tuple[list[Candidate], list[str]]:
    """(candidates with the recipe's own batch that this machine can start, why not the others)."""
    possible, refusals = [], []
    for candidate in _as_asked(context, constraints):
        refused = sharding.refusal(context.recipe, candidate) or _unavailable(
            candidate, constraints
        )
        if not refused and candidate.num_output_chunks > 1 and _holds_head_in_parts(candidate):
            chunks = f"training.num_output_chunks {candidate.num_output_chunks}"
            refused = (
                f"{candidate.mode} holds the output weights in parts, which {chunks} cannot use;"
                " leave one out"
            )
        if refused and candidate.mode in (context.recipe.launch.mode, constraints.mode):
            raise ConfigError(f"launch.mode {refused}")
        if refused:
            refusals.append(refused)
        else:
            possible.append(candidate)
    if not possible:
        raise ConfigError("; ".join(refusals))
    return possible, refusals


def _as_asked(context: PlanContext, constraints: LaunchConstraints) -> Iterator[Candidate]:
    """Every way this version knows to run the recipe as it was asked for, fastest first."""
    recipe, machine, config = context.recipe, context.machine, context.shape.config
    launch, training = recipe.launch, recipe.training
    on_gpu = bool(machine.gpus) and not constraints.force_cpu and launch.mode not in CPU_MODES
    if launch.mode in GPU_MODES and not on_gpu:
        raise ResourceError(
            f"launch.mode {launch.mode} needs a GPU, found none ({machine.gpus_reason}); use cpu or"
            " multi_cpu"
        )
    for mode, num_processes, instead_of in _ways_to_start(launch, machine, constraints, on_gpu):
        several = num_processes > 1 or mode.startswith("deepspeed")
        gloo = not on_gpu or (
            num_processes > 1 and (mode == "dual_gpu_gloo" or constraints.force_gloo)
        )
        gpus = machine.gpus[:num_processes] if on_gpu else ()
        precision = _precision(recipe, gpus)
        yield Candidate(
            mode=mode,
            device="cuda" if on_gpu else "cpu",
            num_processes=num_processes,
            num_machines=max(launch.nodes, constraints.num_machines),
            backend=("gloo" if gloo else "nccl") if several else None,
            per_device_train_batch_size=training.per_device_train_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps
            * (instead_of // num_processes),
            per_device_eval_batch_size=training.per_device_eval_batch_size
            or _eval_batch(training.per_device_train_batch_size),
            mixed_precision=precision,
            activation_checkpointing=training.activation_checkpointing,
            num_output_chunks=training.num_output_chunks or 1,
            torch_compile=training.compiles and constraints.no_compiler is None,
            attn_implementation=kernels.attention(
                recipe, config, gpus, precision, constraints.no_flash_attn
            ),
            tf32=kernels.tf32(recipe, gpus),
            use_liger_kernel=kernels.liger(
                recipe, config["model_type"], gpus, constraints.no_liger
            ),
            dataloader_num_workers=workers(recipe, machine, num_processes // launch.nodes, on_gpu),
        )


def _ways_to_start(
    launch: LaunchSection, machine: Machine, constraints: LaunchConstraints, on_gpu: bool
) -> Iterator[tuple[Mode, int, int]]:
    """(mode, number of ranks, number that the recipe's batch is meant for) of each candidate.

    Raises ConfigError for what cannot be.
    """
    per_node = len(machine.gpus) if on_gpu else 1
    asked = constraints.num_processes or launch.num_processes
    if (
        on_gpu
        and asked is not None
        and asked > per_node * launch.nodes
        and constraints.num_machines == 1
    ):
        raise ConfigError(
            f"launch.num_processes {asked}, but there are {per_node * launch.nodes} GPU(s):"
            f" {machine.gpus_reason}"
        )
    if constraints.num_processes and launch.num_processes not in (None, constraints.num_processes):
        raise ConfigError(
            f"launch.num_processes {launch.num_processes}, but {constraints.num_processes} rank(s)"
            " were started; leave the key out, or start as many"
        )
    if constraints.mode and launch.mode not in ("auto", constraints.mode):
        raise ConfigError(
            f"launch.mode {launch.mode}, but the ranks were started as {constraints.mode}; make"
            " them the same"
        )
    mode = constraints.mode or launch.mode
    if mode == "auto":
        yield from _automatic(asked, per_node, launch.nodes, on_gpu, constraints)
        return
    # ranks; two show on a CPU what sharing out means
    least = launch.nodes if launch.nodes > 1 or on_gpu else 2
    count = asked or (1 if mode in ONE_PROCESS else max(per_node * launch.nodes, least))
    if mode in ONE_PROCESS and launch.nodes > 1:
        raise ConfigError(f"launch.mode {mode} is one process, launch.nodes says {launch.nodes}")
    if mode in ONE_PROCESS and count > 1:
        raise ConfigError(f"launch.mode {mode} is one process, launch.num_processes says {count}")
    if mode in SEVERAL_PROCESSES and count == 1:
        if asked:
            raise ConfigError(
                f"launch.mode {mode} needs two processes or more, launch.num_processes says 1"
            )
        raise ResourceError(
            f"launch.mode {mode} needs two GPUs or more, there is {per_node}; use single_gpu"
        )
    if mode == "dual_gpu_nccl" and constraints.force_gloo:
        yield "dual_gpu_gloo", count, count
    else:
        yield mode, count, count


def _automatic(
    asked: int | None, per_node: int, nodes: int, on_gpu: bool, constraints: LaunchConstraints
) -> Iterator[tuple[Mode, int, int]]:
    """What `launch.mode: auto` may mean. Where ranks are running already, their number and engine
    are fixed."""
    if not on_gpu:
        count = asked or nodes
        on_cpu: Mode = "multi_cpu" if count > 1 else "cpu"
        yield on_cpu, count, count
        return
    count = asked or per_node * nodes
    together: Mode = "dual_gpu_gloo" if constraints.force_gloo else "dual_gpu_nccl"
    first: Mode = "single_gpu" if count == 1 else together
    yield first, count, count
    if constraints.num_processes is not None:
        return
    nccl_fails = constraints.link is not None and constraints.link.backend != "nccl"
    if count == 1 or not (nccl_fails or constraints.force_gloo):
        for mode in (*(SHARDED if count > 1 else ()), *OFFLOADED):
            yield mode, count, count
        return
    if nccl_fails and not constraints.force_gloo:
        yield "dual_gpu_gloo", count, count
    if asked is None and nodes == 1:
        alone: tuple[Mode, ...] = ("single_gpu", *OFFLOADED)
        for mode in alone:
            yield mode, 1, count


def _unavailable(candidate: Candidate, constraints: LaunchConstraints) -> str | None:
    """Why this machine's packages or the link test rule a candidate out, or None."""
    if candidate.engine == "deepspeed" and not constraints.has_deepspeed:
        return f"{candidate.mode} cannot run: the package deepspeed is not installed"
    link = constraints.link
    if link is None or candidate.device == "cpu" or candidate.processes_per_machine == 1:
        return None
    if link.backend is None:
        return f"{candidate.mode} cannot run: {link.reason}; `python -m launch doctor` says why"
    if candidate.backend == "nccl" and link.backend == "gloo":
        return (
            f"{candidate.mode} cannot run: NCCL does not work between these GPUs ({link.reason});"
            " use dual_gpu_gloo"
        )
    return None


def wanted(
    context: PlanContext, possible: Sequence[Candidate], constraints: LaunchConstraints
) -> Iterator[list[Candidate]]:
    """The waves of candidates: what tuning has found first, any cut of the batch where none was
    asked for."""
    if constraints.tuned is not None:
        tuned = constraints.tuned
        yield [
            replace(
                one,
                per_device_train_batch_size=tuned.per_device_train_batch_size,
                gradient_accumulation_steps=tuned.gradient_accumulation_steps,
                per_device_eval_batch_size=context.recipe.training.per_device_eval_batch_size
                or _eval_batch(tuned.per_device_train_batch_size),
                activation_checkpointing=tuned.activation_checkpointing,
                num_output_chunks=tuned.num_output_chunks,
            )
            for one in possible
            if (one.mode, one.num_processes, one.effective_batch_size)
            == (tuned.mode, tuned.num_processes, tuned.effective_batch_size)
        ]
    if constraints.free_batch and context.traces is not None:
        yield from free_waves(context, possible)
    yield from _waves(context, possible)


def free_waves(context: PlanContext, possible: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Every cut of the effective batch: of whole copies first, then of those shared out or
    offloaded."""
    whole = [one for one in possible if one.is_whole]
    others = [one for one in possible if one not in whole]
    yield [cut for one in whole for cut in cuts(context, one, any_size=True)]
    yield [cut for one in others for cut in cuts(context, one, any_size=True)]


def _waves(context: PlanContext, possible: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """What is tried, in order: as it was asked for, then whole copies in smaller pieces, then
    shared out or offloaded.

    What an earlier wave settles is not traced for a later one. Under mixed precision whole copies
    come first: they keep float32 weights and autocast, DeepSpeed and FSDP2 compute everything in 16
    bits."""
    whole = [one for one in possible if one.is_whole]
    shared = [one for one in possible if one not in whole and not one.offloads]
    offloaded = [one for one in possible if one.offloads]
    if context.recipe.training.bf16 or context.recipe.training.fp16:
        yield whole
        yield shared
    else:
        yield [*whole, *shared]
    if context.traces is None:
        yield offloaded
        if context.oom_history.ran_out:
            yield [cut for one in possible for cut in cuts(context, one)]
        return
    smaller = [cut for one in whole for cut in cuts(context, one)]
    yield [cut for cut in smaller if cut.per_device_train_batch_size > 1]
    rest = [cut for one in (*shared, *offloaded) for cut in cuts(context, one)]
    yield [*offloaded, *rest, *(cut for cut in smaller if cut.per_device_train_batch_size == 1)]


def shared_cuts(
    context: PlanContext, possible: Sequence[Candidate], constraints: LaunchConstraints
) -> list[Candidate]:
    """Copies shared out in smaller pieces, none of a single sample; nothing where tuning or a free
    batch decides."""
    if constraints.tuned is not None or constraints.free_batch or context.traces is None:
        return []
    shared = [one for one in possible if not one.is_whole and not one.offloads]
    return [
        cut
        for one in shared
        for cut in (one, *cuts(context, one))
        if cut.per_device_train_batch_size > 1
    ]


def cuts(context: PlanContext, candidate: Candidate, any_size: bool = False) -> Iterator[Candidate]:
    """The same effective batch in smaller micro-batches (`any_size`: in all), with and without
    checkpointing, with the loss whole and in chunks, where that was left open; the largest
    first."""
    recipe = context.recipe
    asked = candidate.per_device_train_batch_size
    per_rank = asked * candidate.gradient_accumulation_steps
    may_checkpoint = "activation_checkpointing" not in recipe.training.model_fields_set
    for micro_batch in range(per_rank if any_size else asked, 0, -1):
        if per_rank % micro_batch or (recipe.launch.exact_batch and micro_batch != asked):
            continue
        cut = replace(
            candidate,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=per_rank // micro_batch,
            per_device_eval_batch_size=recipe.training.per_device_eval_batch_size
            or _eval_batch(micro_batch),
        )
        if micro_batch != asked or any_size:
            yield cut
        checkpoints = (
            (False, True) if may_checkpoint and not cut.activation_checkpointing else (False,)
        )
        chunks = (1, OUTPUT_CHUNKS) if _may_chunk(context, cut) else (cut.num_output_chunks,)
        for checkpointed, chunked in itertools.product(checkpoints, chunks):
            other = replace(
                cut, activation_checkpointing=cut.activation_checkpointing or checkpointed
            )
            other = replace(other, num_output_chunks=chunked)
            if other != cut:
                yield other


def _may_chunk(context: PlanContext, candidate: Candidate) -> bool:
    training = context.recipe.training
    return (
        training.num_output_chunks is None
        and context.shape.config["model_type"] in CHUNKED
        and not _holds_head_in_parts(candidate)
        and not candidate.torch_compile
    )


def _holds_head_in_parts(candidate: Candidate) -> bool:
    return candidate.engine == "fsdp2" or candidate.zero_stage == 3


def _eval_batch(micro_batch: int) -> int:
    return max(micro_batch, min(3 * micro_batch, MAX_EVAL_BATCH))


def asked_precision(recipe: Recipe) -> Precision:
    """Before a card is known, which may have fp16 instead of bf16: sizes are the same."""
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"


def _precision(recipe: Recipe, gpus: Sequence[Gpu]) -> Precision:
    training = recipe.training
    if training.fp16 and not gpus:
        raise ConfigError(
            "training.fp16: true has no effect on a CPU (it would train in fp32); use bf16 or"
            " neither"
        )
    found = asked_precision(recipe)
    without_bf16 = architectures.without_bf16(gpus) if training.bf16 else ""
    if without_bf16:
        found = "fp16"
    # adapters are float32
    if found == "fp16" and recipe.model.dtype == "bfloat16" and recipe.lora is None:
        card = f" ({without_bf16})" if without_bf16 else ""
        raise ConfigError(
            f"model.dtype: bfloat16 beside fp16 autocast{card}, whose loss scaler takes no bfloat16"
            " gradients; leave model.dtype out, or use bf16 on a card that has it"
        )
    return found


def workers(recipe: Recipe, machine: Machine, num_processes: int, on_gpu: bool) -> int:
    """Data workers of a rank: the recipe's, else as many as its share of the CPUs feeds a GPU
    with."""
    if recipe.training.dataloader_num_workers is not None:
        return recipe.training.dataloader_num_workers
    return max(0, min(4, machine.cpu_count // num_processes - 1)) if on_gpu else 0
