"""Host RAM of a whole job on one machine, by cause and phase: launcher, agent, ranks, data workers.
Pure.

What is summed is what base.processes.JobMemory reads: pages of a process's own and of shared
memory, and those of libraries once. Pages of other mapped files, which the kernel may drop, are no
need. "Model" is what the device's allocator has handed out; what glibc keeps of
freed blocks is a line of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launch.data.files import shards
from launch.predict.memory import malloc, onednn, pinned_memory
from launch.predict.memory.stored_weights import StoredWeights
from launch.probe import packages
from launch.probe.import_memory import Imports
from launch.schema.data_section import DataSection
from launch.schema.machine import MIB
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import MemoryEstimate, ModelSize, Strategy
from launch.schema.recipe import Recipe
from launch.schema.result import CHECK_BYTES, MAX_SHARD_BYTES, MAX_SMALL_SHARD_BYTES

# The rest of this block was measured beside the imports, on runs whose model takes next to nothing.
_STARTED_BYTES = 30 * MIB  # tokenizer, Trainer, event files, a rank's first step
_OPTIONAL_BYTES = {"peft": 11 * MIB, "bitsandbytes": 42 * MIB}  # the imports of packages
_STARTED_MAPPED_BYTES = 12 * MIB  # code pages that the run touches and the imports have not
_GROUP_BYTES = 5 * MIB  # Gloo's process group and its buffers, DDP's or DeepSpeed's own objects
_WORKER_BYTES = 16 * MIB  # pages that a forked data worker writes to
# its import: in each rank, and in accelerate launch, which reads its configuration
_DEEPSPEED_BYTES = 20 * MIB
_DEEPSPEED_ENGINE_BYTES = 20 * MIB  # objects of a rank's engine that are no tensors
_LAUNCHED_BYTES = 7 * MIB  # recipe, plan and screen

_TRAINING_PHASES = "step", "first_step", "evaluation", "save"
_ORDER_BYTES = 8  # a row in a rank: its sample number and its place in the permutation, int32 each
# A row while rows are grouped: source and target, int32 each, as columns and as one table
_LENGTHS_BYTES = 16
_PREPARE_SAMPLES = 1000  # tokenised at once (training/data/encode.py)
_PREPARE_TOKEN_BYTES = 200  # a token there, as text, encoding and Python lists
_PACKING_BYTES = (
    96 * MIB
)  # a window of rows and the sequences made of it (training/data/packing.py)
# Peak bytes of an element that is quantised on a CPU: bitsandbytes 0.50, its copies in float32
QUANTISING_BYTES = 14.2
STAGING_BYTES = MIB * 102  # buffer through which a rank's weights go to a card from unpinned memory
# DDP sends weights in buckets of this size, two at a time (torch reducer.cpp)
BROADCAST_BYTES = 250 * MIB
BUCKET_BYTES = 25 * MIB  # gradients that DDP reduces at once, from the second step on


@dataclass(frozen=True)
class HostJob:
    """The input of the prediction; bytes are those of one rank unless they say otherwise."""

    recipe: Recipe
    strategy: Strategy
    model: ModelSize
    states: MemoryEstimate  # result of sharding.per_rank
    embedding_bytes: int  # the input embedding in the weights' type
    # gradients that DeepSpeed reduces, in copies that Gloo's threads keep
    copied_by_gloo_bytes: int = 0
    # phase -> on a CPU, the highest count of its allocator, and what malloc keeps beyond it
    tensor_bytes: Mapping[str, int] = field(default_factory=dict)
    holes_bytes: Mapping[str, int] = field(default_factory=dict)
    offloaded_activations: Sequence[int] = ()  # bytes of each tensor of a micro-batch
    streamed: Sequence[int] = ()  # bytes of each streamed layer's weights, which the ranks share
    trained_elements: Sequence[int] = ()  # elements of each trained tensor
    kernels: int = onednn.KERNELS  # number that a CPU compiles for products in bf16
    rows: int | None = None  # rows of the training file; None: not counted
    stored: StoredWeights | None = None  # None: the model begins with random weights
    quantised_elements: int = 0  # elements of the largest matrix that gets 4 bits
    unquantised_elements: int = 0  # of all weights that do not
    counts_mappings: bool = False  # pages of mapped files count against the machine's limit

    @property
    def ranks(self) -> int:
        return self.strategy.processes_per_machine

    @property
    def built_bytes(self) -> int:
        """Weights as the model is built, whole, on the host of each rank."""
        return self.model.parameters * DTYPE_BYTES[self.recipe.model.dtype] + self.model.lora_bytes

    def pinned(self, sizes: Iterable[int]) -> int:
        """Bytes that torch takes for pinned blocks of these sizes."""
        max_kept = pinned_memory.max_kept_bytes(self.strategy)
        return sum(pinned_memory.block_bytes(size, max_kept) for size in sizes)

    def offloaded(self, sizes: Sequence[int]) -> int:
        """Bytes of blocks of these sizes, to which a step offloads: pinned ones, or plain."""
        return self.pinned(sizes) if self.strategy.pin_memory else sum(sizes)

    @property
    def untied_bytes(self) -> int:
        """The output embedding, which exists for a moment before it is tied to the input's; not in
        a stored model, but, in float32, if LoRA copies its embedding."""
        if copied := self.model.tied_copy_bytes // DTYPE_BYTES[self.recipe.model.dtype]:
            return copied * DTYPE_BYTES["float32"]
        return self.embedding_bytes if self.model.family.ties_head and self.stored is None else 0


def mapped_weights_bytes(
    recipe: Recipe,
    strategy: Strategy,
    model: ModelSize,
    stored: StoredWeights | None,
    streamed_bytes: int = 0,
) -> int:
    """Frozen weights of a local folder on CPUs: pages of its files, which all ranks share and read
    in each step. Quantised, converted or streamed, they are a rank's."""
    dtype = recipe.model.dtype
    on_cpu = strategy.device == "cpu" and strategy.launch_mode.engine != "deepspeed"
    if not on_cpu or stored is None or recipe.quantization or stored.converted_bytes(dtype):
        return 0
    frozen = model.parameters - (model.trainable_parameters - model.lora_parameters)
    return max(frozen * DTYPE_BYTES[dtype] - streamed_bytes, 0)


