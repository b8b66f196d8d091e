"""The trainings of gpu_speed: cases, ways of training them, and groups that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_speed_hook import Segments
from launch.schema.machine import CUDNN_LAST

CONFIGS = Path(__file__).resolve().parent.parent / "configs/models"
# words of the tokenizer that benchmarks/gpu_speed_bundle.py trains, and of the models
VOCABULARY, MODEL_VOCABULARY = 8192, 8256
SEED = 5
LORA = {"r": 16, "lora_alpha": 32}
# a decoder of Llama 7B's width
WIDE: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
NARROW = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
NARROW |= {"num_hidden_layers": 2}
KIND_WORDS = {"ours": "ours", "plain": "plain Trainer", "trl": "TRL, Liger", "unsloth": "Unsloth"}


def shape(name: str) -> Mapping[str, Any]:
    """The configuration of a model of configs/models."""
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Case:
    """A model, its rows and the cut of a step, which all ways have in common."""

    name: str
    about: str
    config: Mapping[str, Any]
    rows: str  # RECORDS.parquet for ours, and tokenised RECORDS.arrow for peers
    batch: int
    max_length: int
    segments: Segments
    packed_batch: int = 0
    lora: Mapping[str, Any] = field(default_factory=dict)
    four_bit: bool = False
    checkpointing: bool = False
    task: str = "sft"

    def model(self) -> dict[str, Any]:
        return {**self.config, "vocab_size": MODEL_VOCABULARY}

    def training(self) -> dict[str, Any]:
        """Values that TrainingArguments and our recipes call by the same names."""
        return {
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": 1,
            "learning_rate": 2e-4,
            "lr_scheduler_type": "linear",
            "optim": "adamw_torch_fused",
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "bf16": True,
            "seed": SEED,
            "logging_steps": 10,
        }

    def small(self) -> Case:
        """The case for a rehearsal on a few cores."""
        is_gpt2 = self.config["model_type"] == "gpt2"
        less = {"n_layer": 2, "n_embd": 256, "n_head": 4} if is_gpt2 else NARROW
        if "num_key_value_heads" in self.config:
            less = {**less, "num_key_value_heads": 2}
        config = {**self.config, **less}
        config.pop("head_dim", None)
        segments = replace(self.segments, warm=2, timed=2, profiled=1)
        return replace(self, config=config, batch=2, packed_batch=2, segments=segments)


CASES = {
    case.name: case
    for case in (
        Case(
            "c1",
            "full, qwen2.5-0.5b, vocabulary 8192, gsm8k, 512",
            shape("qwen2.5-0.5b"),
            *("gsm", 32, 512, Segments(10, 12, 3, 3)),
            packed_batch=12,
        ),
        Case(
            "c2",
            "LoRA r16, llama3.2-1b, vocabulary 8192, gsm8k, 512",
            shape("llama3.2-1b"),
            *("gsm", 16, 512, Segments(10, 12, 3, 3)),
            packed_batch=6,
            lora=LORA,
        ),
        Case(
            "c3",
            "QLoRA r16, llama 7B width, 8 layers, rows of 2048, checkpointing",
            WIDE,
            *("long", 4, 2048, Segments(6, 6, 3, 3)),
            lora=LORA,
            four_bit=True,
            checkpointing=True,
        ),
        Case(
            "c4",
            "pretraining, gpt2-small, vocabulary 8192, packed 1024",
            shape("gpt2-small"),
            *("text", 16, 1024, Segments(8, 10, 3, 3)),
            task="pretrain",
        ),
    )
}


@dataclass(frozen=True)
class Way:
    """A trainer and how it is set beside its case."""

    kind: str  # ours, or of gpu_speed_peer.KINDS
    # of ours: values of a recipe's sections; None leaves a section out
    sections: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # a peer's TrainingArguments
    environment: Mapping[str, str] = field(default_factory=dict)
    is_packed: bool = False


@dataclass(frozen=True)
class Training:
    """One training that is measured."""

    name: str
    case: Case
    way: Way
    reserved_gb: float  # about what it holds of a card

    @property
    def is_ours(self) -> bool:
        return self.way.kind == "ours"

    @property
    def batch(self) -> int:
        return self.case.packed_batch if self.way.is_packed else self.case.batch

    def recipe(self, data: Path, model: Path, folder: Path) -> dict[str, Any]:
        """Our recipe of it; `folder` receives what is made."""
        case, sections = self.case, dict(self.way.sections)
        checkpointing = {"activation_checkpointing": True} if case.checkpointing else {}
        content: dict[str, Any] = {
            "model": {"path": str(model), **({"dtype": "bfloat16"} if case.lora else {})},
            "tokenizer": {"loading": "file"},  # whatever the model's type: all train one file
            "data": {
                "train_file": str(data / f"{case.rows}.parquet"),
                "max_length": case.max_length,
                **({"packing": True} if self.way.is_packed or case.task == "pretrain" else {}),
            },
            "training": {
                **case.training(),
                **checkpointing,
                "per_device_train_batch_size": self.batch,
                "max_steps": case.segments.max_steps,
                "save_steps": 9999,
                "report_to": ["none"],
            },
            # a step may wait at a gate for minutes
            "launch": {"mode": "single_gpu", "max_restarts": 0, "hang_floor_s": 3600},
            **({"lora": {**case.lora}} if case.lora else {}),
            **({"quantization": {"load_in_4bit": True}} if case.four_bit else {}),
        }
        for section, values in sections.items():
            if values is None:
                del content[section]
            else:
                content[section] = {**content.get(section, {}), **values}
        return {
            "name": self.name,
            "task": case.task,
            **content,
            "output_dir": str(folder / "trained"),
        }

    def asked(self, data: Path, model: Path, folder: Path) -> dict[str, Any]:
        """The case as gpu_speed_peer reads it."""
        case = self.case
        training = {**case.training(), "per_device_train_batch_size": self.batch}
        return {
            "kind": self.way.kind,
            "model": str(model),
            "tokenizer": str(data / "tokenizer"),
            "rows": str(data / f"{case.rows}.arrow"),
            "folder": str(folder),
            "max_length": case.max_length,
            "lora": dict(case.lora),
            "four_bit": case.four_bit,
            "checkpointing": case.checkpointing,
            "training": training,
            "arguments": dict(self.way.arguments),
        }


def ours(
    environment: Mapping[str, str] | None = None, packed: bool = False, **sections: Any
) -> Way:
    return Way("ours", sections, environment=environment or {}, is_packed=packed)


# cuDNN's attention compiles a plan for each shape of a batch: ours puts it last, and so do peers
# here where the shapes of batches change
LAST = {CUDNN_LAST: "1"}
FIRST = {CUDNN_LAST: "0"}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
LIGER = {"use_liger_kernel": True}
GROUPED = {"group_by_length": True}
OURS_LIGER = {"training": LIGER}
BF16_ADAPTERS = {"lora": {"autocast_adapter_dtype": False}}
COMPILED = {"training": {"torch_compile": True}}


@dataclass(frozen=True)
class Group:
    """Trainings that are on the card together and take turns."""

    name: str
    trainings: Sequence[Training]
    warm_up_s: float = 75  # until the last of them has loaded and is warm

    def parts(self, card_gb: float) -> Iterator[Group]:
        """The group in parts that a card holds; one of a single training takes what it takes."""
        part: list[Training] = []
        for training in self.trainings:
            if part and sum(one.reserved_gb for one in [*part, training]) > card_gb:
                yield replace(self, trainings=tuple(part))
                part = []
            part.append(training)
        if part:
            yield replace(self, trainings=tuple(part))


def group(name: str, *trainings: tuple[str, Way, float], warm_up_s: float = 75) -> Group:
    """A group of trainings; each one's name begins with that of its case."""
    made = [
        Training(name, CASES[name.partition("-")[0]], way, reserved_gb)
        for name, way, reserved_gb in trainings
    ]
    return Group(name, tuple(made), warm_up_s)


