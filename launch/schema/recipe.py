"""The recipe: every key that a user can set, checked strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from launch.schema.affects import EVERYTHING, Effect, affects, marked
from launch.schema.machine import Device
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode

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

# seal: a checkpoint that was signed with another key; versions: another major.minor version of a
# library that writes its files.
Allowed = Literal["data", "model", "seed", "effective_batch_size", "schedule", "versions", "seal"]

Dtype = Literal["float32", "bfloat16", "float16"]

AttnImplementation = Literal["sdpa", "eager", "flash_attention_2"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

AFFECTS_STEP = affects("weights", "memory", "step_time")


def _as_tuple(value: Any) -> Any:
    """A single text or a list as a tuple, which strict validation expects."""
    values = [value] if isinstance(value, str) else value
    return tuple(values) if isinstance(values, list) else values


class Section(BaseModel):
    """A strict, frozen part of a recipe. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """The model: a named shape in configs/models/, or a local Hugging Face folder."""

    shape: Annotated[str | None, affects("weights")] = Field(
        default=None, description="Name of a model in configs/models/, built with random weights."
    )
    path: Annotated[str | None, affects("weights")] = Field(
        default=None, description="Local Hugging Face folder of the model (safetensors)."
    )
    path_if_there: Annotated[str | None, affects("source")] = Field(
        default=None, description="Folder that is used instead of the shape if it holds a model."
    )
    freeze: Annotated[tuple[str, ...], AFFECTS_STEP] = Field(
        default=(),
        description="Names of modules whose parameters are not trained, e.g. [shared, encoder].",
    )
    dtype: Annotated[Dtype, AFFECTS_STEP] = Field(
        default="float32",
        description="Type of the weights in memory; training.bf16 is the autocast on top of it.",
    )
    attn_implementation: Annotated[
        AttnImplementation | None, affects("memory", "step_time", "planned")
    ] = Field(
        default=None,
        description="Attention kernels; eager keeps every score (length x length per head). "
        "null: planned.",
    )

    @model_validator(mode="after")
    def one_source(self) -> ModelSection:
        if (self.shape is None) == (self.path is None):
            raise ValueError(
                "give exactly one of model.shape (a name in configs/models/) and model.path (a"
                " local folder)"
            )
        return self


class TokenizerSection(Section):
    """A tokenizer folder, or how to train a byte-level BPE from the data at first start."""

    path: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Local folder of a tokenizer. null: the model folder's, or one trained from"
        " the data.",
    )
    path_if_there: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Folder that is used instead of training a tokenizer if it exists and path "
        "is not given.",
    )
    vocab_size: Annotated[PositiveInt | None, affects("weights", "rows", "memory", "step_time")] = (
        Field(
            default=None,
            description="Vocabulary of a trained tokenizer. null: that of the model's shape.",
        )
    )
    split: Annotated[Literal["word", "character"], affects("weights", "rows")] = Field(
        default="word",
        description="How a trained tokenizer splits text; with character, merges never cross a "
        "character.",
    )


class LoraSection(Section):
    """PEFT's LoraConfig, in its own words."""

    r: Annotated[PositiveInt, AFFECTS_STEP] = Field(default=16, description="Rank of the adapters.")
    lora_alpha: Annotated[PositiveInt, affects("weights")] = Field(
        default=32,
        description="Scale of the adapters: their output is multiplied by lora_alpha / r.",
    )
    lora_dropout: Annotated[float, AFFECTS_STEP] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the adapters' input that is dropped during training.",
    )
    target_modules: Annotated[tuple[str, ...] | Literal["all-linear"] | None, AFFECTS_STEP] = Field(
        default=None,
        description="Names of the modules that get an adapter, or all-linear: every linear layer"
        " but the output head. null: chosen by architecture, all-linear if it is not known.",
    )
    use_rslora: Annotated[bool, affects("weights")] = Field(
        default=False, description="Multiply the adapters' output by lora_alpha / sqrt(r)."
    )
    init_lora_weights: Annotated[bool | Literal["gaussian", "orthogonal"], affects("weights")] = (
        Field(
            default=True,
            description="First values of the adapters. true: as Microsoft's LoRA, which changes"
            " nothing at first; false: random values, for tests.",
        )
    )


