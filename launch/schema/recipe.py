"""The recipe: every key that a user can set, checked strictly."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from launch.schema.data_section import DataSection
from launch.schema.model_sections import (
    DTYPE_BYTES,
    LoraSection,
    ModelSection,
    QuantizationSection,
    TokenizerSection,
)
from launch.schema.run_sections import (
    EvaluationSection,
    LaunchSection,
    NumericsSection,
    ResumeSection,
)
from launch.schema.section import Section, affects, as_tuple
from launch.schema.training_section import Precision, TrainingSection

_Concession = Literal["optimizer", "quantization", "lora.r", "data.max_length"]


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
    allow: Annotated[tuple[_Concession, ...], BeforeValidator(as_tuple), affects("plan")] = Field(
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
                "4-bit weights cannot be trained; add LoRA (--lora.r=16), or take a model in 16 or"
                " 32 bits without load_in_4bit"
            )
        return value

    def _faults(self) -> Sequence[tuple[object, str]]:
        training, launch, is_adapter = self.training, self.launch, self.lora and self.model.path
        unmet, count = self._lacks_for_streaming(), launch.num_processes or launch.nodes
        return [
            (
                training.load_best_model_at_end and not self.data.holds_out,
                "training.load_best_model_at_end needs data.validation_file or"
                " data.validation_size: held-out rows say what is best",
            ),
            (
                training.early_stopping_patience is not None and not self.data.holds_out,
                f"training.early_stopping_patience {training.early_stopping_patience} needs"
                " data.validation_file or data.validation_size: the loss on held-out rows says when"
                " to stop",
            ),
            (
                is_adapter and self.model.tie_word_embeddings is not None,
                "model.tie_word_embeddings beside lora: an adapter is loaded on the folder as it"
                " is, and would lose a head of its own; leave one of the two out",
            ),
            (
                is_adapter and self.model.output_dtype,
                "model.output_dtype beside lora: the adapter is saved in its own type, and"
                " `python -m launch merge` writes the base's; leave one of the two out",
            ),
            (
                self.task == "pretrain" and self.data.truncation_side == "left",
                "data.truncation_side: left is for task: sft; pretraining splits long texts and"
                " truncates none",
            ),
            (
                self.data.streaming and unmet,
                f"data.streaming: true needs {'; '.join(unmet)}",
            ),
            (
                count % launch.nodes,
                f"launch.num_processes {count} cannot be shared evenly by launch.nodes"
                f" {launch.nodes}; write a multiple of {launch.nodes}"
                f"{self.keeping(training.samples_per_process * count, count, count)}",
            ),
        ]

    def _lacks_for_streaming(self) -> list[str]:
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
            "no data.validation_size (a stream is not counted before it is trained; name other rows"
            " with data.validation_file)": self.data.validation_size is None,
            "no training.dataloader_num_workers (processes of its own tokenise)": (
                not self.training.dataloader_num_workers
            ),
        }
        return [need for need, is_met in needs.items() if not is_met]

    def keeping(self, effective_batch_size: int, asked: int, most: int) -> str:
        """The end of a refusal: flags with which at most `most` processes, instead of `asked`, take
        equal parts of an effective batch, and its factors; "" if no number of them can."""
        training, launch = self.training, self.launch
        count = next(
            (
                count
                for count in range(most, 0, -1)
                if count % launch.nodes == 0 and effective_batch_size % count == 0
            ),
            None,
        )
        if count is None:
            return ""
        part = effective_batch_size // count
        rows = next(
            size for size in range(training.per_device_train_batch_size, 0, -1) if part % size == 0
        )
        wanted = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": part // rows}
        named = launch.named_mode
        alone = (
            count == 1
            and named is not None
            and (named.processes == "several" or named.engine == "fsdp2")
        )
        flags = [
            "--launch.mode=auto" if alone else "",
            "" if count == asked else f"--launch.num_processes={count}",
            *(
                f"--training.{key}={value}"
                for key, value in wanted.items()
                if getattr(training, key) != value
            ),
        ]
        return (
            f"; {' '.join(filter(None, flags))} keeps the effective batch of"
            f" {effective_batch_size}: {rows} per device x {part // rows} accumulation x {count}"
            f" process{'' if count == 1 else 'es'}"
        )

    @property
    def keeps_ids(self) -> bool:
        """True if the special ids in the configs of model.path are those of the tokenizer."""
        path = self.model.path
        return path is not None and self.tokenizer.path in (None, path)

    def output_dtype(self, config: Mapping[str, Any]) -> str:
        """The type of the weights of the exported model. `config` is the model's config.json."""
        model, of_base = self.model, config.get("dtype") or config.get("torch_dtype")
        is_known = model.path is not None and of_base in DTYPE_BYTES
        return model.output_dtype or (str(of_base) if is_known else model.dtype)

    @property
    def trains_model_dtype(self) -> bool:
        """True if weights are trained in model.dtype: adapters are float32 by default, but not the
        copies of lora.modules_to_save."""
        lora = self.lora
        return lora is None or bool(lora.modules_to_save) or not lora.autocast_adapter_dtype

    def quantized(self, precision: Precision) -> QuantizationSection | None:
        """The quantization with its compute dtype: by default the type that autocast gives the
        layers."""
        if self.quantization is None:
            return None
        autocast = {"bf16": "bfloat16", "fp16": "float16", "no": self.model.dtype}[precision]
        compute_dtype = self.quantization.bnb_4bit_compute_dtype or autocast
        return self.quantization.model_copy(update={"bnb_4bit_compute_dtype": compute_dtype})
