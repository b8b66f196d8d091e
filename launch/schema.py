"""The nouns. Everything may import this module; it imports nothing of ours and touches no file, clock or process."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationInfo, field_validator, model_validator

GIB = 1 << 30

Device = Literal["cpu", "cuda"]
Mode = Literal[
    "cpu",
    "multi_cpu",
    "single_gpu",
    "dual_gpu_nccl",
    "dual_gpu_gloo",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero2_offload",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
    "fsdp2",
]
MODES: tuple[Mode, ...] = get_args(Mode)
Engine = Literal["plain", "ddp", "deepspeed", "fsdp2"]
Precision = Literal["no", "bf16", "fp16"]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
]
# seal: a checkpoint that was sealed with another key; versions: another major.minor of a library that writes its files.
Allowed = Literal["data", "model", "seed", "effective_batch_size", "versions", "seal"]
Dtype = Literal["float32", "bfloat16", "float16"]
AttnImplementation = Literal["sdpa", "eager", "flash_attention_2"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MULTIPLE: dict[Device, int] = {"cpu": 1, "cuda": 8}  # to which the collator pads a batch's length


# ---- the machine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One accelerator as its vendor's library describes it."""

    index: int
    name: str
    vendor: Literal["nvidia", "amd"]
    total_bytes: int
    free_bytes: int
    architecture: str  # NVIDIA compute capability ("8.6") or AMD gfx name ("gfx1201"); "" when unknown
    driver: str
    reason: str  # where these values come from
    uuid: str = ""  # names it in CUDA_VISIBLE_DEVICES where CUDA may count otherwise than NVML does


@dataclass(frozen=True)
class Machine:
    """What a run may use here; beside each fact the reason for it."""

    name: str
    gpus: tuple[Gpu, ...]
    gpus_reason: str
    host_limit_bytes: int  # the smallest of MemTotal, the cgroup chain, Slurm and the rlimits
    host_limit_reason: str
    host_available_bytes: int  # what is free under that limit now; page cache counts as free
    host_available_reason: str
    cpu_count: int
    cpu_reason: str
    shm_bytes: int
    shm_reason: str
    disk_free_bytes: int
    disk_reason: str
    gpus_obstacle: str = ""  # why cards that are here cannot be used, and the fix; "": they can, or there are none
    cuda_driver: str = ""  # the newest CUDA that the NVIDIA driver serves ("12.4"); "" when unknown


@dataclass(frozen=True)
class LinkTry:
    """One real all-reduce between the ranks, in one environment."""

    backend: Literal["nccl", "gloo"]
    env: Mapping[str, str]  # what was added to the user's environment
    ok: bool
    seconds: float
    said: str  # the line of its output that explains a failure
    cause: str = ""  # its name in link_causes.py; "" where the line is not known


@dataclass(frozen=True)
class Link:
    """How the ranks of a run reach each other here, as tested."""

    backend: Literal["nccl", "gloo"] | None  # None: no transport works, or there is one process: one GPU
    env: Mapping[str, str]  # what every rank needs besides the user's environment
    bytes_per_s: float | None  # bus bandwidth as nccl-tests defines it: bytes x 2(N-1)/N / seconds of an all-reduce
    flops_per_s: float | None  # of the slowest card's half-precision matmul; None without a GPU
    tries: tuple[LinkTry, ...]
    reason: str
    skipped: tuple[str, ...] = ()  # tries that were not made, and why


# ---- the recipe: what the user asked for ---------------------------------------------------------------------------


class Section(BaseModel):
    """A strict, frozen part of a recipe; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """Which model: a named shape in configs/models/, or a local Hugging Face folder."""

    shape: str | None = None
    path: str | None = None
    path_if_there: str | None = None  # used instead of the shape, when the folder holds a model
    freeze: tuple[str, ...] = ()  # module names whose parameters are not trained, e.g. [shared, encoder]
    dtype: Dtype = "float32"  # of the weights in memory; training.bf16 is the autocast on top of it
    attn_implementation: AttnImplementation | None = (
        None  # eager keeps every score: length x length per head; None: planned
    )

    @model_validator(mode="after")
    def one_source(self) -> ModelSection:
        if (self.shape is None) == (self.path is None):
            raise ValueError(
                "give exactly one of model.shape (a name in configs/models/) and model.path (a local folder)"
            )
        return self


class TokenizerSection(Section):
    """A tokenizer folder, or how to train a byte-level BPE from the data at first start."""

    path: str | None = None  # a local folder
    path_if_there: str | None = None  # used instead of training one, when the folder exists (and path is not given)
    vocab_size: PositiveInt | None = None  # of a trained tokenizer; default: the model shape's
    split: Literal["word", "character"] = "word"  # character: merges never cross a character


class LoraSection(Section):
    """PEFT's LoraConfig, in its own words."""

    r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | None = None  # default: by architecture


