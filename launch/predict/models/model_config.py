"""A model's config and parameters, from configs/models/<name>.yaml or from a local Hugging Face
folder, read without torch.

Of weights only the safetensors headers are read. Nothing a folder names is executed or downloaded.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from launch.base.errors import ConfigError, LaunchError, ResourceError
from launch.base.files import expanded
from launch.base.text import suggestion
from launch.predict import optimizers
from launch.predict import parameters as predict_parameters
from launch.predict.models import model_families, weight_files
from launch.schema.model_sections import ModelSection
from launch.schema.plan import ModelFamily

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
ENDS_BYTES = 1024  # of a file that is looked at
_HARMLESS_PRIVATE_KEYS = ("_name_or_path", "_attn_implementation")  # the second with any ending
# private keys that save_pretrained() of transformers 5.23 writes itself, and the type of each
_SAVED_PRIVATE_KEYS = {"_remove_final_layer_norm": bool, "_sliding_window_pattern": int}
_MAX_LAYERS = 10_000  # the deepest models have some hundred
LAYERS = re.compile(r"(^|_)(num|n)_(\w+_)?layers?$")
_OTHER_ELEMENTS = 1.02  # weights may hold tables that are no parameters, and lack tied copies
_QUANTIZATION = "quantization_config"  # key of a config.json


def read(
    model: ModelSection, vocab_size: int | None = None, *, root: Path, cache: Path
) -> tuple[dict[str, Any], predict_parameters.Shapes, ModelFamily]:
    """(config, name and shape of every parameter, family) of the model that a recipe names.
    `vocab_size`: the vocabulary really used, if it is not the config's. `cache`: the folder in
    which the parts of models of other types than FAMILIES are kept.

    Raises ConfigError (an unknown model, a size that is none) and ResourceError (a folder that
    cannot be loaded)."""
    changes: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    if model.shape is not None:
        config = _named_config(model.shape, root / "configs" / "models") | changes
        config |= _asked_tie(model, config, model.shape)
        return config, *_parts(config, root / "configs" / "models" / f"{model.shape}.yaml", cache)
    folder = root / expanded(model.path or "")
    config = _folder_config(folder)
    model_families.check_type(config, folder / "config.json")
    tensors = weight_files.tensors(folder)
    changes |= _asked_tie(model, config, str(folder))
    config.pop(_QUANTIZATION, None)  # the recipe has a section for it
    if tensors is None:  # a config without weights: the model starts from random ones
        return config | changes, *_parts(config | changes, folder / "config.json", cache)
    expected, family = _parts(config, folder / "config.json", cache)
    if config["model_type"] in predict_parameters.FAMILIES:
        tensors = _by_name(tensors, expected, family, folder)
        expected, family = _parts(config | changes, folder / "config.json", cache)
    else:
        _check_elements(tensors, expected, family, folder)
        if vocab_size not in (None, config.get("vocab_size")):
            expected = _grown(expected, config, vocab_size, folder)
    _check_packed(tensors, expected, family, folder)
    # transformers keeps a tied pair apart where the file holds both and they differ (google/flan-t5
    # and google/mt5 do)
    untied_shapes = {
        name: expected[source]
        for name, source in predict_parameters.ties(expected, family).items()
        if {name, source} <= tensors.keys()
        and not weight_files.same_bytes(tensors[name], tensors[source])
    }
    return config | changes, expected | untied_shapes, family


def _parts(
    config: dict[str, Any], file: Path, cache: Path
) -> tuple[predict_parameters.Shapes, ModelFamily]:
    """The parameters of a config's model, and its family."""
    if config["model_type"] in predict_parameters.FAMILIES:
        family = replace(
            predict_parameters.family(config),
            forward=model_families.read_forward(config, file, cache),
        )
        tensor_shapes = predict_parameters.parameters_by_name(config)
    else:
        tensor_shapes, family = model_families.read(config, file, cache)
    return tensor_shapes, replace(family, liger=model_families.liger_kernels(config["model_type"]))


