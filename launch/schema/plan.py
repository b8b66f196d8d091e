"""The nouns. Everything may import this module; it imports nothing of ours and touches no file,
clock or process."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launch.schema.machine import Device, Link
from launch.schema.recipe import AttnImplementation, Mode, Precision

Engine = Literal["plain", "ddp", "deepspeed", "fsdp2"]
MULTIPLE: dict[Device, int] = {"cpu": 1, "cuda": 8}  # to which the collator pads a batch's length


# ---- the plan: what will run, and why
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSize:
    """A model's Hugging Face config and what counting its parameters gives (no weights, no
    torch)."""

    name: str
    config: Mapping[str, Any]  # the keys of config.json, model_type among them
    parameters: int
    trainable_parameters: int
    lora_parameters: int = 0  # part of trainable_parameters

    @property
    def is_encoder_decoder(self) -> bool:
        return self.config["model_type"] == "t5"


@dataclass(frozen=True)
class DataFormat:
    """Which columns of the file make a sample."""

    kind: Literal["prompt_response", "messages", "text", "oasst"]
    # role -> column name; roles: prompt, context, response, messages, text, role
    columns: Mapping[str, str]
    file_type: Literal["parquet", "jsonl", "json", "text", "arrow", "webdataset"]
    reason: str
    ignored: tuple[str, ...] = ()  # data.ignore_columns
    notes: tuple[str, ...] = ()  # on the columns that are not read, for the plan


@dataclass(frozen=True)
class Strategy:
    """One way to run the recipe. Batch sizes are samples."""

    mode: Mode
    device: Device
    num_processes: int
    backend: Literal["nccl", "gloo"] | None  # None: one process, no process group
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    per_device_eval_batch_size: int
    mixed_precision: Precision
    activation_checkpointing: bool
    dataloader_num_workers: int
    num_machines: int = 1
    # logits of so many parts of the positions are made one after another
    num_output_chunks: int = 1
    torch_compile: bool = False
    attn_implementation: AttnImplementation = "sdpa"
    tf32: bool = False  # products of float32 are rounded to 10 bits of mantissa
    use_liger_kernel: bool = False

    @property
    def effective_batch_size(self) -> int:
        return (
            self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes
        )

    @property
    def processes_per_machine(self) -> int:
        return self.num_processes // self.num_machines

    @property
    def engine(self) -> Engine:
        """Who holds the model's states: each rank all of them (plain, ddp), or all ranks
        together."""
        if self.mode == "fsdp2":
            return "fsdp2"
        if self.mode.startswith("deepspeed"):
            return "deepspeed"
        return "ddp" if self.num_processes > 1 else "plain"

    @property
    def is_whole(self) -> bool:
        """Each rank holds a whole copy of the model's states."""
        return self.engine in ("plain", "ddp")

    @property
    def zero_stage(self) -> int:
        """1: optimizer states are shared out; 2: and gradients; 3: and weights. 0: not
        DeepSpeed."""
        return int(self.mode.removeprefix("deepspeed_zero")[0]) if self.engine == "deepspeed" else 0

    @property
    def offloads(self) -> bool:
        """Optimizer states stand in host RAM and are updated there; under ZeRO-3 the weights' home
        is there too."""
        return self.mode.endswith("_offload")


# When a block of a traced step is born: before the step (the optimizer's states apart), in it, or
# in the evaluation after it.
Born = Literal["start", "state", "step", "evaluation"]


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most: where in the run, at which operator, and what for."""

    section: str  # load, forward, backward, optimizer, evaluation
    op: str
    # bytes by kind: weights, gradients, optimizer, activations, logits, temporaries...
    parts: Mapping[str, int]

    @property
    def allocated_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes per rank on its device, and of all ranks of a machine on its host."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    offloaded_bytes: int = 0  # of one rank's states, in host RAM instead
    peak: Peak | None = None  # None: the step could not be traced, only the states are known
    fragmentation_bytes: int = 0  # what the allocator reserves above what is allocated
    outside_bytes: int = 0  # outside the allocator: context, communicators
    margin_bytes: int = 0  # by which past predictions were exceeded
    # of the job on this machine, by cause; {}: not predicted
    host: Mapping[str, int] = field(default_factory=dict)
    host_phase: str = ""
    # peaks of a training step, without an evaluation; 0: not predicted
    step_allocated_bytes: int = 0
    step_reserved_bytes: int = 0

    @property
    def model_state_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> int:
        """The peak; where it is not known, the states, which are less."""
        return self.peak.allocated_bytes if self.peak else self.model_state_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes + self.fragmentation_bytes

    @property
    def device_bytes(self) -> int:
        """All of it, with the margin."""
        return self.reserved_bytes + self.outside_bytes + self.margin_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class Change:
    """A value that does not run as it was asked for, and why: printed before anything is loaded."""

    key: str
    requested: str
    effective: str
    reason: str


@dataclass(frozen=True)
class Switch:
    """What decides which kernels a step runs: how it stands, and why so."""

    name: str
    runs: str
    why: str


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a run meet, and which of them this is."""

    machine_rank: int
    main_process_ip: str
    main_process_port: int
    network_interface: str | None
    join_timeout_s: int


