"""The plan and its parts, as frozen dataclasses. Every module may import this one. It touches no
file, clock or process."""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import model_validator

from launch.schema.levers import PLAIN, Levers, read_levers
from launch.schema.machine import Device, Link
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode
from launch.schema.phases import DevicePhases, HostPhases
from launch.schema.recipe import Recipe
from launch.schema.training_section import Precision

HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")  # the matrix of an output head
# The logits that a model's forward() returns: the output head's result, a tensor that is computed
# of it position by position, or another
HeadResult = Literal["unchanged", "by position", "other"]
# multiple to which the collator pads a batch's length
MULTIPLE: dict[Device, int] = {"cpu": 1, "cuda": 8}


# ---- the plan: what will run, and why
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardFacts:
    """Facts on a model's forward pass that decide what levers it can have, as the model that
    transformers builds shows them; the defaults are of a model that is not known."""

    head: HeadResult = "other"
    # each layer has an MLP, a module that makes a token's output of the token's input alone
    tiles_mlp: bool = False
    has_sdpa: bool = True
    # its attention computes a row of documents from their starts and positions alone
    flattens: bool = False
    has_rms_norms: bool = False  # its RMS norms compute as Llama's do
    attention_dropout: float = 0.0  # dropout in training, where the config does not name it


@dataclass(frozen=True)
class ModelFamily:
    """Kinds of a model's parameters: linear layers, tied matrices; and of its forward pass."""

    model_type: str = ""
    # last names of the linear layers, without the output head
    linear: tuple[str, ...] = ()
    # the names in `linear` that transformers would quantise; None: layers of one name differ
    quantizable: tuple[str, ...] | None = ()
    # name of a tied parameter -> the name that named_parameters() gives it
    tied: Mapping[str, str] = field(default_factory=dict)
    is_encoder_decoder: bool = False
    has_conv1d: bool = False  # matrices are (in, out)
    # keys of the config for the number of layers of each stack, encoder first; (): not known
    depth_keys: tuple[str, ...] = ()
    # every so many layers of a stack are alike; 0: layers differ, without such a period
    layer_period: int = 1
    forward: ForwardFacts = ForwardFacts()
    liger: tuple[str, ...] = ()  # liger-kernel's kernels for it, by keys of liger_kernel_config

    @property
    def ties_head(self) -> bool:
        """True if the config ties the output head to the embeddings."""
        return any(map(HEAD.search, self.tied))


@dataclass(frozen=True)
class ModelSize:
    """A model's Hugging Face config and what counting its parameters gives (no weights, no
    torch)."""

    name: str
    config: Mapping[str, Any]  # the keys of config.json, model_type among them
    parameters: int
    trainable_parameters: int
    lora_parameters: int = 0  # part of trainable_parameters
    lora_bytes: int = 0  # size of lora_parameters: copies of modules have model.dtype
    tied_copy_bytes: int = 0  # the copy of tied embeddings that PEFT writes for the head too
    tensors: int = 0  # number of parameters' tensors, LoRA's left out
    trained_tensors: int = 0
    family: ModelFamily = ModelFamily()

    @property
    def is_encoder_decoder(self) -> bool:
        return self.family.is_encoder_decoder


# "text": of lines
TextType = Literal["text", "paragraphs", "whole_text"]
FileType = Literal["parquet", "jsonl", "json", "csv", "tsv", "arrow", "webdataset", TextType]


@dataclass(frozen=True)
class DataFormat:
    """The columns of the file that make a sample."""

    kind: Literal["prompt_response", "messages", "text", "oasst"]
    # role -> column name; roles: prompt, context, response, messages, text, role
    columns: Mapping[str, str]
    file_type: FileType
    reason: str
    ignored: tuple[str, ...] = ()  # data.ignore_columns
    notes: tuple[str, ...] = ()  # lines of the plan on columns that are not read
    num_files: int = 1  # shards of the training data
    template: str = ""  # the chat template, and where it is from
    # formats of the sources, if data.train_file is a list; this format is then that of the held-out
    # file, or of the first source
    of_sources: "tuple[DataFormat, ...]" = ()

    def of_source(self, index: int) -> "DataFormat":
        return self.of_sources[index] if self.of_sources else self


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
    dataloader_num_workers: int
    num_machines: int = 1
    levers: Levers = PLAIN
    tf32: bool = False  # products of float32 are rounded to 10 bits of mantissa
    pin_memory: bool = True  # offloaded tensors are in page-locked memory

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_version(cls, values: Any) -> Any:
        return read_levers(values) if isinstance(values, Mapping) else values

    def with_levers(self, **values: Any) -> "Strategy":
        """The same with these values of levers."""
        return replace(self, levers=replace(self.levers, **values))

    @property
    def keeps_frozen_apart(self) -> bool:
        """True if ranks of DDP read frozen weights from the same files, so that rank 0 need not
        send them."""
        return (self.launch_mode.engine, self.device, self.num_machines) == ("ddp", "cpu", 1)

    @property
    def effective_batch_size(self) -> int:
        return (
            self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes
        )

    @property
    def processes_per_machine(self) -> int:
        return self.num_processes // self.num_machines

    @property
    def launch_mode(self) -> LaunchMode:
        return LAUNCH_MODES[self.mode]