class QuantizationSection(Section):
    """transformers' BitsAndBytesConfig, in its own words: weights of 4 bits, frozen under LoRA
    (QLoRA)."""

    load_in_4bit: Annotated[bool, AFFECTS_STEP] = Field(
        description="Keep the linear weights in 4 bits under LoRA (QLoRA); false is the same as"
        " no section."
    )
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], AFFECTS_STEP] = Field(
        default="nf4", description="Kind of the 4-bit numbers."
    )
    bnb_4bit_use_double_quant: Annotated[bool, AFFECTS_STEP] = Field(
        default=True, description="Quantize the scales of the 4-bit blocks too."
    )
    bnb_4bit_compute_dtype: Annotated[Dtype | None, AFFECTS_STEP] = Field(
        default=None,
        description="Type of the arithmetic. null: the precision of training, else model.dtype.",
    )


class DataSection(Section):
    """The rows and the columns to read. Columns are found by name unless they are named here."""

    train_file: Annotated[str, affects("source")] = Field(
        description="Training rows: a file, a folder of shards, or a pattern of files."
    )
    validation_file: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Held-out rows: a file, a folder of shards, or a pattern of files.",
    )
    prompt_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of the prompt. null: found by name."
    )
    response_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of the response. null: found by name."
    )
    text_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of plain text. null: found by name."
    )
    messages_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of conversations. null: found by name."
    )
    ignore_columns: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), affects("rows")] = Field(
        default=(),
        description="Columns, or keys of messages, whose content is left out on purpose.",
    )
    max_length: Annotated[int, affects("rows", "memory", "step_time")] = Field(
        default=512,
        ge=8,
        le=1 << 20,
        description="Most tokens of a sequence (decoder), or of each side (T5); longer rows "
        "lose their end in SFT and become several in pretraining.",
    )
    max_train_samples: Annotated[PositiveInt | None, affects("rows")] = Field(
        default=None, description="Train on at most this many rows."
    )
    max_validation_samples: Annotated[PositiveInt | None, affects("rows")] = Field(
        default=None, description="Evaluate on at most this many rows."
    )
    max_bad_rows: Annotated[int, affects("rows")] = Field(
        default=0,
        ge=0,
        description="Unreadable rows of each file that are left out and counted; one more is an"
        " error.",
    )
    packing: Annotated[bool, affects("rows", "memory", "step_time")] = Field(
        default=False,
        description="Put several rows into one sequence of max_length, each with its own "
        "positions and attention.",
    )
    streaming: Annotated[bool, affects("rows", "memory", "step_time")] = Field(
        default=False,
        description="Tokenise while training and store few tokens; needs task pretrain, packing"
        " and max_steps.",
    )
    shuffle_buffer_mib: Annotated[float | None, affects("rows")] = Field(
        default=None,
        gt=0,
        le=65_536,
        allow_inf_nan=False,
        description="Buffer in which a stream is shuffled, in MiB. null: 16.",
    )
    group_by_length: Annotated[bool, affects("rows")] = Field(
        default=False,
        description="Fill an optimizer step with rows of about one length; every row once an "
        "epoch.",
    )
    batch_by_tokens: Annotated[bool, affects("memory", "step_time")] = Field(
        default=False,
        description="Split a step into micro-batches of rows of about one length, with at most "
        "as many padded tokens as per_device_train_batch_size of the longest rows "
        "have.",
    )

    @property
    def stream_unit_bytes(self) -> int:
        """Bytes of a unit of a stream. Four units are shuffled together."""
        return max(int((self.shuffle_buffer_mib or 16) * (1 << 20)) // 4, 1)

    @model_validator(mode="after")
    def buffer_of_a_stream(self) -> DataSection:
        if self.shuffle_buffer_mib is not None and not self.streaming:
            raise ValueError(
                "shuffle_buffer_mib is for data.streaming: true; other rows are shuffled over all"
                " of them"
            )
        return self

    @model_validator(mode="after")
    def one_way_to_less_padding(self) -> DataSection:
        for key in ("group_by_length", "batch_by_tokens"):
            if self.packing and getattr(self, key):
                raise ValueError(
                    f"packing leaves nothing for {key} to do; set one of the two to false"
                )
        return self


LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")  # of liger_kernel_config

COMPILE_KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


class TrainingSection(BaseModel):
    """Fields with TrainingArguments' names. The keys that planning needs are typed here. The others
    are checked against the installed transformers (launch/recipe/training_arguments.py) and become
    extras."""

    model_config = ConfigDict(extra="allow", frozen=True)

    per_device_train_batch_size: Annotated[int, affects("batch", "planned")] = Field(
        default=8, ge=1, le=65_536, description="Rows of a micro-batch on one device."
    )
    per_device_eval_batch_size: Annotated[int | None, affects("memory", "planned")] = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Rows of a micro-batch in evaluation. null: 3 times that of training, at "
        "most 64.",
    )
    gradient_accumulation_steps: Annotated[int, affects("batch", "planned")] = Field(
        default=1,
        ge=1,
        le=65_536,
        description="Micro-batches of one optimizer step on each device.",
    )
    num_train_epochs: Annotated[float, affects("weights")] = Field(
        default=3.0,
        gt=0,
        le=100_000,
        allow_inf_nan=False,
        description="Passes over the training rows.",
    )
    max_steps: Annotated[int, affects("weights")] = Field(
        default=-1, ge=-1, description="Optimizer steps; -1: as many as num_train_epochs has."
    )
    learning_rate: Annotated[float, affects("weights")] = Field(
        default=5e-5, gt=0, le=10, allow_inf_nan=False, description="Peak learning rate."
    )
    warmup_steps: Annotated[float, affects("weights")] = Field(
        default=0,
        ge=0,
        allow_inf_nan=False,
        description="Optimizer steps of the warmup; below 1 a share of all steps.",
    )
    learning_rate_scaling: Annotated[Literal["none", "linear", "sqrt"], affects("weights")] = Field(
        default="none",
        description="Scale the learning rate with the effective batch; needs "
        "learning_rate_batch_size.",
    )
    learning_rate_batch_size: Annotated[int | None, affects("weights")] = Field(
        default=None, ge=1, description="Effective batch that learning_rate is for."
    )
    lr_scheduler_type: Annotated[Schedule, affects("weights")] = Field(
        default="linear", description="Course of the learning rate after the warmup."
    )
    weight_decay: Annotated[float, affects("weights", "memory")] = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight decay of the optimizer."
    )
    max_grad_norm: Annotated[float, AFFECTS_STEP] = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Gradients are clipped to this norm; 0: never.",
    )
    optim: Annotated[str, AFFECTS_STEP] = Field(
        default="adamw_torch_fused", description="Optimizer, by TrainingArguments' name."
    )
    bf16: Annotated[bool, affects("weights", "memory", "step_time", "planned")] = Field(
        default=False, description="Train under bfloat16 autocast."
    )
    fp16: Annotated[bool, affects("weights", "memory", "step_time", "planned")] = Field(
        default=False, description="Train under float16 autocast with loss scaling."
    )
    activation_checkpointing: Annotated[bool, affects("memory", "step_time", "planned")] = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them.",
    )
    num_output_chunks: Annotated[int | None, affects("memory", "step_time", "planned")] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Parts in which the loss computes the logits, to save memory. null: planned.",
    )
    logging_steps: Annotated[int, affects("interruptions")] = Field(
        default=10, ge=1, description="Optimizer steps between two log lines."
    )
    save_steps: Annotated[int, affects("interruptions")] = Field(
        default=500, ge=1, description="Optimizer steps between two checkpoints."
    )
    save_total_limit: Annotated[int, affects("interruptions")] = Field(
        default=3,
        ge=1,
        description="Checkpoints to keep; the two newest good ones are always kept.",
    )
    eval_steps: Annotated[int | None, affects("interruptions")] = Field(
        default=None,
        ge=1,
        description="Optimizer steps between two evaluations. null: once an epoch.",
    )
    load_best_model_at_end: Annotated[bool, affects("weights")] = Field(
        default=False,
        description="Export the weights with the lowest held-out loss; their checkpoint is kept.",
    )
    seed: Annotated[int, affects("weights", "rows")] = Field(
        default=23333,
        ge=0,
        lt=1 << 32,
        description="Random seed of weights, order of rows and dropout.",
    )
    dataloader_num_workers: Annotated[int | None, affects("step_time", "planned", "machine")] = (
        Field(
            default=None,
            ge=0,
            le=64,
            description="Processes that load rows for each rank. null: planned.",
        )
    )

    @field_validator("max_steps")
    @classmethod
    def trains_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError(
                "0 trains nothing; give a positive number, or -1 to train num_train_epochs"
            )
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
                f"learning_rate_scaling is {self.learning_rate_scaling} and"
                f" learning_rate_batch_size {self.learning_rate_batch_size or 'not given'}; set"
                " both: how the rate grows with the effective batch, and the effective batch that"
                " learning_rate is for"
            )
        return self

    @model_validator(mode="after")
    def schedule_has_its_numbers(self) -> TrainingSection:
        """Require the keyword that a schedule needs. Source:
        get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule of transformers 5.23."""
        needs = {
            "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
            "warmup_stable_decay": ("num_decay_steps",),
        }
        names = needs.get(self.lr_scheduler_type, ())
        options = self.extras.get("lr_scheduler_kwargs") or {}
        if names and not (
            isinstance(options, dict) and any(options.get(name) is not None for name in names)
        ):
            raise ValueError(
                f"lr_scheduler_type {self.lr_scheduler_type} needs {' or '.join(names)}; write"
                f" lr_scheduler_kwargs: {{{names[-1]}: ...}} under training: in a recipe file"
            )
        return self

    def learning_rate_at(self, effective_batch_size: int) -> float:
        """The peak learning rate, scaled if the recipe says so (linear: arXiv:1706.02677; sqrt:
        arXiv:2205.10287)."""
        ratio = effective_batch_size / (self.learning_rate_batch_size or effective_batch_size)
        return (
            self.learning_rate
            * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.learning_rate_scaling]
        )

    @property
    def extras(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def compiles(self) -> bool:
        """True if torch.compile is on. A backend or a mode turns it on too, as in
        TrainingArguments."""
        return any(self.extras.get(key) for key in COMPILE_KEYS)


class LaunchSection(Section):
    """The way to run. Keys that are left out are planned."""

    mode: Annotated[Literal["auto", Mode], affects("plan", "planned")] = Field(
        default="auto", description="Launch mode; auto: planned."
    )
    num_processes: Annotated[int | None, affects("plan", "planned")] = Field(
        default=None, ge=1, le=1024, description="Ranks of all nodes together. null: planned."
    )
    nodes: Annotated[int, affects("plan")] = Field(
        default=1,
        ge=1,
        le=256,
        description="Machines; the same command runs on each, with its own machine_rank.",
    )
    machine_rank: Annotated[int, affects("machine")] = Field(
        default=0, ge=0, description="Number of this machine, from 0."
    )
    main_process_ip: Annotated[str | None, affects("name")] = Field(
        default=None,
        description="Address of the machine with machine_rank 0, as the others reach it.",
    )
    main_process_port: Annotated[int, affects("name")] = Field(
        default=29500,
        ge=1024,
        le=65_535,
        description="Port of that machine, used with several machines.",
    )
    network_interface: Annotated[str | None, affects("machine")] = Field(
        default=None,
        description="Interface between the machines, e.g. eth1. null: the one that leads to "
        "that address.",
    )
    join_timeout_s: Annotated[PositiveInt, affects("interruptions")] = Field(
        default=300, description="Seconds to wait until all machines have joined."
    )
    vram_fraction: Annotated[float, affects("plan")] = Field(
        default=0.95, gt=0, le=1, description="Share of the free VRAM that a plan may use."
    )
    assume_fits: Annotated[bool, affects("plan")] = Field(
        default=False,
        description="Start as asked, whatever memory is predicted; what runs out is planned again.",
    )
    on_oom: Annotated[Literal["replan", "fail"], affects("interruptions")] = Field(
        default="replan",
        description="After running out of memory: plan again with the effective batch held, or "
        "stop.",
    )
    exact_batch: Annotated[bool, affects("plan")] = Field(
        default=False, description="Refuse a micro-batch that does not fit instead of splitting it."
    )
    pass_env: Annotated[tuple[str, ...], affects("memory", "step_time")] = Field(
        default=(),
        description="Names of environment variables that ranks get besides the usual ones.",
    )
    host_reserve_gib: Annotated[float, affects("plan")] = Field(
        default=2.0,
        ge=0,
        allow_inf_nan=False,
        description="Host RAM that is left to other programs, in GiB.",
    )
    max_restarts: Annotated[int, affects("interruptions")] = Field(
        default=10,
        ge=0,
        description="Restarts after killed or hanging ranks, lost connections and crashes; 0: "
        "none.",
    )
    hang_floor_s: Annotated[float, affects("interruptions")] = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that any step may take before it counts as hanging.",
    )
    time_limit_s: Annotated[float | None, affects("interruptions")] = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Save and stop before this many seconds are over; the limit of a Slurm job "
        "counts too.",
    )
    host_stop_fraction: Annotated[float, affects("interruptions")] = Field(
        default=0.97,
        ge=0,
        le=1,
        description="Share of host RAM above which the run is saved and stopped; 0: never.",
    )

    @property
    def named_mode(self) -> LaunchMode | None:
        """The row of the mode that the recipe names; None: auto."""
        return None if self.mode == "auto" else LAUNCH_MODES[self.mode]

    @property
    def device(self) -> Device | None:
        """The device that the mode's name fixes."""
        return self.named_mode.device if self.named_mode else None

    @model_validator(mode="after")
    def nodes_can_meet(self) -> LaunchSection:
        if self.nodes == 1:
            cluster_keys = ("machine_rank", "main_process_ip", "network_interface")
            if superfluous := [key for key in sorted(cluster_keys) if getattr(self, key)]:
                raise ValueError(
                    f"{', '.join(superfluous)}: only for several machines; set launch.nodes too"
                )
            return self
        if self.machine_rank >= self.nodes:
            raise ValueError(
                f"machine_rank {self.machine_rank}, but nodes count from 0 to {self.nodes - 1}"
            )
        if self.main_process_ip is None:
            raise ValueError(
                f"nodes {self.nodes} needs main_process_ip, the address of the node with"
                " machine_rank 0"
            )
        if self.num_processes is not None and self.num_processes % self.nodes:
            raise ValueError(
                f"num_processes {self.num_processes} cannot be shared evenly by {self.nodes} nodes"
            )
        return self


