"""The section `training` of a recipe."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from launch.schema.levers import LeverKeys
from launch.schema.section import AFFECTS_STEP, affects, as_tuple

Precision = Literal["no", "bf16", "fp16"]


# Values of TrainingArguments.report_to
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
TENSORBOARD: Tracker = "tensorboard"


# Values of TrainingArguments.optim: those whose states are counted (launch/predict/optimizers.py)
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_8bit",
    "rmsprop_bnb_8bit",
    "paged_adamw_32bit",
    "lion_32bit",
    "paged_lion_32bit",
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
]


_Schedule = Literal[
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
# The keywords that a schedule needs, one of them at least. Source:
# get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule of transformers 5.23
_SCHEDULE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


# switches in liger_kernel_config that replace the loss
LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


COMPILE_KEYS = ("torch_compile_backend", "torch_compile_mode")


class TrainingSection(LeverKeys):
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
    lr_scheduler_type: Annotated[_Schedule, affects("weights")] = Field(
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
    label_smoothing_factor: Annotated[float, AFFECTS_STEP] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each target that all tokens of the vocabulary have alike, in the"
        " training loss; the held-out loss is without it.",
    )
    optim: Annotated[Optimizer, AFFECTS_STEP] = Field(
        default="adamw_torch_fused", description="Optimizer, by TrainingArguments' name."
    )
    bf16: Annotated[bool, affects("weights", "memory", "step_time", "planned")] = Field(
        default=False, description="Train under bfloat16 autocast."
    )
    fp16: Annotated[bool, affects("weights", "memory", "step_time", "planned")] = Field(
        default=False, description="Train under float16 autocast with loss scaling."
    )
    logging_steps: Annotated[int, affects("interruptions")] = Field(
        default=10, ge=1, description="Optimizer steps between two log lines."
    )
    report_to: Annotated[tuple[Tracker, ...], affects("interruptions")] = Field(
        default=(TENSORBOARD,),
        description="Trackers that get the figures besides the run folder: tensorboard, wandb,"
        " mlflow, trackio, swanlab; none: no tracker.",
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
    early_stopping_patience: Annotated[int | None, affects("weights")] = Field(
        default=None,
        ge=1,
        description="Stop when the held-out loss has not fallen below its lowest in so many"
        " evaluations. null: never.",
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

    @field_validator("report_to", mode="before")
    @classmethod
    def a_name_or_several(cls, value: Any) -> Any:
        return () if value in (None, "none", ["none"]) else as_tuple(value)

    @field_validator("max_steps")
    @classmethod
    def trains_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError(
                "0 trains nothing; give a positive number, or -1 to train num_train_epochs"
            )
        return value

    def _faults(self) -> Sequence[tuple[object, str]]:
        names = _SCHEDULE_NUMBERS.get(self.lr_scheduler_type, ())
        options = self.extras.get("lr_scheduler_kwargs") or {}
        has_number = isinstance(options, dict) and any(
            options.get(name) is not None for name in names
        )
        return [
            (self.bf16 and self.fp16, "bf16 and fp16 are both true; choose one"),
            (
                (self.learning_rate_scaling == "none") != (self.learning_rate_batch_size is None),
                f"learning_rate_scaling is {self.learning_rate_scaling} and"
                f" learning_rate_batch_size {self.learning_rate_batch_size or 'not given'}; set"
                " both: how the rate grows with the effective batch, and the effective batch that"
                " learning_rate is for",
            ),
            (
                names and not has_number,
                f"lr_scheduler_type {self.lr_scheduler_type} needs {' or '.join(names)}; write"
                f" lr_scheduler_kwargs: {{{''.join(names[-1:])}: ...}} under training: in a recipe"
                " file",
            ),
        ]

    def learning_rate_at(self, effective_batch_size: int) -> float:
        """The peak learning rate, scaled if the recipe says so (linear: arXiv:1706.02677; sqrt:
        arXiv:2205.10287)."""
        ratio = effective_batch_size / (self.learning_rate_batch_size or effective_batch_size)
        return (
            self.learning_rate
            * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.learning_rate_scaling]
        )

    @property
    def samples_per_process(self) -> int:
        """The samples of an optimizer step that each process takes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def extras(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def compiles(self) -> bool | None:
        """True if torch.compile is asked for, None if that is left open. A backend or a mode asks
        for it too, as in TrainingArguments."""
        return any(self.extras.get(key) for key in COMPILE_KEYS) or self.torch_compile
