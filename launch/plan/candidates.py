"""Candidates for a plan: modes and ranks, splits of the batch, levers that save memory, and the
order in which they are preferred."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size
from launch.plan import kernels
from launch.predict import sharding, target_counts
from launch.predict.facts import Facts, Installed, Wishes
from launch.predict.oom_history import CLEARLY_BELOW
from launch.probe import architectures
from launch.recipe.strict_yaml import show
from launch.schema import levers
from launch.schema.levers import Lever, Levers
from launch.schema.machine import Gpu, Link, Machine
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode
from launch.schema.plan import Strategy as Candidate
from launch.schema.recipe import Recipe
from launch.schema.training_section import Precision

# samples; the guides' 3x the training batch is a ceiling, and logits are the larger part of it
_MAX_EVAL_BATCH = 64
# cards of which every smaller number is tried; of more only their divisors
_MOST_OF_ANY_NUMBER = 4
MOST_WORKERS = 4  # data workers of a rank, where the recipe names no number
CANNOT_RUN = " cannot run: "  # words of a refusal whose cause is this machine, which can be changed


def possible(facts: Facts) -> tuple[list[Candidate], list[str]]:
    """Return the candidates with the recipe's own batch that this machine can start, and why the
    others cannot."""
    possible, refusals = [], []
    for candidate in _as_asked(facts):
        refused = sharding.refusal(facts.recipe, candidate) or _unavailable(
            candidate, facts.installed
        )
        if refused and candidate.mode in (facts.recipe.launch.mode, facts.wishes.mode):
            raise ConfigError(f"launch.mode {refused}")
        if refused:
            refusals.append(refused)
        else:
            possible.append(candidate)
    if not possible:
        raise ConfigError("; ".join(refusals))
    return possible, list(dict.fromkeys(refusals))


def _as_asked(facts: Facts) -> Iterator[Candidate]:
    """Yield a candidate for each mode that the recipe allows, with its own batch, fastest first."""
    recipe, machine = facts.recipe, facts.machine
    launch, training = recipe.launch, recipe.training
    on_gpu = bool(machine.gpus) and not facts.wishes.force_cpu and launch.device != "cpu"
    if launch.device == "cuda" and not on_gpu:
        raise ResourceError(
            f"launch.mode {launch.mode} needs a GPU, found none ({machine.gpus_reason}); use cpu or"
            " multi_cpu"
        )
    _check_checkpointing(recipe, facts.installed, on_gpu)
    _check_streaming(facts)
    for mode, num_processes, instead_of in _ways_to_start(
        recipe, machine, facts.wishes, facts.installed.link, on_gpu
    ):
        row = LAUNCH_MODES[mode]
        # the samples of a step that a rank takes one after another
        steps, remainder = divmod(training.gradient_accumulation_steps * instead_of, num_processes)
        if remainder:
            continue
        several = num_processes > 1 or row.engine == "deepspeed"
        gloo = not on_gpu or (
            num_processes > 1 and (row.backend == "gloo" or facts.wishes.force_gloo)
        )
        gpus = machine.gpus[:num_processes] if on_gpu else ()
        precision = _precision(recipe, gpus)
        for of_levers in _levers(facts, gpus, precision, row):
            yield Candidate(
                mode=mode,
                device="cuda" if on_gpu else "cpu",
                num_processes=num_processes,
                num_machines=max(launch.nodes, facts.wishes.num_machines),
                backend=("gloo" if gloo else "nccl") if several else None,
                per_device_train_batch_size=training.per_device_train_batch_size,
                gradient_accumulation_steps=steps,
                per_device_eval_batch_size=training.per_device_eval_batch_size
                or _eval_batch(training.per_device_train_batch_size),
                mixed_precision=precision,
                levers=of_levers,
                tf32=kernels.tf32(recipe, gpus),
                pin_memory=facts.history.oom.may_pin,
                dataloader_num_workers=workers(facts, num_processes // launch.nodes, on_gpu),
            )


def _levers(
    facts: Facts, gpus: Sequence[Gpu], precision: Precision, mode: LaunchMode
) -> Iterator[Levers]:
    """Yield those that the recipe asks for, with kernels that these cards and packages have:
    without Liger's, and with them where they may be faster."""
    recipe, size, installed = facts.recipe, facts.model.size, facts.installed
    began = facts.history.began_with
    plain = replace(
        levers.requested(recipe),
        fused_adapters=kernels.fused_adapters(recipe, mode, precision, began),
        logits_at_targets=target_counts.at_targets(recipe, size.family),
        torch_compile=kernels.compiles(recipe, installed.no_compiler, began),
        attn_implementation=kernels.attention(
            *(recipe, size, gpus, precision, installed.no_flash_attn, installed.no_varlen_attn),
            began and began.attn_implementation,
            facts.has_one_length,
        ),
    )
    for value in kernels.liger(
        *(recipe, size.family, mode, gpus, installed.no_liger), began and began.use_liger_kernel
    ):
        yield replace(
            plain,
            use_liger_kernel=value,
            fused_norms=kernels.fused_norms(recipe, size, mode, gpus, value, began),
        )


