"""Finished models as `evaluate` and scripts/chat.py find them: folders, and types and bytes of the
weights."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.base import files, modules
from launch.base.errors import ResourceError
from launch.base.workspace import FILES, Workspace
from launch.commands.model import merge
from launch.predict import optimizers
from launch.predict.models import model_config, weight_files
from launch.schema.model_sections import (
    DTYPE_BYTES,
    LoraSection,
    ModelSection,
    QuantizationSection,
)
from launch.schema.result import ExportedModel, FinishedModel


def find(source: Path) -> FinishedModel:
    """The model of a run, or in a folder, whose files are as they should be. Raises
    ResourceError."""
    folder = merge.source_folder(source).absolute()
    if not any((folder / name).is_file() for name in ("config.json", merge.ADAPTER)):
        raise ResourceError(
            f"{folder}: no model here; give the folder that the run printed, or a run folder"
        )
    base = folder
    if (folder / merge.ADAPTER).is_file():
        base = merge.base_of(folder)
        model_config.check_adapter(folder)
    model_config.check_folder(base)
    tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    is_adapter = folder != base
    adapter = files.read_or_none(folder / "lowmem.json", ExportedModel) if is_adapter else None
    dtype = (adapter.dtype if adapter else None) or _dtype(base)
    return FinishedModel(folder, base, tokenizer, dtype, _quantization(base, dtype, adapter))


def _dtype(base: Path) -> Any:
    """The type of a folder's weights, as transformers decides it."""
    config = weight_files.read_json(base / "config.json")
    named = config.get("dtype") or config.get("torch_dtype")
    stored = weight_files.stored_weights(base)
    elements = stored.elements if stored else {}
    types = (named, *sorted(elements, key=elements.__getitem__, reverse=True), "float32")
    return next(each for each in types if each in DTYPE_BYTES)


def _quantization(
    base: Path, dtype: str, adapter: ExportedModel | None
) -> Mapping[str, Any] | None:
    """The section of the recipe if the base of an adapter was quantised in training; that of the
    base if its weights are packed."""
    if adapter and adapter.quantization:
        return adapter.quantization
    packing = weight_files.packing(base)
    if packing is None:
        return None
    config = weight_files.read_json(base / "config.json")["quantization_config"]
    compute = config.get("bnb_4bit_compute_dtype")
    compute = compute if compute in DTYPE_BYTES else dtype
    return {"load_in_4bit": True, "bnb_4bit_compute_dtype": compute, **asdict(packing)}


def weights_bytes(finished: FinishedModel) -> int:
    """The bytes that the weights take in memory, with adapters as a recipe has them by default."""
    section = ModelSection(path=str(finished.base), dtype=finished.dtype)
    _, parameters, family = model_config.read(section, root=FILES, cache=Workspace.here().cache)
    quantization = finished.quantization
    return optimizers.model_state(
        parameters,
        (),
        LoraSection() if finished.is_adapter or quantization else None,
        family,
        "sgd",
        finished.dtype,
        QuantizationSection.model_validate(quantization) if quantization else None,
    ).weights_bytes


def leave_out_unused(*models: FinishedModel) -> None:
    """Make optional packages look as if they were not installed: transformers would import them,
    which takes half of the time to the first answer."""
    used = {
        "peft": any(each.is_adapter for each in models),
        "bitsandbytes": any(each.quantization for each in models),
    }
    modules.leave_out(package for package in modules.OPTIONAL if not used.get(package))
