"""The files of a repository that a training reads: safetensors, tokenizer, config and card of a
model; the data files of one configuration and split of a data set."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError, DataError, ResourceError
from launch.data.files.folders import SPLITS, SUFFIXES, is_data, suffix
from launch.hub.names import HubName

WEIGHTS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors")
# configs, tokenizers (sentencepiece's end in .model), chat templates
_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|model|jinja)|(merges|vocab)\.txt")
CARD = re.compile(r"README\.md|(LICEN[CS]E|NOTICE)(\.\w+)?", re.IGNORECASE)
_NAMED_FILE = ".gguf"  # the type of which a single file is downloaded by its name
PARQUET = "refs/convert/parquet"  # huggingface.co's own copy of a data set


def of_model(name: HubName, paths: Sequence[str]) -> dict[str, str]:
    """The files of a model, each by its name in a folder. Raises ResourceError for a model without
    safetensors, and for names that no folder can hold."""
    if name.part:
        if name.part not in paths or not name.part.endswith(_NAMED_FILE):
            raise ConfigError(f"{name}: names no {_NAMED_FILE} file of {name.repo}")
        return _local([name.part, *filter(CARD.fullmatch, paths)])
    weights = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    weights = [path for path in weights if WEIGHTS.fullmatch(path)] or weights
    if not weights:
        top_files = ", ".join(path for path in paths if "/" not in path) or "nothing"
        raise ResourceError(
            f"{name}: found {top_files}, expected safetensors, the only weights that are"
            " downloaded; name another model, or a revision that has them (OWNER/NAME@REVISION)"
        )
    beside = (path for path in paths if _BESIDE_WEIGHTS.fullmatch(path) or CARD.fullmatch(path))
    return _local([*weights, *beside])


def of_data(
    name: HubName, paths: Sequence[str], card: Mapping[str, Any]
) -> tuple[str, dict[str, str]]:
    """(configuration, path in the repository by path in a folder) of a split of a data set. Raises
    DataError where there are none, or where it is not clear which are meant."""
    readable = [
        path
        for path in paths
        if is_data(Path(path))
        and not CARD.fullmatch(path)
        and not any(part[0] in "._" for part in Path(path).parts)
    ]
    splits: dict[str, dict[str, list[str]]] = {}
    for config, split, path in _described(readable, card) or _by_names(readable):
        splits.setdefault(config, {}).setdefault(split, []).append(path)
    having = [config for config, of_config in splits.items() if name.split in of_config]
    if name.part is None and len(having) > 1:
        having = _default(having, card)
    config = having[0] if name.part is None and having else name.part
    if config not in having:
        there = [f"{config}:{split}" for config, of_config in splits.items() for split in of_config]
        if name.split == "validation":
            there = [text for text in there if not text.endswith(":train")]
            if not there and splits:
                raise DataError(
                    f"{name}: has no split but train, whose rows are trained; hold some of them out"
                    " with --data.validation_size=100 in its place"
                )
        raise DataError(
            f"{name}: found {', '.join(there[:12]) or 'no data'}, expected one of them by its name:"
            f" hf:{name.repo}/{there[0] if there else 'CONFIG:SPLIT'}; of other files"
            f" huggingface.co may have made parquet: hf:{name.repo}@{PARQUET}"
        )
    files = _of_one_type(splits[config][name.split])
    card_file = {".README.md": "README.md"} if "README.md" in paths else {}
    return config, _local(files, is_flat=True) | card_file


def _described(paths: Sequence[str], card: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(configuration, split, path) of the files that the card's `configs` name; none without
    them, or where they cannot be read."""
    described: list[tuple[str, str, str]] = []
    with suppress(TypeError, KeyError, AttributeError):
        for config in card["configs"]:
            inside = f"{config['data_dir'].strip('/')}/" if config.get("data_dir") else ""
            within = [path for path in paths if path.startswith(inside)]
            name, patterns = str(config["config_name"]), [*_patterns(config.get("data_files"))]
            if not patterns:
                described += [(name, split, path) for _, split, path in _by_names(within)]
            for split, pattern in patterns:
                glob = inside + pattern.removeprefix("./").replace("**/", "*")
                matches = (path for path in within if fnmatchcase(path, glob))
                described += [(name, SPLITS.get(split, split), path) for path in matches]
    return described


def _patterns(data_files: Any) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern) of each entry of a configuration's `data_files`."""
    entries = data_files if isinstance(data_files, list) else [data_files] if data_files else []
    for entry in entries:
        split, named = (
            ("train", entry) if isinstance(entry, str) else (str(entry["split"]), entry["path"])
        )
        yield from ((split, path) for path in ([named] if isinstance(named, str) else named))


def _by_names(paths: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (configuration, split, path) by the words in folders and names. Where none has a word
    for a split, all files are `train`; else those without one are left out."""
    parts = {path: re.split("[^a-z]+", path.lower()) for path in paths}
    splits = {path: [SPLITS[word] for word in parts[path] if word in SPLITS] for path in paths}
    for path in paths:
        if splits[path] or not any(splits.values()):
            folders = [part for part in path.split("/")[:-1] if part not in ("data", *SPLITS)]
            split = splits[path][-1] if splits[path] else "train"
            yield folders[0] if folders else "default", split, path


def _default(configs: list[str], card: Mapping[str, Any]) -> list[str]:
    """The configuration that is meant where none is named: the card's, or `default`; else none."""
    marked: list[str] = []
    with suppress(TypeError, KeyError, AttributeError):
        marked = [each["config_name"] for each in card["configs"] if each.get("default") is True]
    return [config for config in (*marked, "default") if config in configs]


def _of_one_type(paths: Iterable[str]) -> list[str]:
    """The files of the first type in SUFFIXES that is there: others hold the same rows."""
    types = {path: SUFFIXES[suffix(Path(path))] for path in paths}
    first = min(types.values(), key=[*SUFFIXES.values()].index)
    return [path for path in types if types[path] == first]


def _local(paths: Iterable[str], is_flat: bool = False) -> dict[str, str]:
    """The path in a repository by the file's name in its folder. Raises ResourceError for a path
    that leads out of the folder, and for two names that some disks take for the same."""
    local: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        if ".." in parts or "" in parts or re.search(r"[\x00-\x1f\\]", path):
            raise ResourceError(f"{path!r}: a file of this name is never downloaded")
        file = path.replace("/", "--") if is_flat else path
        same = next((other for other in local if other.lower() == file.lower()), None)
        if same is not None:
            raise ResourceError(
                f"{path!r}: collides with {local[same]!r} on disks that ignore case; neither is"
                " downloaded"
            )
        local[file] = path
    return local
