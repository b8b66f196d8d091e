"""TrainingArguments' fields that a recipe does not type: their types, and the fields that the
launcher sets.

They are read from the source of the installed transformers, which is not imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launch.recipe.strict_yaml import mend, plain, show

_MICRO_BATCH = (
    "per_device_train_batch_size is fitted before the start and the effective batch is held"
)
_CHECKPOINTS = (
    "the launcher writes and finds its own checkpoints: --resume=auto, --resume=PATH,"
    " --resume=never"
)
_PUBLISH = "publish the finished folder yourself: hf upload NAME FOLDER"
OWNED = {  # TrainingArguments' fields that the launcher sets -> what to use instead
    "output_dir": "use the top-level output_dir",
    "deepspeed": "use launch.mode",
    "fsdp": "use launch.mode",
    "fsdp_config": "use launch.mode",
    "local_rank": "ranks are numbered by accelerate; use launch.num_processes",
    "ddp_backend": "use launch.mode=dual_gpu_nccl or dual_gpu_gloo",
    "use_cpu": "use launch.mode=cpu",
    "accelerator_config": "use launch.mode",
    "parallelism_config": "use launch.mode",
    "auto_find_batch_size": _MICRO_BATCH,
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
}
# transformers 5.23 renamed these fields, and version 6 drops the old names: old -> new
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a [list]",
}


def instead(key: str) -> str | None:
    """Advice on what to use instead of a field that the launcher sets; None if it does not set
    it."""
    return OWNED.get(key) or (_PUBLISH if key.startswith("hub_") else None)


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
            fields.setdefault(new, fields[old])
            del fields[old]
    return fields


def free() -> dict[str, Field]:
    """The installed fields that the launcher does not set."""
    return {name: field for name, field in installed().items() if instead(name) is None}


def _default(value: ast.expr | None) -> str:
    return (plain(value.value) or '""') if isinstance(value, ast.Constant) else "by transformers"


def _meaning(metadata: ast.expr | None) -> str:
    """The help text of a field, on one line."""
    if not isinstance(metadata, ast.Dict):
        return ""
    texts = {
        ast.unparse(key): value
        for key, value in zip(metadata.keys, metadata.values, strict=True)
        if key
    }
    value = texts.get("'help'")
    text = value.value if isinstance(value, ast.Constant) else ""
    return " ".join(str(text).replace("%%", "%").split())


def _alternatives(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    else:
        yield ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def wrong_type(key: str, value: Any) -> tuple[str, str, str] | None:
    """(actual, expected, advice) if an installed field does not take this value."""
    types = installed()[key].types
    name = type(value).__name__
    accepted_by = {"NoneType": {"None"}, "int": {"int", "float"}}.get(name, {name})
    # TrainingArguments itself checks enumerations and Literals
    if accepted_by & types or not types <= {*_TYPES, "dict", "None"}:
        return None
    expected = takes(types)
    return show(value), expected, mend(value, expected)


def takes(types: frozenset[str]) -> str:
    """A description of the values that a field of these types takes."""
    return " or ".join(text for name, text in _TYPES.items() if name in types) or "a mapping"