def _check_elements(
    tensors: Mapping[str, weight_files.Tensor],
    expected: predict_parameters.Shapes,
    family: ModelFamily,
    folder: Path,
) -> None:
    """Raise ResourceError if weights whose names transformers changes when it loads them (experts,
    prefixes) cannot be the config's model."""
    stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
    tied = sum(math.prod(expected[source]) for source in family.tied.values())
    needed = predict_parameters.total_elements(expected)
    if not needed <= stored * _OTHER_ELEMENTS or stored > (needed + tied) * _OTHER_ELEMENTS:
        raise ResourceError(
            f"{folder}: its weights have {stored:,} elements, the model of config.json has"
            f" {needed:,}; the two do not belong together: copy the model again"
        )


def _check_packed(
    tensors: Mapping[str, weight_files.Tensor],
    expected: predict_parameters.Shapes,
    family: ModelFamily,
    folder: Path,
) -> None:
    """Raise ResourceError if some of the linear weights are packed in 4 bits, and others are
    not."""
    packed = {name: math.prod(each.shape) for name, each in tensors.items() if each.packing}
    all_of_them = {
        name: math.prod(shape)
        for name, shape in expected.items()
        if name.endswith(".weight") and optimizers.has_4_bits(name, family)
    }
    counts = sum(packed.values()), sum(all_of_them.values())
    if packed and counts[0] != counts[1]:
        other = next(iter(all_of_them.keys() - packed.keys()), "another one")
        raise ResourceError(
            f"{folder}: bitsandbytes has packed {counts[0]:,} of the {counts[1]:,} weights of its"
            f" linear layers in 4 bits, without {other}; expected all of them but the output head:"
            " take the model in 16 or 32 bits"
        )


def _by_name(
    tensors: dict[str, weight_files.Tensor],
    expected: predict_parameters.Shapes,
    family: ModelFamily,
    folder: Path,
) -> dict[str, weight_files.Tensor]:
    """The weights by their names in the model. Raises ResourceError if they are not the config's
    model."""
    for prefix in ("model.", "transformer."):  # weights of the bare model: openai-community/gpt2
        tensors = {
            prefix + name if name not in expected and prefix + name in expected else name: tensor
            for name, tensor in tensors.items()
        }
    for name, source in predict_parameters.ties(expected, family).items():
        if source not in tensors and name in tensors:
            tensors[source] = tensors[name]
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ResourceError(
            f"{folder}: its weights lack {len(missing)} of the {len(expected)} parameters"
            f" config.json describes, e.g. {missing[0]}; the two do not belong together: copy the"
            " model again"
        )
    for name, shape in expected.items():
        tensor = tensors[name]
        # bitsandbytes packs the matrices of Conv1D as those of linears
        is_turned = family.has_conv1d and tensor.packing
        if tensor.shape != (shape[::-1] if is_turned else shape):
            raise ResourceError(
                f"{folder}: {name} has shape {list(tensor.shape)} in {tensor.file.name},"
                f" {list(shape)} by config.json; the two do not belong together: copy the model"
                " again"
            )
    return tensors


