"""TrainingArguments' fields that a recipe does not type: their types, and the fields that have no
effect here.

They are read from the source of the installed transformers, which is not imported.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launch.base.text import did_you_mean
from launch.recipe.strict_yaml import mend, plain, show
from launch.schema.recipe_keys import HONOURED
from launch.schema.training_section import TrainingSection

_CHECKPOINTS = (
    "the launcher writes and finds its own checkpoints: --resume=auto, --resume=PATH,"
    " --resume=never"
)
_SUMMED = "an evaluation adds up losses, and keeps no predictions"
_MEASURED = "held-out rows are measured by their loss, and with evaluation.exact_match_rows"
_EVALUATED = "an evaluation computes as training does: training.bf16, training.fp16, model.dtype"
_PUBLISH = "publish the finished folder yourself: hf upload NAME FOLDER"
UNREAD = "the installed transformers has it, but nothing here reads it"
OWNED = {  # TrainingArguments' fields that have no effect here -> what to use instead
    "output_dir": "use the top-level output_dir",
    "deepspeed": "use launch.mode",
    "fsdp": "use launch.mode",
    "fsdp_config": "use launch.mode",
    "local_rank": "ranks are numbered by accelerate; use launch.num_processes",
    "ddp_backend": "use launch.mode=dual_gpu_nccl or dual_gpu_gloo",
    "use_cpu": "use launch.mode=cpu",
    "accelerator_config": "use launch.mode",
    "parallelism_config": "use launch.mode",
    "auto_find_batch_size": (
        "per_device_train_batch_size is fitted before the start and the effective batch is held"
    ),
    "resume_from_checkpoint": _CHECKPOINTS,
    "enable_jit_checkpoint": "checkpoints are written every save_steps",
    "metric_for_best_model": "the held-out loss says which model is best",
    "greater_is_better": "the lowest held-out loss is best",
    "overwrite_output_dir": _CHECKPOINTS,
    "save_strategy": "checkpoints are counted in steps; use save_steps",
    "ignore_data_skip": "a resumed run goes on with the next sample",
    "train_sampling_strategy": "the order of samples comes from the seed; use data.group_by_length",
    "length_column_name": (
        "lengths are counted when the rows are tokenised; use data.group_by_length"
    ),
    "dataloader_drop_last": "every sample counts, also the last few",
    "warmup_ratio": "use warmup_steps; below 1 it is a share of all steps",
    "push_to_hub": _PUBLISH,
    "logging_dir": "logs are in the run folder and in logs/",
    "disable_tqdm": "progress is one line per logging_steps",
    "eval_strategy": "held-out rows are evaluated every eval_steps, or once an epoch",
    "evaluation_strategy": "held-out rows are evaluated every eval_steps, or once an epoch",
    "remove_unused_columns": "rows are tokenised before, and have no other columns",
    "logging_nan_inf_filter": "a NaN ends the run",
    "do_train": "use task",
    "do_eval": "use data.validation_file, or data.validation_size",
    "do_predict": "use evaluation.exact_match_rows",
    "average_tokens_across_devices": (
        "the loss of a step is the mean over its target tokens on all ranks"
    ),
    "batch_eval_metrics": _MEASURED,
    "bf16_full_eval": _EVALUATED,
    "data_seed": "the order of samples comes from training.seed",
    "dataloader_in_order": "batches come in the order of the seed, so that a run can be resumed",
    "dataloader_multiprocessing_context": "workers are forked, so that they share the rows",
    "debug": "a NaN ends the run in any case, and its rows are named",
    "eval_accumulation_steps": _SUMMED,
    "eval_do_concat_batches": _SUMMED,
    "eval_use_gather_object": _SUMMED,
    "fp16_full_eval": _EVALUATED,
    "include_for_metrics": _MEASURED,
    "include_num_input_tokens_seen": (
        "the tokens of each step are counted in any case, in events.jsonl"
    ),
    "label_names": "the targets of every row are its labels",
    "log_on_each_node": "rank 0 of the first machine writes the log of all",
    "optim_target_modules": (
        "none of the optimizers of training.optim takes it; lora.target_modules names the layers"
        " that get adapters"
    ),
    "prediction_loss_only": _SUMMED,
    "restore_callback_states_from_checkpoint": (
        "early stopping goes on counting where the checkpoint has stopped"
    ),
    "save_on_each_node": "all machines write one checkpoint, into the run folder that they share",
    "save_only_model": (
        "a checkpoint without optimizer, schedule and random states cannot be continued; the model"
        " alone is in output_dir"
    ),
    "skip_memory_metrics": "the peak memory of each phase is measured in any case",
    "use_cache": "training has no use for a cache, and answers turn it on for themselves",
}
# transformers 5.23 renamed these fields, and version 6 drops the old names: old -> new
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_LOG_LEVELS = ("passive", "detail", "debug", "info", "warning", "error", "critical")
# field that is annotated as a text -> the texts that transformers and torch.compile take
_CHOICES = {
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
    "logging_strategy": ("no", "steps", "epoch"),
    "torch_compile_mode": (
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ),
}
_TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a [list]",
}


def instead(key: str) -> str | None:
    """The reason why a field has no effect here, or what to use instead; None if it has one, or is
    no field."""
    if key in OWNED or key.startswith("hub_"):
        return OWNED.get(key, _PUBLISH)
    is_read = key in HONOURED or key in TrainingSection.model_fields
    return UNREAD if key in installed() and not is_read else None


@dataclass(frozen=True)
class Field:
    """A field of TrainingArguments, as its source declares it."""

    types: frozenset[str]  # the alternatives of its annotation
    default: str
    meaning: str


@lru_cache(maxsize=1)
def installed() -> Mapping[str, Field]:
    """TrainingArguments' fields, from the installed source; {} if transformers is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "training_args.py").read_text(
        encoding="utf-8"
    )
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields: dict[str, Field] = {}
    for node in classes["TrainingArguments"].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            options = (
                {option.arg: option.value for option in node.value.keywords}
                if isinstance(node.value, ast.Call)
                else {}
            )
            fields[node.target.id] = Field(
                frozenset(_alternatives(node.annotation)),
                _default(options.get("default")),
                _meaning(options.get("metadata")),
            )
    for old, new in RENAMED.items():
        if old in fields:  # an older transformers has the old names only
            fields.setdefault(new, fields.pop(old))
    return fields