class QuantizationSection(Section):
    """transformers' BitsAndBytesConfig, in its own words: weights of 4 bits, frozen under LoRA (QLoRA)."""

    load_in_4bit: bool  # false is the same as no section
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = True
    bnb_4bit_compute_dtype: Dtype | None = None  # default: the precision of training, else model.dtype


class DataSection(Section):
    """Where the rows are and which columns to read; columns are found by name unless they are given here."""

    train_file: str  # a file, a folder of shards, or a pattern of them
    validation_file: str | None = None  # likewise
    prompt_column: str | None = None
    response_column: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    ignore_columns: tuple[str, ...] = ()  # columns, or keys of messages, whose content is left out on purpose
    max_length: int = Field(default=512, ge=8, le=1 << 20)  # tokens: of the whole sequence (decoder), of each side (T5)
    max_train_samples: PositiveInt | None = None
    max_validation_samples: PositiveInt | None = None
    max_bad_rows: int = Field(default=0, ge=0)  # of each of the two, left out and counted; one more is an error
    packing: bool = False  # several rows in one sequence of max_length, each with positions and attention of its own
    streaming: bool = False  # tokenise while training, and keep a few tokens ahead only: pretraining, packed, max_steps
    shuffle_buffer_mib: float | None = Field(
        default=None, gt=0, le=65_536, allow_inf_nan=False
    )  # of a stream; None: 16
    group_by_length: bool = False  # rows of about one length in an optimizer step; every row once an epoch
    # A step's rows in micro-batches of rows of about one length: as many as take no more padded tokens than
    # per_device_train_batch_size of the longest do. Marian's mini-batch-fit, OpenNMT's batch_type tokens.
    batch_by_tokens: bool = False

    @field_validator("ignore_columns", mode="before")
    @classmethod
    def one_column_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @property
    def stream_unit_bytes(self) -> int:
        """Four units of a stream are shuffled together."""
        return max(int((self.shuffle_buffer_mib or 16) * (1 << 20)) // 4, 1)

    @model_validator(mode="after")
    def buffer_of_a_stream(self) -> DataSection:
        if self.shuffle_buffer_mib is not None and not self.streaming:
            raise ValueError("shuffle_buffer_mib is for data.streaming: true; other rows are shuffled over all of them")
        return self

    @model_validator(mode="after")
    def one_way_to_less_padding(self) -> DataSection:
        for key in ("group_by_length", "batch_by_tokens"):
            if self.packing and getattr(self, key):
                raise ValueError(f"packing leaves nothing for {key} to do; set one of the two to false")
        return self


LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")  # of liger_kernel_config
COMPILE_KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


class TrainingSection(BaseModel):
    """TrainingArguments' own names. The ones planning needs are typed here; the others are checked against the
    fields of the installed transformers (training_fields.py) and kept as extras."""

    model_config = ConfigDict(extra="allow", frozen=True)

    per_device_train_batch_size: int = Field(default=8, ge=1, le=65_536)
    per_device_eval_batch_size: int | None = Field(default=None, ge=1, le=65_536)  # None: 3x the training, <= 64
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=65_536)
    num_train_epochs: float = Field(default=3.0, gt=0, le=100_000, allow_inf_nan=False)
    max_steps: int = Field(default=-1, ge=-1)
    learning_rate: float = Field(default=5e-5, gt=0, le=10, allow_inf_nan=False)
    warmup_steps: float = Field(default=0, ge=0, allow_inf_nan=False)  # below 1: a share of all steps
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = (
        "none"  # with the effective batch, where another one runs
    )
    learning_rate_batch_size: int | None = Field(default=None, ge=1)  # the effective batch that learning_rate is for
    lr_scheduler_type: Schedule = "linear"
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    optim: str = "adamw_torch_fused"
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    num_output_chunks: int | None = Field(default=None, ge=1, le=1024)  # of the positions, for the loss; None: planned
    logging_steps: int = Field(default=10, ge=1)
    save_steps: int = Field(default=500, ge=1)
    save_total_limit: int = Field(default=3, ge=1)  # the two newest good checkpoints are always kept
    eval_steps: int | None = Field(default=None, ge=1)  # default: once an epoch
    load_best_model_at_end: bool = False  # the lowest held-out loss decides; its checkpoint is kept beside the others
    seed: int = Field(default=23333, ge=0, lt=1 << 32)
    dataloader_num_workers: int | None = Field(default=None, ge=0, le=64)  # default: planned

    @field_validator("max_steps")
    @classmethod
    def trains_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 trains nothing; give a positive number, or -1 to train num_train_epochs")
        return value

    @model_validator(mode="after")
    def one_precision(self) -> TrainingSection:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; choose one")
        return self

    @model_validator(mode="after")
    def scaling_has_a_batch(self) -> TrainingSection:
        if (self.learning_rate_scaling == "none") != (self.learning_rate_batch_size is None):
            raise ValueError(
                f"learning_rate_scaling is {self.learning_rate_scaling} and learning_rate_batch_size"
                f" {self.learning_rate_batch_size or 'not given'}; set both: how the rate grows with the effective"
                " batch, and the effective batch that learning_rate is for"
            )
        return self

    @model_validator(mode="after")
    def schedule_has_its_numbers(self) -> TrainingSection:
        """Source: get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule of transformers 5.23."""
        needs = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}
        asked = needs.get(self.lr_scheduler_type, ())
        given = self.extras.get("lr_scheduler_kwargs") or {}
        if asked and not (isinstance(given, dict) and any(given.get(key) is not None for key in asked)):
            raise ValueError(
                f"lr_scheduler_type {self.lr_scheduler_type} needs {' or '.join(asked)}; write lr_scheduler_kwargs:"
                f" {{{asked[-1]}: ...}} under training: in a recipe file"
            )
        return self

    def learning_rate_at(self, effective_batch_size: int) -> float:
        """The peak rate: as asked for, or scaled as asked for (linear: arXiv:1706.02677; sqrt: arXiv:2205.10287)."""
        ratio = effective_batch_size / (self.learning_rate_batch_size or effective_batch_size)
        return self.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.learning_rate_scaling]

    @property
    def extras(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def compiles(self) -> bool:
        """A backend or a mode asks for torch.compile too, as in TrainingArguments."""
        return any(self.extras.get(key) for key in COMPILE_KEYS)


class LaunchSection(Section):
    """How to run; everything left out is planned."""

    mode: Literal["auto", Mode] = "auto"
    num_processes: int | None = Field(default=None, ge=1, le=1024)  # of all nodes together
    nodes: int = Field(default=1, ge=1, le=256)  # the same command runs on each, with its own machine_rank
    machine_rank: int = Field(default=0, ge=0)
    main_process_ip: str | None = None  # of the node with machine_rank 0, as the other nodes reach it
    main_process_port: int = Field(default=29500, ge=1024, le=65_535)  # with several nodes; else any free one is taken
    network_interface: str | None = None  # between the nodes, e.g. eth1; default: the one that leads to that address
    join_timeout_s: PositiveInt = 300  # for all nodes to be there
    vram_fraction: float = Field(default=0.95, gt=0, le=1)  # share of the free VRAM that planning may use
    assume_fits: bool = False  # start as asked, whatever was predicted; what runs out then is planned again
    on_oom: Literal["replan", "fail"] = "replan"  # out of memory: plan again with the effective batch held, or stop
    exact_batch: bool = False  # refuse the run where the batch does not fit, instead of splitting it
    pass_env: tuple[str, ...] = ()  # names of variables that ranks get besides those of launch/environment.py
    host_reserve_gib: float = Field(default=2.0, ge=0, allow_inf_nan=False)  # host RAM left to the rest of the machine
    max_restarts: int = Field(default=10, ge=0)  # after killed or hanging ranks, lost connections, crashes; 0: never
    hang_floor_s: float = Field(default=60, gt=0, allow_inf_nan=False)  # a step may take this long, whatever is usual
    time_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # save and stop before; Slurm's too
    host_stop_fraction: float = Field(default=0.97, ge=0, le=1)  # of the host's RAM; above: save, stop; 0: never

    @model_validator(mode="after")
    def nodes_can_meet(self) -> LaunchSection:
        if self.nodes == 1:
            given = {key for key in ("machine_rank", "main_process_ip", "network_interface") if getattr(self, key)}
            if given:
                raise ValueError(f"{', '.join(sorted(given))}: only for several machines; set launch.nodes too")
            return self
        if self.machine_rank >= self.nodes:
            raise ValueError(f"machine_rank {self.machine_rank}, but nodes count from 0 to {self.nodes - 1}")
        if self.main_process_ip is None:
            raise ValueError(f"nodes {self.nodes} needs main_process_ip, the address of the node with machine_rank 0")
        if self.num_processes is not None and self.num_processes % self.nodes:
            raise ValueError(f"num_processes {self.num_processes} cannot be shared evenly by {self.nodes} nodes")
        return self


class NumericsSection(Section):
    """What is done about numbers that are finite and yet too large; what is not finite always ends the run."""

    skip_spikes_above: float | None = Field(
        default=None, gt=1, allow_inf_nan=False
    )  # gradient norm / median; None: off


class ResumeSection(Section):
    """What may have changed in a run that is continued, although it changes what is trained."""

    allow: tuple[Allowed, ...] = ()

    @field_validator("allow", mode="before")
    @classmethod
    def one_word_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class EvaluationSection(Section):
    """What is measured besides the loss on the validation file."""

    exact_match_rows: int = Field(default=0, ge=0)  # held-out rows answered before and after training; 0 is none
    max_new_tokens: int = Field(default=64, ge=1, le=4096)


Concession = Literal["quantization", "lora.r", "data.max_length"]


class Recipe(Section):
    """A whole run as the user wants it, resolved: file, overrides and the machine's defaults already merged."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    task: Literal["sft", "pretrain"]
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    lora: LoraSection | None = None
    quantization: QuantizationSection | None = None  # None: off
    data: DataSection
    training: TrainingSection = TrainingSection()
    launch: LaunchSection = LaunchSection()
    numerics: NumericsSection = NumericsSection()
    evaluation: EvaluationSection = EvaluationSection()
    allow: tuple[Concession, ...] = ()  # what may be given up where nothing else fits; it changes the result
    resume: ResumeSection = ResumeSection()
    output_dir: str
    log_dir: str | None = None  # a folder that also gets training.log, and TensorBoard's events of each run

    @model_validator(mode="after")
    def best_of_held_out_rows(self) -> Recipe:
        if self.training.load_best_model_at_end and self.data.validation_file is None:
            raise ValueError(
                "training.load_best_model_at_end needs data.validation_file: held-out rows say what is best"
            )
        return self

    @model_validator(mode="after")
    def what_can_be_streamed(self) -> Recipe:
        if not self.data.streaming:
            return self
        wrong = []
        if self.task != "pretrain":
            wrong.append("task: pretrain (rows for SFT fit the disk)")
        if not self.data.packing:
            wrong.append("data.packing: true (the longest row is not known before: full sequences are planned for)")
        if self.training.max_steps < 0:
            wrong.append("training.max_steps (how many an epoch has is not known before)")
        if self.data.max_train_samples is not None:
            wrong.append("no data.max_train_samples (training.max_steps ends it)")
        if self.training.dataloader_num_workers:
            wrong.append("no training.dataloader_num_workers (processes of its own tokenise)")
        if wrong:
            raise ValueError(f"data.streaming: true needs {'; '.join(wrong)}")
        return self

    @field_validator("quantization")
    @classmethod
    def of_frozen_weights(cls, value: QuantizationSection | None, info: ValidationInfo) -> QuantizationSection | None:
        if value is None or not value.load_in_4bit:
            return None
        if info.data.get("lora", value) is None:  # a lora section with a mistake in it is not there at all
            raise ValueError("4-bit weights cannot be trained; add LoRA (--lora.r=16), or leave load_in_4bit out")
        return value

    @property
    def evaluates(self) -> bool:
        """There are held-out rows, so that evaluations happen."""
        return self.data.validation_file is not None

    def quantized(self, precision: Precision) -> QuantizationSection | None:
        """The quantization with its compute dtype decided: that of what autocast gives the layers."""
        if self.quantization is None:
            return None
        given = {"bf16": "bfloat16", "fp16": "float16", "no": self.model.dtype}[precision]
        chosen = self.quantization.bnb_4bit_compute_dtype or given
        return self.quantization.model_copy(update={"bnb_4bit_compute_dtype": chosen})


# ---- the plan: what will run, and why ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """A model's Hugging Face config and what counting its parameters gives (no weights, no torch)."""

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
    columns: Mapping[str, str]  # role -> column name; roles: prompt, context, response, messages, text, role
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
    gradient_checkpointing: bool
    dataloader_num_workers: int
    num_machines: int = 1
    num_output_chunks: int = 1  # logits of so many parts of the positions are made one after another
    torch_compile: bool = False
    attn_implementation: AttnImplementation = "sdpa"
    tf32: bool = False  # products of float32 are rounded to 10 bits of mantissa
    use_liger_kernel: bool = False

    @property
    def effective_batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes

    @property
    def processes_per_machine(self) -> int:
        return self.num_processes // self.num_machines

    @property
    def engine(self) -> Engine:
        """Who holds the model's states: each rank all of them (plain, ddp), or all ranks together."""
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
        """1: optimizer states are shared out; 2: and gradients; 3: and weights. 0: not DeepSpeed."""
        return int(self.mode.removeprefix("deepspeed_zero")[0]) if self.engine == "deepspeed" else 0

    @property
    def offloads(self) -> bool:
        """Optimizer states stand in host RAM and are updated there; under ZeRO-3 the weights' home is there too."""
        return self.mode.endswith("_offload")


# When a block of a traced step is born: before the step (the optimizer's states apart), in it, or in
# the evaluation after it.
Born = Literal["start", "state", "step", "evaluation"]


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most: where in the run, at which operator, and what for."""

    section: str  # load, forward, backward, optimizer, evaluation
    op: str
    parts: Mapping[str, int]  # bytes by kind: weights, gradients, optimizer, activations, logits, temporaries...

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
    host: Mapping[str, int] = field(default_factory=dict)  # of the job on this machine, by cause; {}: not predicted
    host_phase: str = ""
    step_allocated_bytes: int = 0  # peaks of a training step, without an evaluation; 0: not predicted
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
    """What an epoch's tokenised rows are, and how much a step computes besides them; shares are of all it computes."""

    order: Literal["random", "by_length", "packed"]
    share: float
    at_random: float  # were rows to come at random, none packed
    by_length: float  # were they grouped
    samples: int  # what a batch counts: rows, or packed sequences
    rows: int
    tokens: int
    by_tokens: float | None = None  # were a step's rows cut by tokens; None: an older version's
    micro_steps: float | None = None  # of an optimizer step on average, where its rows are cut by tokens
    in_quarters: float | None = None  # were they cut into micro-batches of a quarter's tokens


@dataclass(frozen=True)
class Plan:
    """What will run."""

    recipe_name: str
    strategy: Strategy
    shape: ModelShape
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
    lengths: tuple[int, int] = (0, 0)  # tokens of the longest source and target that was planned for
    rendezvous: Rendezvous | None = None  # None: one machine
    link: Link | None = None  # between the ranks; None: not tested
    packing: bool = False  # what a batch counts are packed sequences
    by_tokens: bool = False  # a step's rows are cut by tokens: data.batch_by_tokens
    padding: Padding | None = None  # None: the rows have not been tokenised yet
    base_fingerprint: str | None = None  # of the weights that an adapter is trained for: no checkpoint holds them
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
        return self.strategy.per_device_train_batch_size * source, self.strategy.per_device_train_batch_size * target

    @property
    def checkpoint_bytes(self) -> int:
        """About what a checkpoint takes on the disk: the weights that are trained, or all of them, and the states."""
        strategy, states, shape = self.strategy, self.estimate, self.shape
        ranks = strategy.num_processes if strategy.engine in ("deepspeed", "fsdp2") else 1
        optimizer_bytes = states.optimizer_bytes * ranks
        if strategy.offloads:  # all of ZeRO's are float32: the weights and, as a rule, two moments
            optimizer_bytes = 3 * 4 * shape.trainable_parameters
        if shape.lora_parameters:
            return 4 * shape.lora_parameters + optimizer_bytes
        if strategy.engine == "deepspeed":  # whole in rank 0's file, or every rank's part of them
            return (4 if strategy.mixed_precision == "no" else 2) * shape.parameters + optimizer_bytes
        return states.weights_bytes * ranks + optimizer_bytes


@dataclass(frozen=True)
class Command:
    """A child process: argv and the variables it adds to the environment. str() can be pasted into a shell."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items())]
        return " ".join([*(["env", *assignments] if assignments else []), *map(shlex.quote, self.argv)])


# ---- what happened -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step as rank 0 writes it to events.jsonl; counts are of all ranks, `tokens` those that are not
    padding."""

    step: int
    max_steps: int
    epoch: float
    samples_seen: int
    tokens: float
    samples: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    vram_allocated_bytes: int  # peak over ranks since the start
    vram_reserved_bytes: int
    vram_total_bytes: int  # 0: no GPU
    host_pss_bytes: int  # of the whole job, now
    time: float  # unix time
    computed_tokens: int | None = None  # padding included; None: an older version's step
    data_seconds: float | None = None  # of `seconds`: until rank 0 had its batches, and all ranks knew of theirs

    def line(self) -> str:
        """The line in every log; loss, tokens, samples and seconds may be means over the steps since the last one."""
        return f"step {self.step}/{self.max_steps}  epoch {self.epoch:.2f}  {self.metrics()}"

    def metrics(self) -> str:
        """The words every screen and log uses for a step's figures."""
        rate = 1 / self.seconds if self.seconds > 0 else math.inf
        vram = ""
        if self.vram_total_bytes:
            vram = (
                f"  VRAM {self.vram_allocated_bytes / GIB:.2f} GiB (reserved {self.vram_reserved_bytes / GIB:.2f}"
                f" of {self.vram_total_bytes / GIB:.1f})"
            )
        return (
            f"loss {self.loss:.4f}  lr {self.learning_rate:.3e}  {self.seconds:.3f} s/step"
            f"  {self.samples * rate:,.1f} samples/s  {self.tokens * rate:,.0f} tokens/s"
            f"{vram}  RAM {self.host_pss_bytes / GIB:.2f} GiB"
        )


@dataclass(frozen=True)
class HeldOut:
    """One evaluation as rank 0 writes it to held_out.jsonl."""

    step: int
    samples_seen: int
    loss: float
    seconds: float
    time: float  # unix time, at its end


@dataclass(frozen=True)
class Evidence:
    """What an ended attempt left behind; classify() reads nothing else."""

    returncode: int  # of the launcher; negative: the signal that killed it
    rank_errors: tuple[Mapping[str, Any], ...]  # ranks/<r>/error.json, earliest first
    log_tail: str
    oom_kills: int  # growth of the cgroup's oom_kill counter during the attempt
    host_limit_bytes: int
    host_peak_bytes: int
    completed: bool  # rank 0 wrote its outcome and reached the last step
    stopped_by: int | None = None  # signal number that the user sent to the supervisor
    preempted: Mapping[str, Any] | None = None  # rank 0's outcome, where the ranks agreed to stop
    hang: str = ""  # which rank was silent, where and how long
    pressure: str = ""  # why the host's RAM was about to run out, where the ranks were stopped for it
    ended_ranks: tuple[int, ...] = ()  # pids of ranks that the supervisor ended, since another had ended before them
    vram_reserved_bytes: int = 0  # of the fullest rank, by the last step that was logged
    vram_total_bytes: int = 0  # 0: no GPU, or no step


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without a model: cause, the line that proves it, one fix."""

    kind: str
    exit_code: int
    cause: str
    proof: str
    fix: str
    section: str = ""  # the heartbeat's, in which the rank was that failed first: load, step, evaluation, ...


@dataclass(frozen=True)
class RunResult:
    """The end of a run, as the report shows it."""

    run_dir: str
    exit_code: int
    failure: Failure | None
    seconds: float
    host_peak_bytes: int
    summary: Mapping[str, Any] = field(default_factory=dict)  # rank 0's outcome.json
    plan_again: bool = False  # stopped because its second step took more than was predicted
    note: str = ""  # what else a reader should know
    last_step: int = 0  # that a rank reached
    host_left_bytes: int = 0  # least that the job and what was free took together while it was watched; 0: not watched
    unkillable: tuple[int, ...] = ()  # processes of the run that are still there
