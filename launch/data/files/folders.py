"""The endings of data files, and the files of a folder that are its data."""

import json
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from launch.base.errors import DataError
from launch.schema.plan import FileType, TextType

SUFFIXES: dict[str, FileType] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".arrow": "arrow",  # as datasets.save_to_disk writes it
    ".tar": "webdataset",
}
TEXT_TYPES: dict[str, TextType] = {  # data.text_rows -> file type
    "lines": "text",
    "paragraphs": "paragraphs",
    "file": "whole_text",
}
# endings of compressed files; their type must be one that is read by lines
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SAVED_SPLITS, _SAVED_SPLIT = "dataset_dict.json", "state.json"  # datasets.save_to_disk's
_SAVED_INFO = "dataset_info.json"
_ABOUT_DATA = (_SAVED_SPLITS, _SAVED_SPLIT, _SAVED_INFO, "dataset_infos.json")  # hold no rows
SPLITS = {  # a word of a file's name -> the part of a data set that lies in it
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    "test": "test",
}


def suffix(path: Path) -> str:
    """The ending that tells the type: of rows.jsonl.gz it is .jsonl."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return plain.suffix.lower()


def ending(path: Path) -> str:
    """The ending of a data file with that of its compression: .jsonl.gz."""
    return suffix(path) + (path.suffix if path.suffix.lower() in COMPRESSIONS else "")


def data_files(folder: Path) -> tuple[Path, ...]:
    """The shards in a folder, in the order of their names. Raises DataError where there is none,
    or where it is not clear which of them are meant."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    folders = [entry.name for entry in entries if entry.is_dir() and entry.name[0] not in "._"]
    if (folder / _SAVED_SPLITS).exists():
        raise DataError(
            f"{folder}: holds a data set for each of {', '.join(folders)}; give the folder of one"
            " of them"
        )
    files = [entry for entry in entries if is_data(entry) and entry.is_file()]
    if (folder / _SAVED_SPLIT).exists() and any(suffix(file) == ".arrow" for file in files):
        try:
            saved = json.loads((folder / _SAVED_SPLIT).read_text(encoding="utf-8"))["_data_files"]
            return tuple(folder / Path(file["filename"]).name for file in saved)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder / _SAVED_SPLIT}: does not name the data set's files ({error!r})"
            ) from error
    if not files:
        within = f"one of its folders ({', '.join(folders)}), " if folders else ""
        raise DataError(
            f"{folder}: no data file lies in this folder (known: {', '.join(SUFFIXES)}); give"
            f" {within}a file, a folder of shards, or a pattern like '{folder}/**/*.parquet'"
        )
    return _of_one_split(folder, _of_one_type(folder, files))


def is_data(path: Path) -> bool:
    """True for a file's name that is neither hidden nor that of a file about the data."""
    is_hidden = path.name.startswith((".", "_"))
    return not is_hidden and path.name not in _ABOUT_DATA and suffix(path) in SUFFIXES


def _of_one_type(folder: Path, files: list[Path]) -> list[Path]:
    """The files of the type that most of them have, in number and in bytes. Lines of JSON may end
    in .json too."""
    by_type: dict[str, list[Path]] = {}
    for file in files:
        by_type.setdefault(SUFFIXES[suffix(file)].removesuffix("l"), []).append(file)
    most = max(by_type.values(), key=len)
    if len(by_type) == 1 or (2 * len(most) > len(files) and 2 * _bytes(most) > _bytes(files)):
        return most
    patterns = " or ".join(map(pattern, by_type.values()))
    raise DataError(
        f"{folder}: holds files of several types, and no type has most of the files and of the"
        f" bytes; give a pattern: {patterns}"
    )


def _bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _of_one_split(folder: Path, files: list[Path]) -> tuple[Path, ...]:
    """The files. Raises DataError if some are to train on and some are held out, by their names."""
    by_split: dict[str, list[Path]] = {}
    for file in files:
        splits = [SPLITS.get(word) for word in re.split("[^a-z]+", file.name.lower())]
        by_split.setdefault(next(filter(None, reversed(splits)), ""), []).append(file)
    by_split.pop("", None)
    if "train" in by_split and len(by_split) > 1:
        patterns = ", ".join(f"{name}: {pattern(same)}" for name, same in by_split.items())
        raise DataError(
            f"{folder}: holds files of several parts of a data set, by their names; give one of"
            f" them ({patterns})"
        )
    return tuple(files)


def pattern(files: Sequence[Path]) -> str:
    """A pattern, for a shell, that matches these files of a folder by the beginning and the ending
    of their names."""
    if len(files) == 1:
        return shlex.quote(str(files[0]))
    letters = zip(*(file.name for file in files), strict=False)
    begin = "".join(some[0] for some in takewhile(lambda some: len({*some}) == 1, letters))
    return shlex.quote(f"{files[0].parent}/{begin}*{ending(files[0])}")


def left_out(path: Path, files: Sequence[Path]) -> list[str]:
    """The names of what lies in a folder beside the files that are read, but for hidden files that
    are no data."""
    return [
        entry.name + "/" * entry.is_dir()
        for entry in (sorted(path.iterdir()) if path.is_dir() else ())
        if entry not in files
        and (entry.name[0] not in "._" or suffix(entry) in SUFFIXES)
        and not (entry.name in (_SAVED_SPLIT, _SAVED_INFO) and suffix(files[0]) == ".arrow")
    ]