@dataclass(frozen=True)
class Padding:
    """What an epoch's tokenised rows are, and how much a step computes besides them; shares are of
    all it computes."""

    order: Literal["random", "by_length", "packed"]
    share: float
    at_random: float  # were rows to come at random, none packed
    by_length: float  # were they grouped
    samples: int  # what a batch counts: rows, or packed sequences
    rows: int
    tokens: int
    by_tokens: float | None = None  # were a step's rows cut by tokens; None: an older version's
    # of an optimizer step on average, where its rows are cut by tokens
    micro_steps: float | None = None
    in_quarters: float | None = None  # were they cut into micro-batches of a quarter's tokens


@dataclass(frozen=True)
class Plan:
    """What will run."""

    recipe_name: str
    strategy: Strategy
    shape: ModelSize
    data_format: DataFormat
    estimate: MemoryEstimate
    budget_bytes: int  # per rank on the device
    rows: int | None = None  # of the training file; None: too large to count before the start
    lora_targets: tuple[str, ...] = ()  # module names that get LoRA
    why: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    changes: tuple[Change, ...] = ()
    rejected: tuple[str, ...] = ()
    table: tuple[str, ...] = ()  # the candidates that were compared, as lines
    step_s: float | None = None  # predicted seconds of an optimizer step
    # tokens of the longest source and target that was planned for
    lengths: tuple[int, int] = (0, 0)
    rendezvous: Rendezvous | None = None  # None: one machine
    link: Link | None = None  # between the ranks; None: not tested
    packing: bool = False  # what a batch counts are packed sequences
    by_tokens: bool = False  # a step's rows are cut by tokens: data.batch_by_tokens
    padding: Padding | None = None  # None: the rows have not been tokenised yet
    # of the weights that an adapter is trained for: no checkpoint holds them
    base_fingerprint: str | None = None
    allocator_fraction: float = 1.0  # of a card's free memory, all that a rank's allocator may take

    @property
    def samples(self) -> int | None:
        """What an epoch's batches are cut from: rows, or packed sequences; None: not known yet."""
        if self.packing:
            return self.padding.samples if self.padding else None
        return self.rows

    @property
    def micro_batch_tokens(self) -> tuple[int, int]:
        """Padded tokens of source and of target that a micro-batch of the longest rows has."""
        source, target = self.lengths
        return (
            self.strategy.per_device_train_batch_size * source,
            self.strategy.per_device_train_batch_size * target,
        )

    @property
    def checkpoint_bytes(self) -> int:
        """About what a checkpoint takes on the disk: the weights that are trained, or all of them,
        and the states."""
        strategy, states, shape = self.strategy, self.estimate, self.shape
        ranks = strategy.num_processes if strategy.engine in ("deepspeed", "fsdp2") else 1
        optimizer_bytes = states.optimizer_bytes * ranks
        if strategy.offloads:  # all of ZeRO's are float32: the weights and, as a rule, two moments
            optimizer_bytes = 3 * 4 * shape.trainable_parameters
        if shape.lora_parameters:
            return 4 * shape.lora_parameters + optimizer_bytes
        if strategy.engine == "deepspeed":  # whole in rank 0's file, or every rank's part of them
            return (
                4 if strategy.mixed_precision == "no" else 2
            ) * shape.parameters + optimizer_bytes
        return states.weights_bytes * ranks + optimizer_bytes


@dataclass(frozen=True)
class Command:
    """A child process: argv and the variables it adds to the environment. str() can be pasted into
    a shell."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items())]
        return " ".join(
            [*(["env", *assignments] if assignments else []), *map(shlex.quote, self.argv)]
        )