# in the order of their worth
GROUPS = (
    group(
        "c3",
        ("c3-ours", ours(), 7),
        ("c3-plain", Way("plain"), 9),
        ("c3-trl-liger", Way("trl", arguments=LIGER), 7),
        ("c3-unsloth", Way("unsloth"), 6),
    ),
    group(
        "c3 levers",
        ("c3-ours-again", ours(), 7),
        ("c3-ours-liger", ours(**OURS_LIGER), 6),
        ("c3-ours-bf16-adapters", ours(**BF16_ADAPTERS), 7),
        ("c3-ours-cudnn-first", ours(FIRST), 7),
        ("c3-ours-liger-bf16-adapters", ours(**OURS_LIGER, **BF16_ADAPTERS), 6),
        ("c3-ours-lora-16-bit", ours(quantization=None), 10),
        (
            "c3-ours-no-checkpointing",
            ours(training={"activation_checkpointing": False}),
            30,
        ),
    ),
    group(
        "c2",
        ("c2-ours-grouped", ours(data=GROUPED), 19),
        ("c2-plain", Way("plain", arguments=BY_LENGTH, environment=LAST), 23),
        ("c2-trl-liger", Way("trl", arguments={**BY_LENGTH, **LIGER}, environment=LAST), 19),
        ("c2-unsloth", Way("unsloth", arguments=BY_LENGTH, environment=LAST), 11),
    ),
    group(
        "c2 levers",
        ("c2-ours-grouped-again", ours(data=GROUPED), 19),
        ("c2-ours-grouped-liger", ours(data=GROUPED, **OURS_LIGER), 16),
        ("c2-ours-grouped-bf16-adapters", ours(data=GROUPED, **BF16_ADAPTERS), 16),
        ("c2-ours-packed", ours(packed=True), 14),
    ),
    group(
        "c1",
        ("c1-ours-grouped", ours(data=GROUPED), 36),
        ("c1-plain", Way("plain", arguments=BY_LENGTH, environment=LAST), 38),
        ("c1-trl-liger", Way("trl", arguments={**BY_LENGTH, **LIGER}, environment=LAST), 31),
    ),
    group(
        "c1 levers",
        ("c1-ours", ours(), 33),
        ("c1-ours-grouped-liger", ours(data=GROUPED, **OURS_LIGER), 29),
        ("c1-ours-packed", ours(packed=True), 18),
        ("c1-ours-by-tokens", ours(data={"batch_by_tokens": True}), 33),
    ),
    group(
        "c4 and others",
        ("c4-ours", ours(), 19),
        ("c4-plain", Way("plain"), 19),
        ("c4-ours-compiled", ours(**COMPILED), 15),
        ("c1-ours-8-bit-states", ours(data=GROUPED, training={"optim": "adamw_8bit"}), 32),
        warm_up_s=100,
    ),
    # the compiler takes minutes for quantized layers under checkpointing
    group(
        "c3 compiled",
        ("c3-ours-beside-compiled", ours(), 7),
        ("c3-ours-compiled", ours(**COMPILED), 8),
        warm_up_s=240,
    ),
)