def compiled(facts: Facts, candidate: Candidate) -> Candidate | None:
    """The candidate with its layers compiled, and with the kernels that this leaves; None: the plan
    may not choose that."""
    recipe, family = facts.recipe, facts.model.size.family
    gpus = facts.machine.gpus if candidate.device == "cuda" else ()
    mode, no_compiler = candidate.launch_mode, facts.installed.no_compiler
    if (
        facts.history.began_with
        or facts.history.tuned
        or kernels.no_compile(recipe, family, mode, gpus, no_compiler)
    ):
        return None
    of_levers = replace(
        candidate.levers,
        torch_compile=True,
        use_liger_kernel=False,
        fused_norms=False,
        fused_adapters=False,
        attn_implementation=recipe.model.attn_implementation or "sdpa",
    )
    is_refused = any(
        row.refusal(of_levers, family) for row in levers.LEVERS if row.read(of_levers) != row.plain
    )
    return None if is_refused else replace(candidate, levers=of_levers)


def _check_checkpointing(recipe: Recipe, installed: Installed, on_gpu: bool) -> None:
    """Raises ConfigError for keywords of checkpointing that would do nothing."""
    kwargs = recipe.training.activation_checkpointing_kwargs
    options = kwargs.model_dump(exclude_defaults=True)
    is_off = levers.ROWS["every_n_layers"].requested(recipe) == 0
    needs_package = (kwargs.every_n_layers or 1) > 1 or kwargs.offload
    obstacle = kernels.first_met(
        (options and is_off, "activation_checkpointing is false; leave one out"),
        (
            kwargs.offload and not on_gpu,
            "on a CPU activations are in host RAM; leave offload out",
        ),
        (
            installed.no_every_n_layers and needs_package,
            f"{installed.no_every_n_layers}; leave every_n_layers and offload out",
        ),
    )
    if obstacle:
        raise ConfigError(
            f"training.activation_checkpointing_kwargs: {show(options)}, but {obstacle}"
        )


def _check_streaming(facts: Facts) -> None:
    """Raises ConfigError for layers that cannot be streamed."""
    num_asked, layers = facts.recipe.training.streamed_layers or 0, len(facts.frozen_layers)
    obstacle = kernels.first_met(
        (
            facts.recipe.lora is None,
            "without lora the weights are trained, or are in each checkpoint; add lora, or leave it"
            " out",
        ),
        (
            num_asked > layers > 0,
            f"the model has {layers} decoder layers; name at most these",
        ),
    )
    if num_asked and obstacle:
        raise ConfigError(f"training.streamed_layers: {num_asked}, but {obstacle}")