def _asked_tie(model: ModelSection, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The key of a config that model.tie_word_embeddings changes. Raises ConfigError for a model
    whose head can be neither tied nor untied."""
    asked, model_type = model.tie_word_embeddings, config["model_type"]
    if asked is None:
        return {}
    key = f"model.tie_word_embeddings: {str(asked).lower()}"
    if model_type not in predict_parameters.UNTIED_HEADS:
        raise ConfigError(
            f"{key}, but {name} is a {model_type}; known for"
            f" {', '.join(predict_parameters.UNTIED_HEADS)}; leave it out"
        )
    if asked and model.path and not predict_parameters.family(config).ties_head:
        raise ConfigError(
            f"{key}, but {name} has an output head of its own, which would be lost; leave it out"
        )
    return {"tie_word_embeddings": asked}


def _grown(
    tensor_shapes: predict_parameters.Shapes,
    config: Mapping[str, Any],
    vocab_size: int,
    folder: Path,
) -> predict_parameters.Shapes:
    """The parameters of a family of which only the weights are known, with rows for `vocab_size`
    tokens. Raises ConfigError if it is not clear which parameters grow."""
    rows = tensor_shapes[predict_parameters.embedding(tensor_shapes)][0]
    grow = predict_parameters.of_tokens(tensor_shapes)
    others = [
        name for name, shape in tensor_shapes.items() if shape[:1] == (rows,) and name not in grow
    ]
    if others or config.get("vocab_size") != rows:
        reason = (
            f"{others[0]} has a row for each token too"
            if others
            else (f"config.json says {config.get('vocab_size')}")
        )
        raise ConfigError(
            f"{folder}: the tokenizer has {vocab_size:,} tokens, the embeddings of model_type"
            f" {config['model_type']!r} have {rows:,} rows, and how they grow is not known"
            f" ({reason}); name at most as many tokens in tokenizer.add_tokens as rows are free"
        )
    return {
        name: (vocab_size, *shape[1:]) if name in grow else shape
        for name, shape in tensor_shapes.items()
    }


def check_folder(folder: Path) -> None:
    """Refuse a model folder that brings code, weights that are pickles, or weights that are damaged
    or missing.

    Raises ResourceError. Whoever opens a folder asks this first; training asks read(), which checks
    the same."""
    if not folder.is_dir():
        raise ResourceError(f"{folder}: there is no such folder; give the folder of a model")
    _folder_config(folder)
    if weight_files.tensors(folder) is None:
        raise ResourceError(
            f"{folder}: has a config.json, but no weights beside it; copy the model again"
        )


def _refuse_special(folder: Path) -> None:
    """Raise ResourceError for a FIFO or a device among a folder's files: some readers wait for it,
    others do as if it were not there."""
    for path in folder.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ResourceError(f"{path}: is no regular file; copy the folder again")


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer that brings code, or whose files are damaged. Raises ResourceError."""
    _refuse_special(folder)
    file = folder / "tokenizer_config.json"
    config = weight_files.read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise ResourceError(
            f"{file}: holds {type(config).__name__}, not a mapping of keys to values; copy the"
            " tokenizer again"
        )
    if "auto_map" in config:
        raise ResourceError(
            f"{file}: auto_map asks for code that comes with the tokenizer (trust_remote_code),"
            " which is never run; remove auto_map, or give another --tokenizer.path=FOLDER"
        )
    file = folder / "tokenizer.json"
    if file.is_file() and not _is_object(file):
        raise ResourceError(f"{file}: is no JSON object, or was cut; copy the tokenizer again")


def _is_object(file: Path) -> bool:
    """True if a file begins and ends as a JSON object does; one of 30 MB is not parsed."""
    with file.open("rb") as stream:
        begin = stream.read(ENDS_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(max(file.stat().st_size - ENDS_BYTES, 0))
        return begin.startswith(b"{") and stream.read().rstrip().endswith(b"}")


def check_adapter(folder: Path) -> None:
    """Refuse a LoRA adapter without safetensors: peft would open a pickle in their place. Raises
    ResourceError."""
    if (folder / _ADAPTER_WEIGHTS).is_file():
        weight_files.file_tensors(folder / _ADAPTER_WEIGHTS)
        return
    others = sorted(path.name for path in folder.glob("adapter_model.*"))
    weights = f"its weights are {others[0]}" if others else "it has no weights"
    raise ResourceError(
        f"{folder}: {weights}; expected {_ADAPTER_WEIGHTS}, for only safetensors are read"
    )


# ---- config
# ---------------------------------------------------------------------------


def _named_config(name: str, folder: Path) -> dict[str, Any]:
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in names:
        raise ConfigError(
            f"model.shape: there is no {name!r} in {folder}; {suggestion(name, names)}; all:"
            f" {', '.join(names)}"
        )
    file = folder / f"{name}.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    return _checked(config, file, ConfigError)


def _folder_config(folder: Path) -> dict[str, Any]:
    try:
        kind = "folder" if folder.is_dir() else "file" if folder.exists() else "nothing"
    except OSError as error:  # a name too long, a parent that may not be entered
        raise ResourceError(f"model.path: {folder} cannot be opened: {error.strerror}") from error
    if kind == "nothing":
        siblings = (
            sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
            if folder.parent.is_dir()
            else []
        )
        hint = f"; {suggestion(folder.name, siblings)}" if siblings else ""
        raise ResourceError(
            f"model.path: there is no folder {folder}{hint}. It is a folder on this machine;"
            " nothing is downloaded without --download: with that, OWNER/NAME is a model of"
            f" huggingface.co: --model.path={'/'.join(folder.parts[-2:])} --download"
        )
    if kind == "file":
        raise ResourceError(
            f"model.path: {folder} is a file; give the folder that holds config.json and the"
            " weights"
        )
    _refuse_special(folder)
    file = folder / "config.json"
    if not file.is_file():
        fix = (
            "it is a LoRA adapter; give the folder of its base model, or merge the adapter into it"
            if (folder / "adapter_config.json").is_file()
            else "give a folder written by save_pretrained()"
        )
        raise ResourceError(f"{folder}: has no config.json; {fix}")
    generation = folder / "generation_config.json"
    if generation.is_file() and not isinstance(weight_files.read_json(generation), dict):
        raise ResourceError(f"{generation}: is no mapping of keys to values; copy the model again")
    return _checked(weight_files.read_json(file), file, ResourceError)


def _checked(config: Any, file: Path, error: type[LaunchError]) -> dict[str, Any]:
    """The config, if it is a mapping that neither runs nor downloads code."""
    if not isinstance(config, dict):
        raise error(f"{file}: holds {type(config).__name__}, not a mapping of keys to values")
    for key, value in config.items():
        if LAYERS.search(str(key)) and isinstance(value, int) and value > _MAX_LAYERS:
            raise error(f"{file}: {key} is {value:,}, expected at most {_MAX_LAYERS:,}; mend it")
    if not isinstance(config.get("model_type"), str):
        raise error(f"{file}: has no model_type; add it, e.g. model_type: llama")
    if _QUANTIZATION in config and not _is_packed(config[_QUANTIZATION]):
        raise error(
            f"{file}: {_QUANTIZATION}: of quantised weights, only linear ones of 4 bits that"
            " bitsandbytes has packed can be trained, under LoRA; take the model in 16 or 32 bits"
        )
    _refuse_code(config, file, error)
    return config


def _is_packed(quantization: Any) -> bool:
    """True if bitsandbytes has packed the linear weights in 4 bits, in bytes."""
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "bitsandbytes"
        and quantization.get("load_in_4bit") is True
        and quantization.get("bnb_4bit_quant_storage", "uint8") == "uint8"
    )


def _refuse_code(config: Mapping[str, Any], file: Path, error: type[LaunchError]) -> None:
    """Keys that make transformers import code of the folder's, or of a repository that the folder
    names."""
    for key, value in config.items():
        if key == "auto_map":
            raise error(
                f"{file}: auto_map asks for code that comes with the model (trust_remote_code),"
                " which is never run; use a model type that transformers has itself, and remove"
                " auto_map"
            )
        is_own = str(key).startswith("__") or str(key) in model_families.private_names()
        if (is_own and not str(key).startswith(_HARMLESS_PRIVATE_KEYS)) or (
            type(value) is not _SAVED_PRIVATE_KEYS.get(key, type(value))
        ):
            raise error(
                f"{file}: the private key {key!r} would override transformers' own; remove it"
            )
        named = value.values() if isinstance(value, dict) else [value]
        if "implementation" in str(key) and any(
            "/" in name for name in named if isinstance(name, str)
        ):
            raise error(
                f"{file}: {key} {value!r} would download code; remove it, or write sdpa or eager"
            )
        if isinstance(value, dict):
            _refuse_code(value, file, error)


def unread_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """The private keys of a config and of those inside it that no config of transformers reads:
    other programs leave them there."""
    for key, value in config.items():
        is_read = key in _SAVED_PRIVATE_KEYS or str(key).startswith(_HARMLESS_PRIVATE_KEYS)
        if str(key).startswith("_") and not is_read:
            yield str(key)
        if isinstance(value, Mapping):
            yield from unread_keys(value)
