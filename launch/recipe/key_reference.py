"""Every key of a recipe with its type, default and meaning, and the key that a wrong name means.

Source: the schema's fields, and TrainingArguments' fields for the other keys of `training:`."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from launch.base.text import nearest
from launch.recipe import training_arguments
from launch.recipe.strict_yaml import plain
from launch.schema.data_section import DataSource
from launch.schema.levers import CheckpointingKwargs
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS

# a name of other programs -> the key of the recipe
ALIASES = {
    **dict.fromkeys(("lr", "learn_rate"), "training.learning_rate"),
    **dict.fromkeys(
        ("batch", "batch_size", "bs", "train_batch_size", "micro_batch_size", "batch_size_per_gpu"),
        "training.per_device_train_batch_size",
    ),
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "n_epochs"), "training.num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps"), "training.max_steps"),
    **dict.fromkeys(
        ("accumulation", "grad_accum", "gradient_accum", "accumulation_steps"),
        "training.gradient_accumulation_steps",
    ),
    **dict.fromkeys(("workers", "num_workers"), "training.dataloader_num_workers"),
    **dict.fromkeys(("optimizer",), "training.optim"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "training.lr_scheduler_type"),
    **dict.fromkeys(("warmup",), "training.warmup_steps"),
    **dict.fromkeys(("wd",), "training.weight_decay"),
    **dict.fromkeys(("clip", "grad_clip", "gradient_clipping"), "training.max_grad_norm"),
    **dict.fromkeys(
        ("seq_len", "max_seq_len", "max_seq_length", "block_size", "context_length", "cutoff_len"),
        "data.max_length",
    ),
    **dict.fromkeys(("data", "dataset", "data_path", "train_data"), "data.train_file"),
    **dict.fromkeys(("eval_file", "val_file", "validation_data"), "data.validation_file"),
    **dict.fromkeys(
        (
            *("val_size", "val_set_size", "test_size", "eval_size", "holdout"),
            *(
                f"{part}_{share}"
                for part in ("val", "validation", "eval", "test")
                for share in ("split", "ratio", "fraction", "rows")
            ),
        ),
        "data.validation_size",
    ),
    **dict.fromkeys(("model", "model_path", "model_name_or_path", "base_model"), "model.path"),
    **dict.fromkeys(("tokenizer", "tokenizer_path"), "tokenizer.path"),
    **dict.fromkeys(
        ("template", "prompt_template", "conversation_template", "chat_format"),
        "tokenizer.chat_template",
    ),
    **dict.fromkeys(("output", "out"), "output_dir"),
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node"), "launch.num_processes"),
    **dict.fromkeys(("lora", "rank", "lora_r", "lora_rank"), "lora.r"),
    **dict.fromkeys(("qlora", "use_4bit"), "quantization.load_in_4bit"),
    "additional_target": "lora.modules_to_save",
}
_BOUNDS = {Ge: "at least", Gt: "more than", Le: "at most", Lt: "less than"}
_TYPES = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text"},
    **{DataSource: "{path, weight, columns}"},
    **{CheckpointingKwargs: "{every_n_layers, offload, ...}"},
}


@dataclass(frozen=True)
class Key:
    """A key of the recipe with texts for people."""

    name: str  # section.key, or a key of the top level
    type: str
    default: str
    meaning: str


def all_keys() -> Iterator[Key]:
    """Yield every key in the order of the schema. Keys of the top level come first."""
    for name, field in Recipe.model_fields.items():
        if name not in SECTIONS:
            yield _key(name, field)
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            yield _key(f"{section}.{name}", field)
        if section == "training":
            for name, field in training_arguments.free().items():
                if name not in model.model_fields:
                    yield Key(
                        f"training.{name}",
                        training_arguments.takes(name, field.types),
                        field.default,
                        field.meaning,
                    )


def _key(name: str, field: FieldInfo) -> Key:
    kind = _type(field.annotation)
    bounds = [
        f"{_BOUNDS[type(bound)]} {getattr(bound, type(bound).__name__.lower()):.15g}"
        for bound in field.metadata
        if type(bound) in _BOUNDS
    ]
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    value = {} if isinstance(value, BaseModel) else value
    default = "none: it must be given" if field.is_required() else plain(value)
    return Key(name, ", ".join([kind, *bounds]), default, field.description or "")


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(kind) for kind in inner if kind is not type(None))
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin is tuple:
        return f"a [list] of {_type(inner[0])}"
    if any(isinstance(mark, Tag) for mark in inner):
        return _type(inner[0])
    if hasattr(annotation, "__metadata__"):  # PositiveInt
        return f"{_type(inner[0])}, more than 0"
    return _TYPES.get(annotation, str(annotation))


# ---- the key that a wrong name means
# ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def by_last_part() -> Mapping[str, str]:
    """The full name of each last part: learning_rate -> training.learning_rate. The first key in
    the schema's order wins."""
    return {key.name.rpartition(".")[2]: key.name for key in reversed([*all_keys()])}


def likely(name: str, section: str = "") -> str | None:
    """The key that a wrong name means: a near name in its own section, a key with the same last
    part in another section, or the key with this name in other programs."""
    in_section = [key.name for key in all_keys() if key.name.startswith(f"{section}.")]
    last = name.rpartition(".")[2].lower().replace("-", "_")
    if f"{section}.{last}" in in_section:
        return f"{section}.{last}"
    if last in by_last_part() or last in ALIASES:
        return by_last_part().get(last) or ALIASES[last]
    near = nearest(last, [key.rpartition(".")[2] for key in in_section])
    return f"{section}.{near[0]}" if near else None