def _ways_to_start(
    recipe: Recipe, machine: Machine, wishes: Wishes, link: Link | None, on_gpu: bool
) -> Iterator[tuple[Mode, int, int]]:
    """(mode, number of ranks, number that the recipe's batch is meant for) of each candidate.

    Raises ConfigError for what cannot be, with flags that keep the effective batch.
    """
    launch, per_node = recipe.launch, len(machine.gpus) if on_gpu else 1
    asked = wishes.num_processes or launch.num_processes
    batch = recipe.training.samples_per_process * (launch.num_processes or asked or 1)
    if (
        on_gpu
        and asked is not None
        and asked > per_node * launch.nodes
        and wishes.num_machines == 1
    ):
        raise ConfigError(
            f"launch.num_processes {asked}, but there are {per_node * launch.nodes} GPU(s):"
            f" {machine.gpus_reason}{recipe.keeping(batch, asked, per_node * launch.nodes)}"
        )
    if wishes.num_processes and launch.num_processes not in (
        None,
        wishes.num_processes,
    ):
        raise ConfigError(
            f"launch.num_processes {launch.num_processes}, but {wishes.num_processes} rank(s)"
            " were started; leave the key out, or start as many"
            f"{recipe.keeping(batch, launch.num_processes, wishes.num_processes)}"
        )
    if wishes.mode and launch.mode not in ("auto", wishes.mode):
        raise ConfigError(
            f"launch.mode {launch.mode}, but the ranks were started as {wishes.mode}; make"
            " them the same"
        )
    mode = wishes.mode or launch.mode
    if mode == "auto":
        yield from _automatic(asked, machine, launch.nodes, on_gpu, wishes, link)
        return
    count = _num_ranks(recipe, mode, asked, per_node, batch, on_gpu)
    if LAUNCH_MODES[mode].backend == "nccl" and wishes.force_gloo:
        mode = "dual_gpu_gloo"
    yield mode, count, count


def _num_ranks(
    recipe: Recipe, mode: Mode, asked: int | None, per_node: int, batch: int, on_gpu: bool
) -> int:
    """The number of ranks of a mode that is asked for. Raises ConfigError, or ResourceError, where
    the mode cannot have it."""
    launch, row = recipe.launch, LAUNCH_MODES[mode]
    # On a CPU two ranks are the default: they show what sharding does
    least = launch.nodes if launch.nodes > 1 or on_gpu else 2
    count = asked or (1 if row.processes == "one" else max(per_node * launch.nodes, least))
    for key, number in (("nodes", launch.nodes), ("num_processes", count)):
        if row.processes == "one" and number > 1:
            raise ConfigError(
                f"launch.mode {mode} is one process, launch.{key} says {number}"
                f"{recipe.keeping(batch, count, 1) if key == 'num_processes' else ''}"
            )
    if row.processes == "several" and count == 1:
        if asked:
            raise ConfigError(
                f"launch.mode {mode} needs two processes or more, launch.num_processes says 1"
                f"{recipe.keeping(batch, 1, max(per_node * launch.nodes, least))}"
            )
        raise ResourceError(
            f"launch.mode {mode} needs two GPUs or more, there is {per_node}; use single_gpu"
        )
    return count


def _automatic(
    num_requested: int | None,
    machine: Machine,
    nodes: int,
    on_gpu: bool,
    wishes: Wishes,
    link: Link | None,
) -> Iterator[tuple[Mode, int, int]]:
    """Yield the modes that `launch.mode: auto` may choose, on all cards, then on fewer. Ranks that
    are running already fix their number and engine."""
    per_node = len(machine.gpus) if on_gpu else 1
    count = num_requested or per_node * nodes  # one rank a node on CPUs
    if not on_gpu:
        yield ("multi_cpu" if count > 1 else "cpu"), count, count
        return
    offloaded: list[Mode] = [mode for mode, row in LAUNCH_MODES.items() if row.offloads]
    several = _modes_of_several(wishes, link)
    if wishes.num_processes is not None:
        yield ("single_gpu" if count == 1 else several[0]), count, count
        return
    is_open = num_requested is None and nodes == 1
    for number in range(count, 0 if is_open else count - 1, -1):
        if count <= _MOST_OF_ANY_NUMBER or count % number == 0:
            for mode in several if number > 1 else ("single_gpu", *offloaded):
                yield mode, number, count