def free() -> dict[str, Field]:
    """The installed fields that have an effect."""
    return {name: field for name, field in installed().items() if instead(name) is None}


def _default(value: ast.expr | None) -> str:
    return (plain(value.value) or '""') if isinstance(value, ast.Constant) else "by transformers"


def _meaning(metadata: ast.expr | None) -> str:
    """The help text of a field, on one line."""
    if not isinstance(metadata, ast.Dict):
        return ""
    texts = (
        str(value.value)
        for key, value in zip(metadata.keys, metadata.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "help" and isinstance(value, ast.Constant)
    )
    return " ".join("".join(texts).replace("%%", "%").split())


def _alternatives(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    else:
        yield ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def wrong_type(key: str, value: Any) -> tuple[str, str, str] | None:
    """(actual, expected, advice) if an installed field does not take this value."""
    types, choices = installed()[key].types, _CHOICES.get(key, ())
    if choices and value is not None and value not in choices:
        near = did_you_mean(str(value), choices).removeprefix("; ")
        return show(value), f"one of {', '.join(choices)}", near
    name = type(value).__name__
    accepted_by = {"NoneType": {"None"}, "int": {"int", "float"}}.get(name, {name})
    # TrainingArguments itself checks enumerations and Literals
    if accepted_by & types or not types <= {*_TYPES, "dict", "None"}:
        return None
    expected = takes(key, types)
    return show(value), expected, mend(value, expected)


def takes(key: str, types: frozenset[str]) -> str:
    """A description of the values that a field of these types takes."""
    if key in _CHOICES:
        return " | ".join(_CHOICES[key])
    return " or ".join(text for name, text in _TYPES.items() if name in types) or "a mapping"