class NumericsSection(Section):
    """Reactions to numbers that are finite but too large. NaN and infinity always end the run."""

    skip_spikes_above: Annotated[float | None, affects("weights")] = Field(
        default=None,
        gt=1,
        allow_inf_nan=False,
        description="Skip a step whose gradient norm is this many times the median. null: never.",
    )


class ResumeSection(Section):
    """Differences that are allowed in a continued run, although they change the result."""

    allow: Annotated[tuple[Allowed, ...], BeforeValidator(_as_tuple), affects("interruptions")] = (
        Field(
            default=(),
            description="What may differ from the run that is continued, although it changes the "
            "result.",
        )
    )


class EvaluationSection(Section):
    """Measurements besides the loss on the validation file."""

    exact_match_rows: Annotated[int, affects("interruptions")] = Field(
        default=0,
        ge=0,
        description="Held-out rows that are answered before and after training; 0: none.",
    )
    max_new_tokens: Annotated[int, affects("interruptions")] = Field(
        default=64, ge=1, le=4096, description="Most tokens of such an answer."
    )


Concession = Literal["quantization", "lora.r", "data.max_length"]


class Recipe(Section):
    """A complete run as the user wants it: the file, the overrides and the machine's defaults are
    merged."""

    name: Annotated[str, affects("name")] = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the recipe and of its folder in runs/.",
    )
    task: Annotated[
        Literal["sft", "pretrain"], affects("weights", "rows", "memory", "step_time")
    ] = Field(description="Supervised fine-tuning, or pretraining.")
    model: ModelSection = Field(description="Which model.")
    tokenizer: TokenizerSection = Field(default=TokenizerSection(), description="Which tokenizer.")
    lora: LoraSection | None = Field(
        default=None, description="Train LoRA adapters only. null: all weights."
    )
    quantization: QuantizationSection | None = Field(
        default=None, description="Keep frozen weights in 4 bits. null: off."
    )
    data: DataSection = Field(description="Which rows.")
    training: TrainingSection = Field(
        default=TrainingSection(), description="TrainingArguments' fields."
    )
    launch: LaunchSection = Field(default=LaunchSection(), description="How to run.")
    numerics: NumericsSection = Field(
        default=NumericsSection(), description="What to do about spikes."
    )
    evaluation: EvaluationSection = Field(
        default=EvaluationSection(), description="What to measure besides the held-out loss."
    )
    allow: Annotated[tuple[Concession, ...], affects("plan")] = Field(
        default=(), description="What may be relaxed if nothing else fits; it changes the result."
    )
    resume: ResumeSection = Field(
        default=ResumeSection(), description="What a continued run may change."
    )
    output_dir: Annotated[str, affects("name")] = Field(description="Folder of the finished model.")
    log_dir: Annotated[str | None, affects("name")] = Field(
        default=None,
        description="Folder that also gets training.log and the TensorBoard events of each run.",
    )

    @model_validator(mode="after")
    def best_of_held_out_rows(self) -> Recipe:
        if self.training.load_best_model_at_end and self.data.validation_file is None:
            raise ValueError(
                "training.load_best_model_at_end needs data.validation_file: held-out rows say what"
                " is best"
            )
        return self

    @model_validator(mode="after")
    def what_can_be_streamed(self) -> Recipe:
        needs = {
            "task: pretrain (rows for SFT fit the disk)": self.task == "pretrain",
            "data.packing: true (the longest row is not known before: full sequences are planned"
            " for)": self.data.packing,
            "training.max_steps (how many an epoch has is not known before)": (
                self.training.max_steps >= 0
            ),
            "no data.max_train_samples (training.max_steps ends it)": (
                self.data.max_train_samples is None
            ),
            "no training.dataloader_num_workers (processes of its own tokenise)": (
                not self.training.dataloader_num_workers
            ),
        }
        if self.data.streaming and not all(needs.values()):
            unmet = [need for need, is_met in needs.items() if not is_met]
            raise ValueError(f"data.streaming: true needs {'; '.join(unmet)}")
        return self

    @field_validator("quantization")
    @classmethod
    def of_frozen_weights(
        cls, value: QuantizationSection | None, info: ValidationInfo
    ) -> QuantizationSection | None:
        if value is None or not value.load_in_4bit:
            return None
        # a lora section that contains a mistake is missing here
        if info.data.get("lora", value) is None:
            raise ValueError(
                "4-bit weights cannot be trained; add LoRA (--lora.r=16), or leave load_in_4bit out"
            )
        return value

    @property
    def evaluates(self) -> bool:
        """True if there are held-out rows, so that evaluations happen."""
        return self.data.validation_file is not None

    def quantized(self, precision: Precision) -> QuantizationSection | None:
        """The quantization with its compute dtype: by default the type that autocast gives the
        layers."""
        if self.quantization is None:
            return None
        autocast = {"bf16": "bfloat16", "fp16": "float16", "no": self.model.dtype}[precision]
        compute_dtype = self.quantization.bnb_4bit_compute_dtype or autocast
        return self.quantization.model_copy(update={"bnb_4bit_compute_dtype": compute_dtype})


