"""The model types that can be trained: those that write text, of the installed transformers; and
the private names of its configs."""

import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError
from launch.base.text import suggestion

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
MAPPING = re.compile(
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
PRIVATE = re.compile(r"(?:\bdef |\bself\.|^    )(_[a-z]\w*)", re.M)


def check(config: Mapping[str, Any], file: Path) -> None:
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
    names = installed()
    if names and name not in names:
        raise ConfigError(
            f"{file}: model_type {name!r} is no language model that this transformers can build;"
            f" {suggestion(name, sorted(names))}. Code that comes with a model is never run"
        )


@lru_cache
def installed() -> frozenset[str]:
    """The types of language models, from the source of the installed transformers, which is not
    imported; empty if they are not found there."""
    mappings = MAPPING.findall(_source("models/auto/modeling_auto.py"))
    return frozenset(name for mapping in mappings for name in _TYPE.findall(mapping))


@lru_cache
def private_names() -> frozenset[str]:
    """The private names that a config of the installed transformers has itself: a key of that name
    would stand in the place of its own value or method."""
    return frozenset(name for file in _CONFIG_FILES for name in PRIVATE.findall(_source(file)))


def _source(name: str) -> str:
    """The text of a file of the installed transformers; empty if it is not found there."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0], name)
    return file.read_text(encoding="utf-8") if file.is_file() else ""