def _modes_of_several(wishes: Wishes, link: Link | None) -> list[Mode]:
    """Modes of several cards, those that offload last; the first is plain DDP."""
    if wishes.force_gloo:
        return ["dual_gpu_gloo"]
    if link is not None and link.backend != "nccl":
        return ["dual_gpu_nccl", "dual_gpu_gloo"]
    zero: dict[Mode, bool] = {
        mode: row.offloads for mode, row in LAUNCH_MODES.items() if row.engine == "deepspeed"
    }
    resident: list[Mode] = [mode for mode, offloads in zero.items() if not offloads]
    several: list[Mode] = ["dual_gpu_nccl", *resident, "fsdp2"]
    return [*several, *(mode for mode, offloads in zero.items() if offloads)]


def uneven(gpus: Sequence[Gpu]) -> bool:
    """True if ranks on all of these cards would be held to clearly less memory, or to another kind
    of card, than fewer ranks."""
    free = [gpu.free_bytes for gpu in gpus]
    kinds = {(gpu.name, gpu.architecture) for gpu in gpus}
    return len(kinds) > 1 or (len(free) > 1 and min(free) < CLEARLY_BELOW * max(free))


def without_fullest(gpus: Sequence[Gpu]) -> str:
    """The card to which ranks on all of these cards are held, and how to leave it out; "" for even
    cards."""
    if not uneven(gpus):
        return ""
    fullest = min(gpus, key=lambda gpu: gpu.free_bytes)
    variable = "HIP_VISIBLE_DEVICES" if fullest.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    others = ",".join(str(number) for number in sorted(g.index for g in gpus if g is not fullest))
    free = f"{size(fullest.free_bytes)} of {size(fullest.total_bytes)}"
    return (
        f"GPU {fullest.index} ({fullest.name}) has the least free memory, {free}, which holds for"
        f" every rank; {variable}={others} leaves it out"
    )


def _unavailable(candidate: Candidate, installed: Installed) -> str | None:
    """Return the reason why this machine's packages or the link test rule a candidate out, or
    None."""
    link = installed.link
    has_link = candidate.device == "cuda" and candidate.processes_per_machine > 1
    # a link that was not tested rules nothing out
    backend, said = (link.backend, link.reason) if link and has_link else (candidate.backend, "")
    obstacle = kernels.first_met(
        (
            candidate.launch_mode.engine == "deepspeed" and not installed.has_deepspeed,
            "the package deepspeed is not installed",
        ),
        (has_link and backend is None, f"{said}; `python -m launch doctor` says why"),
        (
            (candidate.backend, backend) == ("nccl", "gloo"),
            f"NCCL does not work between these GPUs ({said}); use dual_gpu_gloo",
        ),
    )
    return f"{candidate.mode}{CANNOT_RUN}{obstacle}" if obstacle else None