def estimate(job: HostJob, import_memory: Imports) -> dict[str, dict[str, int]]:
    """Bytes of all processes of the job on this machine, by cause, of the phases of a run in their
    order. On GPUs the model is on the host only while it is built and saved."""
    training_bytes = {
        **_processes(job, import_memory),
        **_data(job),
        **_offloaded(job),
        "bf16 kernels": job.ranks
        * onednn.kept_bytes(job.strategy, job.recipe.model.dtype, job.kernels),
        "offloaded activations": job.ranks * job.offloaded(job.offloaded_activations),
        "streamed weights": sum(job.streamed),
        "pinned copies of Gloo": job.ranks * job.pinned(_copied_by_gloo(job)),
    }
    data = job.recipe.data
    if data.streaming:
        training_bytes["tokenising"] = shards.STREAM_PROCESSES * _tokenising_bytes(
            data, import_memory
        )
    phases = {  # the first of equal peaks gives the name
        "prepare": _preparing(job, import_memory),
        "load": {**_processes(job, import_memory), **_loading(job)},
        **{name: training_bytes | _on_host(job, name) for name in _TRAINING_PHASES},
    }
    phases["save"] |= _saving(job)
    if not job.recipe.data.holds_out:
        del phases["evaluation"]
    return {
        name: {cause: size for cause, size in parts.items() if size}
        for name, parts in phases.items()
    }


def fullest(by_phase: Mapping[str, Mapping[str, int]]) -> str:
    """The phase that takes most; of several the first."""
    return max(by_phase, key=lambda name: sum(by_phase[name].values()))


def _processes(job: HostJob, import_memory: Imports) -> dict[str, int]:
    strategy = job.strategy
    is_deepspeed = strategy.launch_mode.engine == "deepspeed"
    deepspeed, engine = (_DEEPSPEED_BYTES, _DEEPSPEED_ENGINE_BYTES) if is_deepspeed else (0, 0)
    group = _GROUP_BYTES if strategy.backend is not None else 0
    several = deepspeed + engine + group + job.copied_by_gloo_bytes
    left_out = packages.unused(job.recipe, strategy)
    optional = sum(size for name, size in _OPTIONAL_BYTES.items() if name not in left_out)
    return {
        "launcher": import_memory.launcher_bytes + _LAUNCHED_BYTES,
        "agent": import_memory.agent_bytes + deepspeed,
        "ranks' imports": job.ranks
        * (import_memory.rank_bytes + _STARTED_BYTES + optional + several),
        "libraries": import_memory.mapped_bytes + _STARTED_MAPPED_BYTES,
    }


