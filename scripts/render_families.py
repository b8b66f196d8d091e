#!/usr/bin/env python3
"""Write configs/model_families.json: the forward passes of the families whose parameters are
counted, as the installed transformers builds them, and the kernels that the installed liger-kernel
has for each type of text model. Those of other versions stay."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launch.base import files
from launch.predict.models.model_families import COMMITTED
from launch.predict.parameters import FAMILIES
from training.compat import liger_private
from training.levers import liger
from training.trace.model_parts import model_parts

TEXT = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SIZES = {"head_dim": 128, "num_key_value_heads": 8}


def forward_passes() -> dict[str, Any]:
    """The facts on each family's forward pass, by its name."""
    families = {name: model_parts({"model_type": name}).family for name in sorted(FAMILIES)}
    return {name: asdict(family.forward) for name, family in families.items()}


def liger_kernels() -> dict[str, list[str]]:
    """The kernels that Liger puts into modules of each type of text model, by the keys of
    training.liger_kernel_config."""
    configs = map(config_of, set(liger_private.types()) & TEXT.keys())
    return {
        config.model_type: [
            kernel
            for kernel in liger_private.switches(config.model_type)
            if has_kernel(config, kernel)
        ]
        for config in sorted(configs, key=lambda config: config.model_type)
        if not hasattr(config, "vision_config")
    }


def config_of(model_type: str) -> Any:
    """The config of a type, with sizes where its own names none."""
    values = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: size for key, size in SIZES.items() if values.get(key, size) is None}
    return AutoConfig.for_model(model_type, **sizes)


def has_kernel(config: Any, kernel: str) -> bool:
    """True if Liger puts this kernel into a module of a config's model."""
    only = dict.fromkeys(liger_private.switches(config.model_type), False) | {kernel: True}
    # Liger's patch of a type may want names that another transformers has
    with suppress(ImportError), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return bool(liger.patch(model, only))
    return False


def main() -> None:
    made = {
        "transformers": (version("transformers"), forward_passes()),
        "liger_kernel": (version("liger-kernel"), liger_kernels()),
    }
    committed = files.read(COMMITTED, dict[str, Any]) or {}
    content = {
        package: {**committed.get(package, {}), installed: facts}
        for package, (installed, facts) in made.items()
    }
    files.write_json(COMMITTED, content)


if __name__ == "__main__":
    main()
