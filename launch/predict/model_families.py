"""The parameters and the family of a model that is not counted from its config: a child builds it
on the meta device, once for each config and version of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.base import files, processes
from launch.base.errors import ConfigError
from launch.predict.parameters import Shapes
from launch.schema.plan import ModelFamily
from launch.schema.result import ModelParts

FORM = 2  # of a stored ModelParts; raised with each new field


def read(config: Mapping[str, Any], file: Path, cache: Path) -> tuple[Shapes, ModelFamily]:
    """(name and shape of every parameter, family) of the model that transformers builds from a
    config, from the cache or from a child. `file`: where the config is from.

    Raises ConfigError for a config that transformers cannot build."""
    text = json.dumps(dict(config), sort_keys=True)
    identity = f"{version('transformers')} {find_spec('bitsandbytes') is not None} {FORM} {text}"
    stored = cache / "model_parts" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    parts = files.read_or_none(stored, ModelParts)
    if parts is None:
        try:
            printed = processes.ask_child(
                "model_parts", [], text.encode(), f"builds the model of {file}"
            )
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        stored.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(stored, printed.decode())
        parts = files.read(stored, ModelParts)
    assert parts is not None
    return parts.parameters, parts.family
