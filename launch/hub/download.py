"""Downloads of models and data sets: the files of a repository that a training reads (safetensors,
tokenizer, config and card of a model; the data files of one configuration and split of a data set),
each into a folder that counts as whole only once the hash of every file is right."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.base import files, locks
from launch.base.errors import (
    ConfigError,
    DataError,
    Interrupted,
    LaunchError,
    LockHeld,
    ResourceError,
)
from launch.base.text import duration, size
from launch.data.files.folders import SPLITS, SUFFIXES, is_data, suffix
from launch.hub import client, names
from launch.schema.result import DOWNLOADED, Downloaded

Say = Callable[[str], None]
_SPARE = 1.1  # disk space, as a multiple of the bytes to download
POLL_S = 0.5
_WEIGHTS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors")
# configs, tokenizers (sentencepiece's end in .model), chat templates
_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|model|jinja)|(merges|vocab)\.txt")
_CARD = re.compile(r"README\.md|(LICEN[CS]E|NOTICE)(\.\w+)?", re.IGNORECASE)
_NAMED_FILE = ".gguf"  # the type of which a single file is downloaded by its name
_PARQUET = "refs/convert/parquet"  # huggingface.co's own copy of a data set


def find(name: names.HubName, root: Path, say: Say | None) -> Path:
    """The folder of a name in a recipe. With `say` it is downloaded if it is not here; without, it
    is the folder that a model's name would be as a path. Raises DataError for a data set that is
    not here."""
    if folder := names.downloaded(name, root):
        names.check_sizes(name, folder)
        return folder
    if say is not None:
        return folder_of(name, root, say)
    if name.is_data:
        raise DataError(
            f"{name}: is not downloaded, and nothing is without --download: add it to this line, or"
            f" type python -m launch download {name}"
        )
    return Path.cwd() / str(name)


def folder_of(name: names.HubName, root: Path, say: Say, refresh: bool = False) -> Path:
    """The folder of a name's files. They are downloaded if they are not there, or, with `refresh`,
    if the revision has moved on. Of two starts at once one downloads, and the other waits."""
    folder, has_waited = name.folder(root), False
    files.refuse_strangers(folder)
    while True:
        try:
            with locks.lock(folder / "lock", f"the download of {name}"):
                here = names.downloaded(name, root)
                return here if here and (has_waited or not refresh) else _newest(name, root, say)
        except LockHeld as error:
            if not has_waited:
                say(f"waiting: {error}")
            has_waited = True
        except LaunchError:
            if [*folder.iterdir()] == [folder / "lock"]:  # of a name that is nowhere
                (folder / "lock").unlink()
                folder.rmdir()
                with suppress(OSError):
                    folder.parent.rmdir()
            raise
        time.sleep(POLL_S)


def _newest(name: names.HubName, root: Path, say: Say) -> Path:
    """The folder of a name's files as they are on the hub."""
    listing, part = client.listing(name), name.part
    if name.is_data:
        part, local = choose_data_files(name, [*listing.files], listing.card)
        selection = f"{name.repo_name}-{re.sub(r'[^A-Za-z0-9.+-]', '_', part)}-{name.split}"
    else:
        selection, local = part or name.repo_name, choose_model_files(name, [*listing.files])
    target = name.folder(root) / listing.commit / selection
    chosen = {here: listing.files[path] for here, path in local.items()}
    wrong = [file for file, remote in chosen.items() if not remote.is_in(target / file)]
    if wrong or not (target / DOWNLOADED).is_file():
        sizes = {file: remote.num_bytes for file, remote in chosen.items()}
        record = Downloaded(str(name), listing.commit, listing.licence, sizes)
        if target.is_dir():
            say(f"{target}: not what was downloaded, so fetched again: {', '.join(wrong)}")
            part = target.rename(_part(target))
            for file in wrong:
                (part / file).unlink(missing_ok=True)
        _download(name, record, chosen, target, say)
    names.remember(name, root, target, replace(name, part=part, revision=listing.commit))
    return target


def _part(target: Path) -> Path:
    """The folder of a download that is not finished."""
    return target.with_name(f"{target.name}.part")


