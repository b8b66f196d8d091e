"""The model types that can be trained: those that write text, of the installed transformers; and
their families.

The parameters and the family of a model that is not counted from its config, and the forward pass
of one that is, come from a child that builds it on the meta device, once for each config and
version of transformers. configs/model_families.json has the forward passes of the counted families,
and the kernels that liger-kernel has for a type."""

import functools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import ConfigError
from launch.base.text import suggestion
from launch.base.workspace import FILES
from launch.data.worker import WORKER, ReadParts
from launch.predict.parameters import Shapes
from launch.schema.plan import ForwardFacts, ModelFamily
from launch.schema.result import ModelParts

_FORM = 5  # format of a stored ModelParts; raised with each new field

COMMITTED = FILES / "configs" / "model_families.json"
# model types that fill masks; with is_decoder some of them write text
ENCODERS = frozenset(
    (
        *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
        *("deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert"),
        *("fnet", "funnel", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "longformer"),
        *("luke", "megatron-bert", "mobilebert", "modernbert", "modernvbert", "mpnet", "mra"),
        *("neomme", "nomic_bert", "nystromformer", "perceiver", "reformer", "rembert", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "tapas", "ultrabert"),
        *("ultravbert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"),
    )
)
# Lists in transformers' source of the types that have a causal or an encoder-decoder model
_MAPPING = re.compile(
    r"^MODEL_FOR_(?:SEQ_TO_SEQ_)?CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", re.M | re.S
)
_TYPE = re.compile(r'^\s*\("([^"]+)",', re.M)
# The files of transformers' PreTrainedConfig and its base classes, and the private names in them.
_CONFIG_FILES = (
    "configuration_utils.py",
    "modeling_rope_utils.py",
    "utils/hub.py",
    "integrations/heterogeneity/configuration_utils.py",
)
_PRIVATE = re.compile(r"(?:\bdef |\bself\.|^    )(_[a-z]\w*)", re.M)


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
    plain = json.loads(json.dumps(dict(config), sort_keys=True))
    has_bitsandbytes = find_spec("bitsandbytes") is not None
    name = files.digest([version("transformers"), has_bitsandbytes, _FORM, plain])
    stored = cache / "model_parts" / f"{name}.json"
    try:
        parts = WORKER.kept_reply(
            stored, ModelParts, ReadParts(plain), f"builds the model of {file}"
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return parts.parameters, parts.family


# ---- types


def check_type(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for a model that does not write text, or that transformers does not
    have."""
    name = config["model_type"]
    if name in ENCODERS and not config.get("is_decoder"):
        raise ConfigError(
            f"{file}: model_type {name!r} is an encoder: it fills masks and cannot be trained to"
            " write text; give a decoder (llama, qwen3, ...) or T5"
        )
    if "vocab_size" not in config and isinstance(config.get("text_config"), Mapping):
        text = config["text_config"].get("model_type", "...")
        raise ConfigError(
            f"{file}: model_type {name!r} is of text beside images or sound (the sizes of its text"
            f" model are in text_config); give a folder with its text model alone (model_type"
            f" {text!r})"
        )
    names = text_types()
    if names and name not in names:
        raise ConfigError(
            f"{file}: model_type {name!r} is no language model that this transformers can build;"
            f" {suggestion(name, sorted(names))}. Code that comes with a model is never run"
        )


@functools.cache
def text_types() -> frozenset[str]:
    """The types of language models, from the source of the installed transformers, which is not
    imported; empty if they are not found there."""
    mappings = _MAPPING.findall(_source("models/auto/modeling_auto.py"))
    return frozenset(name for mapping in mappings for name in _TYPE.findall(mapping))


@functools.cache
def private_names() -> frozenset[str]:
    """The private names that a config of the installed transformers has itself: a key of that name
    would stand in the place of its own value or method."""
    return frozenset(name for file in _CONFIG_FILES for name in _PRIVATE.findall(_source(file)))


def _source(name: str) -> str:
    """The text of a file of the installed transformers; empty if it is not found there."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0], name)
    return file.read_text(encoding="utf-8") if file.is_file() else ""
