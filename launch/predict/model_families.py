"""The parameters and the family of a model that is not counted from its config: a child builds it
on the meta device, once for each config and version of transformers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.base import environment, files
from launch.base.errors import ConfigError, LaunchError
from launch.base.text import shown
from launch.base.workspace import CODE
from launch.predict.parameters import Shapes
from launch.schema.plan import ModelFamily
from launch.schema.result import ModelParts

FORM = 2  # of a stored ModelParts; raised with each new field
CHILD = (sys.executable, "-P", "-m", "training.children.model_parts")


def read(config: Mapping[str, Any], file: Path, cache: Path) -> tuple[Shapes, ModelFamily]:
    """(name and shape of every parameter, family) of the model that transformers builds from a
    config, from the cache or from a child. `file`: where the config is from.

    Raises ConfigError for a config that transformers cannot build."""
    text = json.dumps(dict(config), sort_keys=True)
    identity = f"{version('transformers')} {find_spec('bitsandbytes') is not None} {FORM} {text}"
    stored = cache / "model_parts" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    parts = files.read_or_none(stored, ModelParts)
    if parts is None:
        done = subprocess.run(
            CHILD,
            input=text.encode(),
            env=environment.passed(os.environ) | {"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            check=False,
        )
        if done.returncode == ConfigError.exit_code:
            raise ConfigError(f"{file}: {done.stdout.decode(errors='replace')}")
        if done.returncode:
            sys.stderr.write(shown(done.stderr.decode(errors="replace")))
            raise LaunchError(
                f"the child that builds the model of {file} ended with {done.returncode}, see above"
            )
        stored.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(stored, done.stdout.decode())
        parts = files.read(stored, ModelParts)
    assert parts is not None
    return parts.parameters, parts.family