# The time at which a block of a traced step is allocated: before the first step, as a trained
# weight, as a rank's float32 slice of them, as another weight or buffer, by the engine, or as an
# optimizer state; outside the device's allocator, as a paged state; at the first matrix product; in
# the step; in the evaluation after it, or there until a checkpoint is saved.
Born = Literal[
    "trained",
    "slice",
    "packed",
    "scales",
    "start",
    "engine",
    "state",
    "paged",
    "workspace",
    "step",
    "evaluation",
    "kept",
]
PAGED = "paged states"  # the kind of their blocks


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most memory: the part of the run, the operator, and the use
    of the bytes."""

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
    offloaded_bytes: int = 0  # states of one rank that are in host RAM instead
    peak: Peak | None = None  # None: the step could not be traced, only the states are known
    fragmentation_bytes: int = 0  # reserved by the allocator beyond the allocated bytes
    # it would reserve more, but gives cached blocks back where memory ends
    gives_cache_back: bool = False
    outside_bytes: int = 0  # outside the allocator: context, communicators
    outside_source: str = ""  # source of the context's bytes, as a line of the plan
    margin_bytes: int = 0  # excess of past peaks over their predictions
    # bytes of the job on this machine, by cause; {}: not predicted
    host: Mapping[str, int] = field(default_factory=dict)
    host_phase: str = ""
    pinned_bytes: int = 0  # page-locked host memory of one rank, part of `host`
    # peaks of a training step, without an evaluation; 0: not predicted
    step_allocated_bytes: int = 0
    step_reserved_bytes: int = 0

    @property
    def model_state_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> int:
        """The peak. If it is not known, the states, which are fewer bytes."""
        return self.peak.allocated_bytes if self.peak else self.model_state_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes + self.fragmentation_bytes

    @property
    def device_bytes(self) -> int:
        """The sum, with the margin."""
        return self.reserved_bytes + self.outside_bytes + self.margin_bytes

    @property
    def device_parts(self) -> Mapping[str, int]:
        """device_bytes by use."""
        states = {
            name: getattr(self, f"{name}_bytes") for name in ("weights", "gradients", "optimizer")
        }
        of_peak = self.peak.parts if self.peak else {"states": 0}
        if "states" in of_peak:  # all that is known of them
            of_peak = {**states, **of_peak, "states": 0}
        beside = {
            "reserved above it": self.fragmentation_bytes,
            "context and communicators": self.outside_bytes,
            "margin": self.margin_bytes,
        }
        return {name: size for name, size in {**of_peak, **beside}.items() if size}

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class Change:
    """A value that differs from the requested value, and why. It is printed before anything is
    loaded."""

    key: str
    requested: str
    effective: str
    reason: str


@dataclass(frozen=True)
class Switch:
    """A setting that decides which kernels a step runs: its state, and the reason for it."""

    name: str
    runs: str
    why: str


@dataclass(frozen=True)
class Compared:
    """A candidate that was compared: what it holds on its device at the peak, and why it lost or
    won."""

    name: str  # mode, ranks, batch, ways of saving memory
    device_parts: Mapping[str, int]  # bytes by use
    budget_bytes: int
    seconds_per_step: float | None  # None: its step was not traced
    verdict: str


@dataclass(frozen=True)
class SecondsCorrection:
    """The factor by which this machine's own runs correct predicted seconds; `least` and `most` are
    those of single runs over it."""

    factor: float = 1.0
    least: float = 1.0
    most: float = 1.0
    runs: int = 0
    of: str = ""  # description of the runs, in `reason`
    slowdown: float = 1.0  # the part of `factor` that is due to other programs on the cores

    @property
    def reason(self) -> str:
        median = self.factor / self.slowdown
        return (
            f"corrected x {median:.3g}, the median of {self.runs} runs {self.of} on this"
            f" machine, which took {median * self.least:.3g} to"
            f" {median * self.most:.3g} times the seconds that its rates give"
        )


NOT_CORRECTED = SecondsCorrection()


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the nodes of a run meet, and the number of this node."""

    machine_rank: int
    main_process_ip: str
    main_process_port: int
    network_interface: str | None
    join_timeout_s: int


@dataclass(frozen=True)
class Padding:
    """The tokenised rows of an epoch, and the padding that a step computes besides them. Shares are
    parts of all computed tokens."""

    order: Literal["random", "by_length", "packed"]
    share: float
    at_random: float  # share if rows came at random and none were packed
    by_length: float  # share if rows were grouped by length
    samples: int  # the units that a batch counts: rows, or packed sequences
    rows: int
    tokens: int
    # micro-batches of an optimizer step on average, if they are limited by tokens
    micro_steps: float | None = None