def _download(
    name: names.HubName,
    record: Downloaded,
    chosen: Mapping[str, client.RemoteFile],
    target: Path,
    say: Say,
) -> None:
    """Write the chosen files, go on where an earlier start was cut off, and give the folder its
    name once all of them are right. Raises NetworkError and ResourceError."""
    began, part = time.monotonic(), _part(target)
    part.mkdir(parents=True, exist_ok=True)
    for file, remote in chosen.items():
        path = part / file
        if path.exists() and path.stat().st_size > remote.num_bytes:
            path.unlink()
    there = [path.stat().st_size for file in chosen if (path := part / file).exists()]
    _check_sizes(record, [*chosen.values()], sum(there), part, say)
    for file, remote in chosen.items():
        try:
            client.fetch(name, record.commit, remote, part / file)
        except Interrupted:
            say("the same line again goes on from the bytes that are here")
            raise
        if not remote.is_in(part / file):
            (part / file).unlink()
            raise ResourceError(
                f"{name}: {remote.path}: what came is not what the hub lists (its hash differs); it"
                " was removed: run the same line again"
            )
    files.write_json(part / DOWNLOADED, record)
    files.sync_all(part)
    part.rename(target)
    files.sync(target.parent)
    say(f"downloaded into {target} in {duration(time.monotonic() - began)}")


def _check_sizes(
    record: Downloaded,
    chosen: Sequence[client.RemoteFile],
    there_bytes: int,
    folder: Path,
    say: Say,
) -> None:
    """Show what is downloaded. Raises ResourceError for a file that is too large, and for more than
    the disk takes."""
    largest = max(chosen, key=lambda file: file.num_bytes)
    if largest.num_bytes > client.MOST_BYTES:
        raise ResourceError(
            f"{record.name}: {largest.path}: has {size(largest.num_bytes)}, and the hub sends such"
            " a file over Xet alone, which is not used: fetch it with `hf download`, and name its"
            " folder"
        )
    num_bytes = sum(file.num_bytes for file in chosen)
    missing_bytes, free_bytes = num_bytes - there_bytes, files.free_bytes(folder)
    say(
        f"downloading {record}: {len(chosen)} file{'' if len(chosen) == 1 else 's'},"
        f" {size(num_bytes)}, {size(missing_bytes)} to go; {size(free_bytes)} free"
    )
    if free_bytes < missing_bytes * _SPARE:
        raise ResourceError(
            f"{record.name}: {size(missing_bytes)} to download need"
            f" {size(int(missing_bytes * _SPARE))} (a tenth to spare), and {folder} has"
            f" {size(free_bytes)}; make room there, or set LOWMEM_ROOT to another disk"
        )


# ---- the files of a repository
# -------------------------------------------------------------------------------------


def choose_model_files(name: names.HubName, paths: Sequence[str]) -> dict[str, str]:
    """The files of a model, each by its name in a folder. Raises ResourceError for a model without
    safetensors, and for names that no folder can hold."""
    if name.part:
        if name.part not in paths or not name.part.endswith(_NAMED_FILE):
            raise ConfigError(f"{name}: names no {_NAMED_FILE} file of {name.repo}")
        return _local([name.part, *filter(_CARD.fullmatch, paths)])
    weights = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    weights = [path for path in weights if _WEIGHTS.fullmatch(path)] or weights
    if not weights:
        top_files = ", ".join(path for path in paths if "/" not in path) or "nothing"
        raise ResourceError(
            f"{name}: found {top_files}, expected safetensors, the only weights that are"
            " downloaded; name another model, or a revision that has them (OWNER/NAME@REVISION)"
        )
    beside = (path for path in paths if _BESIDE_WEIGHTS.fullmatch(path) or _CARD.fullmatch(path))
    return _local([*weights, *beside])


def choose_data_files(
    name: names.HubName, paths: Sequence[str], card: Mapping[str, Any]
) -> tuple[str, dict[str, str]]:
    """(configuration, path in the repository by path in a folder) of a split of a data set. Raises
    DataError where there are none, or where it is not clear which are meant."""
    readable = [
        path
        for path in paths
        if is_data(Path(path))
        and not _CARD.fullmatch(path)
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
            f" huggingface.co may have made parquet: hf:{name.repo}@{_PARQUET}"
        )
    chosen = _of_one_type(splits[config][name.split])
    card_file = {".README.md": "README.md"} if "README.md" in paths else {}
    return config, _local(chosen, is_flat=True) | card_file


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
