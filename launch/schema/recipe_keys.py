"""Keys of a recipe, dotted, and what each affects."""

from collections.abc import Mapping
from typing import Any, get_args

from launch.schema.recipe import Recipe
from launch.schema.section import EVERYTHING, Effect, Section, marked

# a section's type, also of one that may be None
SECTIONS: Mapping[str, type[Section]] = {
    name: kind
    for name, field in Recipe.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))
    if isinstance(kind, type) and issubclass(kind, Section)
}


# Fields of TrainingArguments without a field here that training reads -> the test that shows it, in
# tests/unit/training/loop/test_honoured_fields.py. All others are refused by name
# (launch/recipe/training_arguments.py).
HONOURED: Mapping[str, str] = {
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
        "test_the_optimizer_takes_its_numbers",
    ),
    "lr_scheduler_kwargs": "test_the_schedule_takes_its_numbers",
    **dict.fromkeys(("tf32", "liger_kernel_config"), "test_the_kernels_are_those_asked_for"),
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"),
        "test_the_layers_are_compiled_as_asked_for",
    ),
    **dict.fromkeys(
        ("neftune_noise_alpha", "torch_empty_cache_steps"), "test_a_step_does_what_is_asked_for"
    ),
    **dict.fromkeys(
        ("eval_delay", "eval_on_start", "logging_first_step", "logging_strategy"),
        "test_evaluations_and_logs_come_when_asked_for",
    ),
    **dict.fromkeys(
        ("dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        "test_the_loader_is_the_one_asked_for",
    ),
    **dict.fromkeys(
        (
            "ddp_broadcast_buffers",
            "ddp_bucket_cap_mb",
            "ddp_find_unused_parameters",
            "ddp_static_graph",
        ),
        "test_ddp_takes_its_keywords",
    ),
    "ddp_timeout": "test_the_ranks_wait_for_each_other_as_long_as_asked_for",
    "full_determinism": "test_the_kernels_are_deterministic",
    **dict.fromkeys(("log_level", "log_level_replica"), "test_transformers_logs_at_its_level"),
    **dict.fromkeys(
        ("project", "run_name", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        "test_a_tracker_gets_its_names",
    ),
}


# Keys of TrainingArguments that have no field here and do not affect everything.
EXTRAS: Mapping[str, frozenset[Effect]] = {
    # refused in new recipes; runs that older versions began may have it
    "average_tokens_across_devices": frozenset({"weights"}),
    "tf32": frozenset({"weights", "step_time", "planned"}),
    "liger_kernel_config": frozenset({"weights", "memory", "step_time"}),
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
            "logging_first_step",
            "logging_strategy",
            "project",
            "run_name",
            "trackio_bucket_id",
            "trackio_space_id",
            "trackio_static_space_id",
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
    """The effects of a dotted key. A section has the effects of all its keys; a key that is no
    longer taken, which a run begun earlier may have, has none."""
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        return marked(Recipe.model_fields[section].metadata)
    fields = SECTIONS[section].model_fields
    if not name:
        return frozenset().union(*(marked(field.metadata) for field in fields.values()))
    name = name.partition(".")[0]
    if name in fields:
        return marked(fields[name].metadata)
    is_read = name in HONOURED or section != "training"
    return EXTRAS.get(name, EVERYTHING if is_read else frozenset())


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
