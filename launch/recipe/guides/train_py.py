"""The flags of scripts/train.py become a recipe's name and overrides: --mode pretrain|sft --config
medium|large of the A6000 guide, or --config FILE.yaml of the A5000 guide. Values are written as
--name=value or --name value, and keys of a recipe are accepted too.

That YAML (sections model, data, training, lora, quantization, environment, logging) becomes the
recipe lora_sft. An unknown key is an error, and a note is printed for each key that has another
meaning here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError
from launch.base.files import expanded
from launch.base.text import nearest
from launch.base.workspace import FILES, Workspace
from launch.recipe import training_arguments
from launch.recipe.guides.chatlm_flags import Request, read
from launch.recipe.key_reference import ALIASES
from launch.recipe.load import Override
from launch.recipe.paths import PATH_KEYS, absolute
from launch.recipe.strict_yaml import (
    KeyPath,
    check_choice,
    parse_value,
    plain,
    read_yaml,
    show,
    wrong,
)
from launch.schema.model_sections import LoraSection
from launch.schema.training_section import TrainingSection

MODES = ("pretrain", "sft")
SIZES = ("medium", "large")
VALUES = ("mode", "config")
SWITCHES = ("cpu", "dry_run")
RECIPE = "lora_sft"
_LENGTH: dict[str, str] = dict.fromkeys(("max_seq_length", "max_length"), "data.max_length")
_LOGS: dict[str, str] = dict.fromkeys(("log_dir", "logging_dir"), "log_dir")
KEYS: Mapping[str, Mapping[str, str]] = {  # section -> its key -> the recipe's
    "model": {
        "torch_dtype": "model.dtype",
        "attn_implementation": "model.attn_implementation",
        **_LENGTH,
    },
    "data": {
        "train_file": "data.train_file",
        "validation_file": "data.validation_file",
        "eval_file": "data.validation_file",
        **{
            alias: key
            for alias, key in {**ALIASES, "validation_size": "data.validation_size"}.items()
            if key == "data.validation_size"
        },
        "max_train_samples": "data.max_train_samples",
        "max_eval_samples": "data.max_validation_samples",
        "max_bad_rows": "data.max_bad_rows",
        **{
            f"{role}_column": f"data.{role}_column"
            for role in ("prompt", "response", "text", "messages")
        },
        **_LENGTH,
    },
    "training": {"output_dir": "output_dir", **_LENGTH, **_LOGS},
    "lora": {key: f"lora.{key}" for key in LoraSection.model_fields},
    "quantization": {
        "use_4bit": "quantization.load_in_4bit",
        "load_in_4bit": "quantization.load_in_4bit",
        "bnb_4bit_quant_type": "quantization.bnb_4bit_quant_type",
        "bnb_4bit_compute_dtype": "quantization.bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant": "quantization.bnb_4bit_use_double_quant",
        "use_nested_quant": "quantization.bnb_4bit_use_double_quant",
    },
    "environment": {"num_gpus": "launch.num_processes"},
    "logging": _LOGS,
}
_MODEL_NAMES = ("name_or_path", "model_name_or_path", "model_name")
# sections with TrainingArguments' own names
_TAKES_TRAINING = ("training", "environment", "logging")
# Keys with a single allowed value, which changes nothing here, and the reason for it.
FIXED: Mapping[tuple[str, str], tuple[Any, str]] = {
    ("model", "trust_remote_code"): (False, "code that comes with a model is never run"),
    ("lora", "bias"): ("none", "LoRA trains no biases here"),
    ("lora", "task_type"): (
        "CAUSAL_LM",
        "the model says whether it is a decoder or a T5; leave it out",
    ),
    ("quantization", "use_8bit"): (False, "weights have 4 bits or 16; use use_4bit"),
    ("quantization", "load_in_8bit"): (False, "weights have 4 bits or 16; use use_4bit"),
    ("environment", "parallel_mode"): (
        "data_parallel",
        "several GPUs share out the rows, or model states (launch.mode)",
    ),
    ("environment", "tensor_parallel_size"): (
        1,
        "a layer is not split over GPUs; ZeRO and FSDP2 are (launch.mode)",
    ),
    ("training", "metric_for_best_model"): (
        "eval_loss",
        "the held-out loss says which model is best",
    ),
    ("training", "greater_is_better"): (False, "the lowest held-out loss is best"),
    ("training", "save_strategy"): ("steps", "checkpoints are counted in steps; use save_steps"),
}


def translate(argv: Sequence[str]) -> Request:
    """The request that the flags stand for. Raises ConfigError."""
    flags = read(argv, "train.py", SWITCHES, dict.fromkeys(VALUES, ""))
    values, typed_keys = flags.values, flags.overrides
    config = values.get("config")
    if config is not None and config.endswith((".yaml", ".yml")):
        if "mode" in values:
            raise ConfigError(
                f"--mode={show(values['mode'])[1:-1]}: found it beside a YAML file, which says"
                " itself what to train; leave it out"
            )
        recipe, overrides, notes = translate_yaml(config)
    else:
        has_model = any(key.startswith(("--model.shape=", "--model.path=")) for key in typed_keys)
        recipe, overrides, notes = _built_in(values.get("mode"), config, has_model)
    cpu, dry_run = (flags.switches.get(name, False) for name in SWITCHES)
    return Request(recipe, (*overrides, *typed_keys), flags.resume or "auto", cpu, notes, dry_run)


def _built_in(
    mode: str | None, size: str | None, has_model: bool
) -> tuple[str, tuple[Override, ...], tuple[str, ...]]:
    """The recipe of --mode and --config. A typed size names the model. Without it the size is
    medium, or that of the recipe if there is no GPU."""
    if mode is None:
        raise ConfigError(
            f"--mode: found nothing, expected one of {', '.join(MODES)}, or --config=FILE.yaml"
        )
    check_choice(f"--mode={show(mode)[1:-1]}", mode, MODES)
    if size is not None:
        check_choice(f"--config={show(size)[1:-1]}", size, SIZES, " or a .yaml file")
    name = f"minigpt_{size or SIZES[0]}" + ("_sft" if mode == "sft" else "")
    if size is None or has_model:
        return name, (), ()
    return name, (Override(f"--model.shape=minigpt-{size}", f"--config={size}"),), ()


# ---- the YAML
# ---------------------------------------------------------------------------


def translate_yaml(config: str) -> tuple[str, tuple[Override, ...], tuple[str, ...]]:
    """(recipe, overrides, notes on differences) of the file as typed. Raises ConfigError."""
    file = expanded(config)
    if not file.exists() and not file.is_absolute() and (FILES / file).exists():
        file = FILES / file  # the guide's path, typed in another folder
    content, where = read_yaml(file)
    # paths in the shipped file are relative to the workspace, in other files to the current folder
    base = Workspace.here().root if file.resolve().is_relative_to(FILES / "config") else Path.cwd()
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: found {show(content)}, expected the sections {', '.join(KEYS)}")
    overrides: dict[str, Override] = {}
    notes: list[str] = []
    for section, values in content.items():
        place = where[(section,)]
        if section not in KEYS:
            near = "".join(f"did you mean {name}?" for name in nearest(section, KEYS))
            raise wrong(place, (section,), "an unknown section", f"one of {', '.join(KEYS)}", near)
        if not isinstance(values, dict | None):
            raise wrong(place, (section,), show(values), "a section: keys below it")
        for key, value in (values or {}).items():
            place = where[(section, key)]
            for target, text, note in _translated(section, key, value, place):
                if target in overrides:
                    advice = f"also at {overrides[target].typed}"
                    raise wrong(place, (section, key), f"{target} twice", "it once", advice)
                if target in PATH_KEYS and text is not None:
                    text = absolute(text if isinstance(text, list) else str(text), base)
                typed = f"{place}: {section}.{key}"
                overrides[target] = Override(f"--{target}={_written(text)}", typed)
                notes += [f"{typed}: {note}"] if note else []
    if not {"model.shape", "model.path"} & overrides.keys():
        notes.append(
            f"{file}: model.name_or_path is not set: the recipe's own shape, with random weights;"
            " name a folder of a downloaded model"
        )
    return RECIPE, tuple(overrides.values()), tuple(notes)


def _translated(section: str, key: str, value: Any, place: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (recipe key, value, note on a difference) for a key. A key without an effect yields
    nothing."""
    name = training_arguments.RENAMED.get(key, key)
    key_path: KeyPath = (section, key)
    if (section, key) in FIXED:
        only, reason = FIXED[section, key]
        if value != only and value != [only]:
            raise wrong(place, key_path, show(value), plain(only), reason)
    elif section == "model" and key in _MODEL_NAMES:
        if not isinstance(value, str) or not value:
            raise wrong(place, key_path, show(value), "a folder, or a name of configs/models")
        is_shape = (FILES / "configs" / "models" / f"{value}.yaml").is_file() and not Path(
            value
        ).is_dir()
        note = (
            "a shape of configs/models: random weights, which shows what fits; name a folder to"
            " fine-tune a model"
        )
        yield ("model.shape", value, note) if is_shape else ("model.path", value, "")
    elif section == "lora" and key == "enabled":
        if not isinstance(value, bool):
            raise wrong(place, key_path, show(value), "true or false")
        if not value:
            yield "lora", None, ""
    elif key == "warmup_ratio" and section in _TAKES_TRAINING:
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise wrong(
                place, key_path, show(value), "a share of all steps: at least 0 and less than 1"
            )
        yield (
            "training.warmup_steps",
            value,
            f"training.warmup_steps={value}, which below 1 is a share of all steps",
        )
    elif key in ("eval_strategy", "evaluation_strategy") and section in _TAKES_TRAINING:
        if value not in ("steps", "epoch", "no"):
            raise wrong(place, key_path, show(value), "steps, epoch or no")
        if value == "no":
            yield "data.validation_file", None, "data.validation_file=null: nothing is held out"
            yield "data.validation_size", None, ""
    elif key in KEYS[section]:
        target = KEYS[section][key]
        yield (
            target,
            value,
            "" if target.rpartition(".")[2] == key else f"{target}={plain(value)}",
        )
    elif section in _TAKES_TRAINING and (
        name in TrainingSection.model_fields or name in training_arguments.free()
    ):
        yield f"training.{name}", value, ""
    else:
        raise wrong(place, key_path, "an unknown key", f"a key of {section}", _hint(section, key))


def _hint(section: str, key: str) -> str:
    """Advice for an unknown key: the section that has it, or the nearest key."""
    instead = training_arguments.instead(key)
    if section in _TAKES_TRAINING and instead:
        return instead
    own = _names()[section]
    section_of = {
        **{name: other for other, names in _names().items() for name in names},
        **dict.fromkeys(own, section),
    }
    for name in (key, *nearest(key, own), *nearest(key, section_of)):
        if name in section_of:
            return f"did you mean {section_of[name]}.{name}?"
    return f"there are {', '.join(own)}"


def _names() -> dict[str, list[str]]:
    """The names of every section's keys. TrainingArguments' fields are under training."""
    names = {
        section: [*targets, *(key for fixed_in, key in FIXED if fixed_in == section)]
        for section, targets in KEYS.items()
    }
    names["model"] += _MODEL_NAMES
    names["lora"].append("enabled")
    names["training"] += [
        *(*TrainingSection.model_fields, "warmup_ratio", "eval_strategy"),
        *training_arguments.free(),
    ]
    return names


def _written(value: Any) -> str:
    """The value as a recipe's command line reads it back."""
    if isinstance(value, str) and parse_value(value, (), "") == value:
        return value
    return json.dumps(value, ensure_ascii=False)