def tokenising_processes(
    data: DataSection, import_memory: Imports, cpu_count: int, budget_bytes: int
) -> int:
    """The number of processes that may tokenise at once: one for each CPU, as far as the host's RAM
    allows."""
    reserved_bytes = (
        import_memory.launcher_bytes
        + _LAUNCHED_BYTES
        + import_memory.prepare_bytes
        + import_memory.mapped_bytes
    )
    return max(
        min(cpu_count, (budget_bytes - reserved_bytes) // _tokenising_bytes(data, import_memory)), 1
    )


def _tokenising_bytes(data: DataSection, import_memory: Imports) -> int:
    return (
        import_memory.prepare_bytes
        + _PREPARE_SAMPLES * data.max_length * _PREPARE_TOKEN_BYTES
        + (_PACKING_BYTES if data.packing else 0)
    )


def _preparing(job: HostJob, import_memory: Imports) -> dict[str, int]:
    """Tokenising, in a child that ends before the ranks start; with room for more of them, corpora
    have more."""
    return {
        "launcher": import_memory.launcher_bytes + _LAUNCHED_BYTES,
        "tokenising": _tokenising_bytes(job.recipe.data, import_memory),
        "libraries": import_memory.mapped_bytes,
    }


def _loading(job: HostJob) -> dict[str, int]:
    """Each rank builds the whole model on its host, then DDP on CPUs sends rank 0's to the others.

    Weights of a local folder are mapped: the host has a copy of those that are converted, grow or
    are quantised there, and the largest tensor passes through the page cache."""
    strategy, stored, dtype = job.strategy, job.stored, job.recipe.model.dtype
    moved = max(job.streamed, default=0)  # a layer is copied before its weights are freed
    sent = 0
    if strategy.launch_mode.engine == "ddp" and strategy.device == "cpu":
        apart = bool(job.streamed) or (stored is not None and strategy.keeps_frozen_apart)
        trained_bytes = job.model.trainable_parameters * DTYPE_BYTES[dtype]
        sent = min(trained_bytes if apart else job.built_bytes, 2 * BROADCAST_BYTES)
    if stored is None:
        return {
            "weights": job.ranks * job.built_bytes,
            "while building": job.ranks * max(job.untied_bytes, sent, moved),
        }
    on_card, is_quantised = strategy.device == "cuda", job.recipe.quantization is not None
    grown, copies = (0, 0) if on_card and is_quantised else stored.growing_bytes(dtype)
    if not is_quantised:
        built = stored.converted_bytes(dtype)
        if strategy.launch_mode.engine == "deepspeed" and strategy.mixed_precision != "no":
            # cast before they go to the device (deepspeed 0.19.8, _cast_module_mixed_precision)
            cast = 0 if strategy.launch_mode.shards_parameters else 2 * job.model.parameters
            built = max(built, cast)
        built, passing = built + job.model.lora_bytes, job.untied_bytes
    elif on_card:  # tensor by tensor
        built, passing = 0, stored.largest_converted_bytes(dtype)
        if strategy.launch_mode.engine == "fsdp2":  # divides the others on the host
            is_mapped = not stored.converted_bytes(dtype)
            built = 0 if is_mapped else job.unquantised_elements * DTYPE_BYTES[dtype]
            built += job.model.lora_bytes
            grown, copies = stored.growing_bytes(dtype)
    else:
        built, passing = job.states.weights_bytes, int(QUANTISING_BYTES * job.quantised_elements)
    staging = STAGING_BYTES if on_card else 0
    return {
        "weights": job.ranks * (built + grown) + max(sum(job.streamed) - built - grown, 0),
        "weights' files": stored.total_bytes if job.counts_mappings else stored.largest_bytes,
        "while building": job.ranks * (max(passing, moved, sent, copies) + staging),
    }


def _on_host(job: HostJob, phase: str) -> dict[str, int]:
    """Memory of a model in ranks on CPUs; frozen weights that are mapped count once."""
    if job.strategy.device == "cuda":
        return {}
    mapped = mapped_weights_bytes(
        job.recipe, job.strategy, job.model, job.stored, sum(job.streamed)
    )
    tensor_bytes = job.tensor_bytes.get(
        phase, job.states.weights_bytes + job.states.optimizer_bytes
    )
    return {
        "model": job.ranks * max(tensor_bytes - mapped, 0),
        "freed and kept by malloc": job.ranks * job.holes_bytes.get(phase, 0),
        "weights' files": mapped,
    }


def _data(job: HostJob) -> dict[str, int]:
    strategy, data = job.strategy, job.recipe.data
    rows = min(job.rows or 0, data.max_train_samples or job.rows or 0)
    batch = strategy.per_device_train_batch_size * data.max_length * _columns(job) * 8
    of_lengths = _LENGTHS_BYTES if data.group_by_length or strategy.levers.batch_by_tokens else 0
    return {
        "order of samples": job.ranks * rows * (_ORDER_BYTES + of_lengths),
        "data workers": (
            job.ranks * (strategy.dataloader_num_workers * _WORKER_BYTES + _waiting(job) * batch)
        ),
        "pinned batches": job.ranks * _pinned_batches(job),
    }


def _columns(job: HostJob) -> int:
    """The int64 tensors of a batch (training/data/batches.py)."""
    return 4 if job.model.is_encoder_decoder else 3


def _waiting(job: HostJob) -> int:
    """Batches that the data workers have made ahead."""
    ahead = job.recipe.training.extras.get("dataloader_prefetch_factor") or 2  # DataLoader's own
    return ahead * job.strategy.dataloader_num_workers


def _pinned_batches(job: HostJob) -> int:
    """Page-locked bytes of a rank's batches: those that wait, one that is copied, and those of an
    optimizer step; of an evaluation two. The cache of pinned memory keeps all of them."""
    strategy, recipe = job.strategy, job.recipe
    if strategy.device != "cuda" or not recipe.training.extras.get("dataloader_pin_memory", True):
        return 0
    row_bytes = recipe.data.max_length * 8
    batches = _waiting(job) + 1 + strategy.gradient_accumulation_steps
    size = batches * job.pinned([strategy.per_device_train_batch_size * row_bytes])
    if recipe.data.holds_out:
        size += 2 * job.pinned([strategy.per_device_eval_batch_size * row_bytes])
    return _columns(job) * size


def _offloaded(job: HostJob) -> dict[str, int]:
    """States that DeepSpeed keeps on the host. On GPUs the slices of weights and gradients are
    pinned, and buffers beside them; Adam's states are not.

    Source: deepspeed 0.19.8 stage_1_and_2.py, stage3.py and partition_parameters.py (pin_memory),
    torch CachingHostAllocator (powers of two, which it keeps). On the CUDA build without a card the
    driver was asked for these bytes (benchmarks/results/cuda_build_memory.md).
    """
    offloaded = job.states.offloaded_bytes
    if not offloaded or job.strategy.device == "cpu":
        return {"offloaded states": job.ranks * offloaded}
    states, buffers = _pinned_states(job)
    return {
        "offloaded states": job.ranks * offloaded,
        "rounding of pinned memory": job.ranks * (job.offloaded(states) - sum(states)),
        "offloading buffers": job.ranks * job.offloaded(buffers),
    }


def _pinned_states(job: HostJob) -> tuple[list[int], list[int]]:
    """Sizes of a rank's pinned slices, which are states, and of the pinned buffers beside them.

    ZeRO-2 pins weights and gradients in float32. It has a copy of the slice in the precision of the
    computation, the largest gradient, and over several micro-steps every gradient. ZeRO-3 pins
    gradients in float32, weights and gradients as they are computed with, and before that the part
    of each weight, also of an output layer that is tied later."""
    strategy, ranks = job.strategy, job.strategy.num_processes
    piece = math.ceil(job.model.trainable_parameters / ranks)
    element_bytes = DTYPE_BYTES["float32"] if strategy.mixed_precision == "no" else 2
    float32 = DTYPE_BYTES["float32"] * piece
    if strategy.launch_mode.shards_parameters:
        parts = [math.ceil(count / ranks) * element_bytes for count in job.trained_elements]
        head = parts[:1] if job.model.family.ties_head else []
        built = parts if job.stored is None else [*parts, *head]
        max_kept = pinned_memory.max_kept_bytes(strategy)
        if max_kept is not None:  # larger ones are given back
            built = [size for size in built if size <= max_kept]
        return [float32, element_bytes * piece, element_bytes * piece], built
    buffers = [element_bytes * piece, element_bytes * max(job.trained_elements, default=0)]
    if strategy.gradient_accumulation_steps > 1:
        buffers += [math.ceil(count / ranks) * element_bytes for count in job.trained_elements]
    return [float32, float32], buffers


def _copied_by_gloo(job: HostJob) -> list[int]:
    """Sizes of the pinned copies that Gloo makes of a card's tensors under DDP: of two buckets of
    weights, of all gradients in the first step, and of buckets of gradients from then on, in the
    reverse order of the weights. Source: torch 2.13 ProcessGroupGloo.cpp (pinnedLike),
    nn/parallel/distributed.py, reducer.cpp."""
    strategy, states = job.strategy, job.states
    if strategy.device == "cpu" or strategy.backend != "gloo":
        return []
    sent = [min(BROADCAST_BYTES, states.weights_bytes)]
    sent.append(min(BROADCAST_BYTES, states.weights_bytes - sent[0]))
    element_bytes = states.gradients_bytes / max(job.model.trainable_parameters, 1)
    buckets, filled = [], 0
    for count in reversed(job.trained_elements):
        filled += math.ceil(count * element_bytes)
        if filled >= BUCKET_BYTES:
            buckets.append(filled)
            filled = 0
    return [*sent, states.gradients_bytes, *buckets, filled]


def pinned_bytes(job: HostJob) -> int:
    """Page-locked bytes of a rank: batches, offloaded states and activations, Gloo's copies."""
    if job.strategy.device == "cpu":
        return 0
    size = _pinned_batches(job) + job.pinned(_copied_by_gloo(job))
    if job.strategy.pin_memory:
        size += sum(job.streamed)  # in their exact size, by training/levers/streaming.py
        states, buffers = _pinned_states(job) if job.states.offloaded_bytes else ([], [])
        size += job.pinned([*job.offloaded_activations, *states, *buffers])
    return size


def _saving(job: HostJob) -> dict[str, int]:
    """Copies on the host while a checkpoint or the model is written. Tensors that are there are
    written from there; a card's are copied one at a time into a checkpoint, and those of an
    exported file at once."""
    strategy, recipe, mode = job.strategy, job.recipe, job.strategy.launch_mode
    # rank 0 builds the model once more, and gathers weight by weight
    is_built = mode.shards_parameters and not (recipe.quantization and job.stored)
    built = job.built_bytes + job.untied_bytes if is_built else 0
    if strategy.device == "cpu":
        return {"model to export": built, "copy to check the export": _checking_bytes(job)}
    if is_built:
        return {"model to export": built}
    if recipe.lora is not None and job.stored is not None:
        return {"weights to write": job.model.lora_bytes + job.model.tied_copy_bytes}
    if mode.engine != "deepspeed":  # a checkpoint's weights are in one file, and rank 0's
        return {"weights to write": job.built_bytes}
    computed = {"bf16": "bfloat16", "fp16": "float16", "no": recipe.model.dtype}
    dtype = recipe.output_dtype(job.model.config)
    written = job.model.parameters * DTYPE_BYTES[dtype]
    # in another type the host has the model whole
    if dtype == computed[strategy.mixed_precision]:
        largest = max(job.trained_elements, default=0) * DTYPE_BYTES[dtype]
        file_bytes = MAX_SMALL_SHARD_BYTES if mode.offloads else MAX_SHARD_BYTES
        written = max(min(written, file_bytes), largest)
    if not mode.offloads:  # each rank's part of an optimizer state is one tensor
        part = math.ceil(job.model.trainable_parameters / strategy.num_processes)
        written = max(written, job.ranks * DTYPE_BYTES["float32"] * part)
    return {"weights to write": written}


def _checking_bytes(job: HostJob) -> int:
    """The copy of the exported model on a CPU with which it is compared (training/loop/
    export_check.py), beyond what is free by then: optimizer states, and room in the heap, which
    large tensors do not take. A copy above CHECK_BYTES is made only within the plan."""
    recipe, stored, dtype = job.recipe, job.stored, job.recipe.model.dtype
    if recipe.quantization is not None:
        copy_bytes = job.states.weights_bytes
    elif recipe.lora is not None and stored is not None:
        copy_bytes = stored.converted_bytes(dtype)
    else:  # mapped, unless it is written in another type
        is_same = recipe.output_dtype(job.model.config) == dtype
        copy_bytes = 0 if is_same else job.model.parameters * DTYPE_BYTES[dtype]
    if copy_bytes > CHECK_BYTES:
        return 0
    largest = stored.largest_converted_bytes(dtype) if copy_bytes and stored else 0
    free_bytes = job.states.optimizer_bytes + job.holes_bytes.get("save", 0)
    return max(copy_bytes - free_bytes, largest if largest >= malloc.MMAP_THRESHOLD_BYTES else 0)