def splits(facts: Facts, candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with the recipe's own batch, and the same effective batch in smaller
    micro-batches (if any batch will do, in all), the largest first; before them, the one that was
    tuned."""
    requested = candidate.per_device_train_batch_size
    per_rank = requested * candidate.gradient_accumulation_steps
    eval_batch = facts.recipe.training.per_device_eval_batch_size
    if (tuned := facts.history.tuned) and _tunes(tuned, candidate):
        yield replace(
            candidate.with_levers(**{row.name: row.read(tuned.levers) for row in levers.TRIED}),
            per_device_train_batch_size=tuned.per_device_train_batch_size,
            gradient_accumulation_steps=tuned.gradient_accumulation_steps,
            per_device_eval_batch_size=eval_batch or _eval_batch(tuned.per_device_train_batch_size),
        )
    for micro_batch in range(per_rank if facts.wishes.free_batch else requested, 0, -1):
        if micro_batch == requested:
            yield candidate
        elif not (per_rank % micro_batch or facts.recipe.launch.exact_batch):
            yield replace(
                candidate,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=per_rank // micro_batch,
                per_device_eval_batch_size=eval_batch or _eval_batch(micro_batch),
            )


def smallest_split(facts: Facts, candidate: Candidate) -> Candidate:
    """The candidate with the smallest micro-batches that are allowed."""
    return list(splits(facts, candidate))[-1]


def sorted_splits(facts: Facts, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the same effective batch in micro-batches of rows of like length: of the recipe's own
    tokens, and of a half, a quarter and an eighth of them. Which rows are alike is known once they
    are tokenised."""
    recipe, rows = facts.recipe, facts.rows
    if rows.counts is None or recipe.data.packing or candidate.levers.flattens:
        return
    if recipe.data.batch_by_tokens is False or not rows.is_ragged:
        return
    requested = candidate.per_device_train_batch_size
    for times in (1, 2, 4, 8):
        steps = candidate.gradient_accumulation_steps * times
        is_split = requested % times == 0 and (times == 1 or not recipe.launch.exact_batch)
        if is_split and steps > 1:
            yield replace(
                candidate.with_levers(batch_by_tokens=True),
                per_device_train_batch_size=requested // times,
                gradient_accumulation_steps=steps,
            )


def _tunes(tuned: Candidate, candidate: Candidate) -> bool:
    """True if a tuning was of this mode, ranks and effective batch."""
    return all(
        getattr(tuned, name) == getattr(candidate, name)
        for name in ("mode", "num_processes", "effective_batch_size")
    )


def _way(candidate: Candidate) -> tuple[Any, ...]:
    """The split of a batch, and the levers that a plan tries."""
    return (
        candidate.per_device_train_batch_size,
        *(row.read(candidate.levers) for row in levers.TRIED),
    )


def preference(facts: Facts, candidate: Candidate, is_own: bool) -> int:
    """The order in which candidates are looked at: what was tuned; the recipe's own batch and
    levers (`is_own`), under mixed precision by full copies, which keep float32 weights and
    autocast, while DeepSpeed and FSDP2 compute everything in 16 bits; all others; those that the
    plan lets keep activations or weights of layers in host RAM."""
    recipe, tuned, is_whole = facts.recipe, facts.history.tuned, candidate.launch_mode.is_whole
    if tuned and _tunes(tuned, candidate) and _way(tuned) == _way(candidate):
        return 0
    requested, runs = levers.requested(recipe), candidate.levers
    # where layers may be streamed, a mode that offloads is no better before its seconds are known
    may_stream = facts.frozen_layers and recipe.training.streamed_layers is None
    if (
        (runs.activation_offloading and not requested.activation_offloading)
        or (runs.streamed_layers and not requested.streamed_layers)
        or (may_stream and candidate.launch_mode.offloads and recipe.launch.mode == "auto")
    ):
        return 4
    if facts.wishes.free_batch and facts.traces is not None:
        return 2 if is_whole else 3
    computes_alike = is_whole or not (
        recipe.training.bf16 or recipe.training.fp16 or candidate.launch_mode.offloads
    )
    return 1 if is_own and computes_alike else 2


def more_saving(facts: Facts, candidate: Candidate, missing_bytes: int) -> Iterator[Candidate]:
    """Yield the same with one lever at the next value that saves more memory, of levers that the
    recipe leaves open; with as many streamed layers more as make up for what is missing."""
    for row in levers.TRIED:
        if row.name == "streamed_layers":
            yield from _streaming(facts, candidate, missing_bytes)
            continue
        for value in _more_saving_values(facts, candidate, row)[:1]:
            yield candidate.with_levers(**{row.name: value})


def with_states_that_fit(
    facts: Facts, candidate: Candidate, missing_bytes: int
) -> Candidate | None:
    """The candidate with so many streamed layers that its states miss no longer this number of
    bytes; None: it cannot be."""
    every_layer = candidate.with_levers(every_n_layers=1)
    is_open = levers.ROWS["every_n_layers"].requested(facts.recipe) is None
    return next(_streaming(facts, every_layer if is_open else candidate, missing_bytes), None)


def _streaming(facts: Facts, candidate: Candidate, missing_bytes: int) -> Iterator[Candidate]:
    """Yield the candidate with the fewest streamed layers that save so many bytes more on a
    device, or with all, if even these do not."""
    more = [
        candidate.with_levers(streamed_layers=count)
        for count in _more_saving_values(facts, candidate, levers.ROWS["streamed_layers"])
    ]
    wanted_bytes = facts.streamed(candidate).saved_bytes + missing_bytes
    enough = (each for each in more if facts.streamed(each).saved_bytes >= wanted_bytes)
    if more:
        yield next(enough, more[-1])


def most_frugal(facts: Facts, candidate: Candidate) -> Candidate:
    """The same with every open lever at the value that saves most."""
    for row in levers.TRIED:
        if values := _more_saving_values(facts, candidate, row):
            candidate = candidate.with_levers(**{row.name: max(values, key=row.saved)})
    return candidate


def _more_saving_values(facts: Facts, candidate: Candidate, row: Lever) -> list[Any]:
    """Values of a lever that save more than the candidate's, in the order in which they are
    tried."""
    if row.requested(facts.recipe) is not None:
        return []
    rows, family = candidate.per_device_train_batch_size, facts.model.size.family
    around = levers.Around(
        candidate.device,
        rows,
        rows * max(facts.question(candidate).lengths),
        facts.recipe.launch.exact_batch,
        facts.installed.no_every_n_layers,
        len(facts.frozen_layers),
    )
    saved = row.saved(row.read(candidate.levers))
    return [
        value
        for value in (row.tried_around(around) if row.tried_around else row.tried)
        if row.saved(value) > saved
        and row.tries(value, candidate.levers, around)
        and row.mode_refusal(candidate.launch_mode, value) is None
        and row.refusal(replace(candidate.levers, **{row.name: value}), family) is None
    ]


def _eval_batch(micro_batch: int) -> int:
    return max(micro_batch, min(3 * micro_batch, _MAX_EVAL_BATCH))


def asked_precision(recipe: Recipe) -> Precision:
    """The precision that the recipe asks for; a card without bf16 computes in fp16, which takes the
    same bytes."""
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"


def _precision(recipe: Recipe, gpus: Sequence[Gpu]) -> Precision:
    training = recipe.training
    if training.fp16 and not gpus:
        raise ConfigError(
            "training.fp16: true has no effect on a CPU (it would train in fp32); use bf16 or"
            " neither"
        )
    without_bf16 = architectures.without_bf16(gpus) if training.bf16 else ""
    precision: Precision = "fp16" if without_bf16 else asked_precision(recipe)
    is_bfloat16 = recipe.model.dtype == "bfloat16" and recipe.trains_model_dtype
    if precision == "fp16" and is_bfloat16:
        card = f" ({without_bf16})" if without_bf16 else ""
        raise ConfigError(
            f"model.dtype: bfloat16 beside fp16 autocast{card}, whose loss scaler takes no bfloat16"
            " gradients; leave model.dtype out, or use bf16 on a card that has it"
        )
    return precision


def workers(facts: Facts, num_processes: int, on_gpu: bool) -> int:
    """Number of data workers of a rank: the recipe's, or as many as are of use, at most
    MOST_WORKERS, and none without a GPU. `num_processes`: of a machine."""
    if facts.recipe.training.dataloader_num_workers is not None:
        return facts.recipe.training.dataloader_num_workers
    return min(MOST_WORKERS, useful_workers(facts, num_processes)) if on_gpu else 0


def useful_workers(facts: Facts, num_processes: int) -> int:
    """One data worker for each other CPU of a rank's share, and no more than it has batches."""
    share = max(0, facts.machine.cpu_count // num_processes - 1)
    if not facts.rows.count:
        return share
    batch = facts.recipe.training.per_device_train_batch_size * facts.recipe.launch.nodes
    return min(share, -(-facts.rows.count // (batch * num_processes)))