# ---- effects of a key
# ---------------------------------------------------------------------------

SECTIONS: Mapping[str, type[BaseModel]] = {
    "model": ModelSection,
    "tokenizer": TokenizerSection,
    "lora": LoraSection,
    "quantization": QuantizationSection,
    "data": DataSection,
    "training": TrainingSection,
    "launch": LaunchSection,
    "numerics": NumericsSection,
    "evaluation": EvaluationSection,
    "resume": ResumeSection,
}

# Keys of TrainingArguments that have no field here and do not affect everything.
EXTRAS: Mapping[str, frozenset[Effect]] = {
    # liger is traced as transformers' own modules
    "tf32": frozenset({"weights", "step_time", "planned"}),
    "use_liger_kernel": frozenset({"weights", "step_time", "planned"}),
    "liger_kernel_config": frozenset({"weights", "step_time"}),
    "torch_compile": frozenset({"weights", "memory", "step_time", "planned"}),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_kwargs"), frozenset({"weights"})
    ),
    **dict.fromkeys(
        (
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
        ),
        frozenset({"step_time"}),
    ),
    **dict.fromkeys(
        (
            "ddp_timeout",
            "eval_delay",
            "eval_on_start",
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "logging_first_step",
            "logging_strategy",
            "run_name",
            "save_on_each_node",
        ),
        frozenset({"interruptions"}),
    ),
}


def all_keys() -> list[str]:
    """Every key of the schema, dotted."""
    return [
        key
        for name in Recipe.model_fields
        for key in (
            [f"{name}.{key}" for key in SECTIONS[name].model_fields] if name in SECTIONS else [name]
        )
    ]


def affected_by(key: str) -> frozenset[Effect]:
    """The effects of a dotted key. A section has the effects of all its keys."""
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        return marked(Recipe.model_fields[section].metadata)
    fields = SECTIONS[section].model_fields
    if not name:
        return frozenset().union(*(marked(field.metadata) for field in fields.values()))
    name = name.partition(".")[0]
    return marked(fields[name].metadata) if name in fields else EXTRAS.get(name, EVERYTHING)


def affecting(values: Mapping[str, Any], section: str, *effects: Effect) -> dict[str, Any]:
    """The values of a section that have one of these effects and that the strategy does not
    contain."""
    return {
        key: value
        for key, value in values.items()
        if "planned" not in (own := affected_by(f"{section}.{key}")) and own & {*effects}
    }


def leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys and their values."""
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= (
            leaves(item, f"{prefix}{key}.")
            if isinstance(item, Mapping)
            else {f"{prefix}{key}": item}
        )
    return result
