"""Names of models and data sets on a hub, and the folders that hold what was downloaded."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from launch.base import files
from launch.base.errors import ConfigError, ResourceError
from launch.data.files.folders import SPLITS, SUFFIXES, suffix
from launch.schema.result import DOWNLOADED, Downloaded

PREFIX = "hf:"
MAIN = "main"  # the revision that a name without one means
_WORD = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(
    rf"(?:{PREFIX})?(?P<repo>{_WORD}/{_WORD})(?:/(?P<part>{_WORD}))?(?::(?P<split>\w+))?"
    rf"(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?",
    re.ASCII,
)
# advice of errors on files of a model
_COPY = re.compile(r"copy (?:the (?:model|folder|tokenizer) again|it again|the missing shard)")
_FORMS = {
    False: "OWNER/NAME or OWNER/NAME@REVISION, such as Qwen/Qwen2.5-0.5B-Instruct",
    True: "hf:OWNER/NAME[/CONFIG][:SPLIT][@REVISION], such as hf:openai/gsm8k/main",
}


@dataclass(frozen=True)
class HubName:
    """A model, or a split of a data set, at a revision of its repository."""

    repo: str
    is_data: bool
    part: str | None = None  # the configuration of a data set; one file of a model
    split: str = ""  # of a data set
    revision: str = MAIN

    def __str__(self) -> str:
        part = f"/{self.part}" if self.part else ""
        split = f":{self.split}" if self.split not in ("", "train") else ""
        revision = f"@{self.revision}" if self.revision != MAIN else ""
        return f"{PREFIX if self.is_data else ''}{self.repo}{part}{split}{revision}"

    @property
    def repo_name(self) -> str:
        """The name without its owner."""
        return self.repo.partition("/")[2]

    def folder(self, root: Path) -> Path:
        """The folder of everything that was downloaded of the repository."""
        return root / "data" / "hub" / ("datasets" if self.is_data else "models") / self.repo


def parse(text: str, is_data: bool, split: str = "train") -> HubName:
    """The name that a text is; `split`: of a data set's name without one. Raises ConfigError."""
    match = _NAME.fullmatch(text)
    if match is None or (match["split"] and not is_data):
        raise ConfigError(f"{text!r}: is no name on a hub; expected {_FORMS[is_data]}")
    named = (match["split"] or split) if is_data else ""
    named = SPLITS.get(named.lower(), named)
    return HubName(match["repo"], is_data, match["part"], named, match["revision"] or MAIN)


def is_model(text: str) -> bool:
    """True for a text that may name a model on a hub."""
    match = _NAME.fullmatch(text)
    return match is not None and not match["part"] and not match["split"]


def is_data(text: str) -> bool:
    """True for a text without an ending of data files that names a data set if `hf:` is added."""
    return _NAME.fullmatch(text) is not None and suffix(Path(text)) not in SUFFIXES


def downloaded(name: HubName, root: Path) -> Path | None:
    """The folder that holds all files of the name; None if they were not downloaded here."""
    folder = name.folder(root)
    selection = (files.read_or_none(folder / "names.json", dict[str, str]) or {}).get(str(name))
    if selection is None or not (folder / selection / DOWNLOADED).is_file():
        return None
    return folder / selection


def check_sizes(name: HubName, folder: Path) -> None:
    """Raise ResourceError for a file of a download that has another size than came."""
    record = files.read(folder / DOWNLOADED, Downloaded)
    if record and (other := files.other_size(folder, record.sizes)):
        path, sizes = other
        raise ResourceError(
            f"{path}: is not what was downloaded: {sizes}; mend it with python -m launch download"
            f" {name}"
        )


def with_download(message: str, folders: Iterable[Path]) -> str:
    """The message of an error on a file, where one of the folders above it was downloaded by name:
    with the line that fetches it again in the place of the advice to copy it."""
    records = (files.read_or_none(folder / DOWNLOADED, Downloaded) for folder in folders)
    if record := next(filter(None, records), None):
        line = f"fetch it again with python -m launch download {record.name}"
        return _COPY.sub(lambda advice: line, message)
    return message


def remember(name: HubName, root: Path, target: Path, pinned: HubName) -> None:
    """Write down where the files of a name lie, and of the same name with its commit."""
    folder = name.folder(root)
    index = files.read_or_none(folder / "names.json", dict[str, str]) or {}
    selection = str(target.relative_to(folder))
    index |= {str(each): selection for each in (name, pinned, replace(pinned, part=name.part))}
    files.write_json(folder / "names.json", index)
