"""The parameters and the family of a model that is not counted from its config, and the forward
pass of one that is: a child builds it on the meta device, once for each config and version of
transformers. configs/model_families.json has the forward passes of the counted families, and the
kernels that liger-kernel has for a type."""

import functools
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import ConfigError
from launch.base.workspace import FILES
from launch.data.worker import WORKER, ReadParts
from launch.predict.parameters import Shapes
from launch.schema.plan import ForwardFacts, ModelFamily
from launch.schema.result import ModelParts

_FORM = 5  # format of a stored ModelParts; raised with each new field

COMMITTED = FILES / "configs" / "model_families.json"


@dataclass(frozen=True)
class _Committed:
    """The content of COMMITTED, as scripts/render_families.py writes it: facts by version."""

    transformers: dict[str, dict[str, ForwardFacts]]  # version -> counted family -> its facts
    # version -> type of text models -> the kernels that Liger has for it
    liger_kernel: dict[str, dict[str, tuple[str, ...]]]


def read_forward(config: Mapping[str, Any], file: Path, cache: Path) -> ForwardFacts:
    """The forward pass of a counted family: as committed for the installed transformers, or as a
    child finds it. Where transformers is not installed, it is that of the last version.

    Raises ConfigError for a config that another transformers cannot build."""
    committed = _committed().transformers
    installed = _installed("transformers", committed)
    if installed not in committed:
        return read(config, file, cache)[1].forward
    return committed[installed][config["model_type"]]


def liger_kernels(model_type: str) -> tuple[str, ...]:
    """The kernels that liger-kernel has for a type: those of the installed version, or of the last
    version that is committed."""
    committed = _committed().liger_kernel
    installed = _installed("liger-kernel", committed)
    return committed.get(installed, [*committed.values()][-1]).get(model_type, ())


def _installed(package: str, committed: Mapping[str, Any]) -> str:
    """The installed version of a package, or the last one that is committed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return [*committed][-1]


@functools.cache
def _committed() -> _Committed:
    facts = files.read(COMMITTED, _Committed)
    assert facts, f"{COMMITTED} is missing"
    return facts


def read(config: Mapping[str, Any], file: Path, cache: Path) -> tuple[Shapes, ModelFamily]:
    """(name and shape of every parameter, family) of the model that transformers builds from a
    config, from the cache or from a child. `file`: where the config is from.

    Raises ConfigError for a config that transformers cannot build."""
    text = json.dumps(dict(config), sort_keys=True)
    identity = f"{version('transformers')} {find_spec('bitsandbytes') is not None} {_FORM} {text}"
    stored = cache / "model_parts" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    try:
        parts = WORKER.kept_reply(
            stored, ModelParts, ReadParts(json.loads(text)), f"builds the model of {file}"
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return parts.parameters, parts.family