@dataclass(frozen=True)
class SourceRows:
    """A source of data.train_file and its rows."""

    path: str
    weight: float
    rows: int  # rows trained in an epoch


@dataclass(frozen=True)
class Plan:
    """The training that will run: its strategy, its predictions and the reasons."""

    recipe_name: str
    strategy: Strategy
    shape: ModelSize
    data_format: DataFormat
    estimate: MemoryEstimate
    budget_bytes: int  # per rank on the device
    rows: int | None = None  # trained rows; None: too large to count before the start
    sources: tuple[SourceRows, ...] = ()  # rows of each source, if data.train_file is a list
    rows_held_out: int | None = None  # rows that data.validation_size takes from the training file
    # rows of the training file without a target, and bad rows; None: not tokenised yet
    rows_left_out: int | None = None
    target_share: float | None = None  # share of the trained rows' tokens that are targets
    lora_targets: tuple[str, ...] = ()  # module names that get LoRA
    why: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    changes: tuple[Change, ...] = ()
    rejected: tuple[str, ...] = ()
    table: tuple[str, ...] = ()  # the candidates that were compared, as lines
    compared: tuple[Compared, ...] = ()  # the same with the uses of their bytes
    # savings and costs of each compared lever
    savings: tuple[str, ...] = ()
    # memory of each part of the run: per rank on its device, and of the job on its machine
    phases: DevicePhases = field(default_factory=DevicePhases)
    host: HostPhases = field(default_factory=HostPhases)
    seconds_per_step: float | None = None  # predicted, of an optimizer step
    # predicted, of a pass over the held-out rows; None: there is none, or they are not counted
    seconds_per_evaluation: float | None = None
    seconds_correction: SecondsCorrection = NOT_CORRECTED  # correction that they contain
    waits_share: float = 0.0  # share of these seconds in which the device waits for its host
    # tokens of the longest source and target that was planned for
    lengths: tuple[int, int] = (0, 0)
    rows_of: int | None = None  # tokens of every row, if asked for rows of one length (--rows-of)
    rendezvous: Rendezvous | None = None  # None: one machine
    link: Link | None = None  # link between the ranks; None: not tested
    packing: bool = False  # a batch counts packed sequences
    few_shapes: bool = False  # micro-batches have, so that cuDNN's attention may come first
    padding: Padding | None = None  # None: the rows have not been tokenised yet
    # fingerprint of the frozen weights under an adapter, which no checkpoint contains
    base_fingerprint: str | None = None
    # the share of a card's free memory that a rank's allocator may take
    allocator_fraction: float = 1.0
    # bytes that a rank's allocator may take by launch.vram_limit_gib; None: no limit
    allocator_limit_bytes: int | None = None
    allocator_settings: str = ""  # PYTORCH_ALLOC_CONF of the ranks, unless the user sets it

    @property
    def num_samples(self) -> int | None:
        """The number of rows or packed sequences that an epoch's batches divide. None: not known
        yet."""
        if self.padding:  # samples without the rows that are left out
            return self.padding.samples
        return None if self.packing else self.rows

    def counts_bad_rows(self, recipe: Recipe) -> bool:
        """True if bad rows may be among `rows`: they are known once the rows are tokenised."""
        return bool(recipe.data.max_bad_rows and self.rows and self.rows_left_out is None)

    def total_steps(self, recipe: Recipe) -> int | None:
        """Optimizer steps of the whole training; None while its samples are not counted."""
        if recipe.training.max_steps > 0:
            return recipe.training.max_steps
        if self.num_samples is None:
            return None
        epoch_steps = -(-self.num_samples // self.strategy.effective_batch_size)
        return math.ceil(recipe.training.num_train_epochs * epoch_steps)

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
        """The approximate size of a checkpoint on the disk: the trained weights, or all weights,
        and the optimizer states."""
        strategy, states, model_size = self.strategy, self.estimate, self.shape
        mode = strategy.launch_mode
        ranks = 1 if mode.is_whole else strategy.num_processes
        optimizer_bytes = (
            3 * 4 * model_size.trainable_parameters  # float32: the weights and usually two moments
            if mode.offloads
            else states.optimizer_bytes * ranks
        )
        if model_size.lora_parameters:
            return model_size.lora_bytes + model_size.tied_copy_bytes + optimizer_bytes
        if mode.engine == "deepspeed":  # all weights in rank 0's file, or each rank's part
            return (
                4 if strategy.mixed_precision == "no" else 2
            ) * model_size.parameters + optimizer_bytes
        return states.weights_bytes * ranks + optimizer_bytes


@dataclass(frozen=True)
class Command:
    """A child process: argv, and the variables that it adds to the environment. The text of str()
    can be pasted into a shell."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items())]
        return " ".join(
            [*(["env", *assignments] if assignments else []), *map(shlex.quote, self.argv)]
        )
