"""Keys of a recipe, dotted, and what each affects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from launch.schema.affects import EVERYTHING, Effect, marked
from launch.schema.data_section import DataSection
from launch.schema.model_sections import (
    LoraSection,
    ModelSection,
    QuantizationSection,
    TokenizerSection,
)
from launch.schema.recipe import Recipe
from launch.schema.run_sections import (
    EvaluationSection,
    LaunchSection,
    NumericsSection,
    ResumeSection,
)
from launch.schema.training_section import TrainingSection

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
