"""Files that are written to a temporary name, synced and renamed, and checks of folders that other
users could write to."""

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from launch.base.errors import CheckpointError, ConfigError, ResourceError

Noun = TypeVar("Noun")


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves either the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        aside.replace(path)
    except IsADirectoryError as error:
        aside.unlink()
        raise ResourceError(f"{path}: is a folder, expected a file; move it away") from error


def lines_of_text(path: Path) -> list[str]:
    """The lines of a text file that are not blank. Raises ResourceError, also where it has none."""
    try:
        lines = regular_bytes(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{path}: cannot be read as text ({error})") from error
    if not (filled := [line for line in lines if line.strip()]):
        raise ResourceError(f"{path}: is empty, expected a line of text")
    return filled


def system_text(path: Path) -> str:
    """The text of a file of /proc or /sys; "" where it cannot be read, because kernels and
    containers leave out many of them."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""


@contextmanager
def descriptor(path: Path | str, flags: int, mode: int = 0o777) -> Iterator[int]:
    """An open file as the system's number, closed at the end. Raises OSError."""
    file = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield file
    finally:
        os.close(file)


def new_folder(parent: Path, name: str) -> Path:
    """A folder of that name that is made now; beside one of that name, with a number behind it.
    Raises OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("no end")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    with descriptor(path, os.O_RDONLY) as file:
        os.fsync(file)


def sync_all(folder: Path) -> None:
    """sync() the folder and everything in it. Otherwise a file that says "complete" could survive a
    power cut while the files that it describes do not."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text that every reader accepts. NaN and infinities, which JSON lacks, become the texts
    "nan", "inf" and "-inf"."""
    return json.dumps(_in_json(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dump := getattr(value, "model_dump", None):  # a recipe, which is a pydantic model
        return dump(mode="json")
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    """Write a noun (a dataclass) or a mapping as JSON. read() reads it back."""
    content = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    write_atomic(path, to_json(content, indent=1) + "\n")


def store_json(path: Path, value: Any) -> None:
    """Write a file of a cache, which can be made again, as write_json() does; its folder is made.
    read_or_none() reads it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)


def regular_bytes(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, also for a FIFO or a device, whose reader would
    wait for a writer or never come to an end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise ResourceError for a name that leads to no regular file, or to another user's."""
    refuse_strangers(path)
    status = path.stat() if path.exists() else None
    if status and not (stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()):
        raise ResourceError(
            f"{path}: leads to no regular file of yours; remove it, or choose another name"
        )


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file that end with a newline, one at a time. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def read(path: Path, noun: type[Noun]) -> Noun | None:
    """The noun that a JSON file holds, or None if there is no such file.

    Raises CheckpointError for a damaged file, with its name and the wrong key. A file that is not
    regular is refused too, because reading a FIFO would wait for a writer.
    """
    from pydantic import ValidationError

    try:
        return adapter(noun).validate_json(regular_bytes(path))
    except (FileNotFoundError, NotADirectoryError):  # the file, or its folder, is missing
        return None
    except OSError as error:
        raise damaged_file(path, str(error.strerror)) from error
    except ValidationError as error:
        raise damaged_file(path, first_fault(error)) from error


def first_fault(error: Any) -> str:
    """The first wrong key that a ValidationError of pydantic names, and the reason."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def read_or_none(path: Path, noun: type[Noun]) -> Noun | None:
    """read() for a file that can be made again: None if it is missing or damaged."""
    with suppress(CheckpointError):
        return read(path, noun)
    return None


@cache
def adapter(noun: Any) -> Any:
    """pydantic's reader of a type, made once."""
    from pydantic import TypeAdapter

    return TypeAdapter(noun)


def damaged_file(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: missing or damaged ({reason}); put a whole copy of it back, or start over with"
        " --resume never"
    )


def digest(facts: Any) -> str:
    """The beginning of the hash of a JSON value, which names a file in a cache."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(path: str | Path) -> Path:
    """The path with a home folder in the place of ~. Raises ConfigError for a user without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: {Path(path).parts[0]} is no user with a home folder here; write the whole"
            " path, or set HOME"
        ) from error


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file or link, which may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk of a folder, or of its nearest parent that
    exists."""
    disk = os.statvfs(existing(path))
    return disk.f_bavail * disk.f_frsize


def disk(path: Path) -> int:
    """The device of a folder, or of its nearest parent that exists."""
    return existing(path).stat().st_dev


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def refuse_strangers(path: Path) -> None:
    """Raises ResourceError for a name that another user has created in a folder where anybody may
    write, such as /tmp."""
    for place in (path, *path.parents):
        try:
            status, above = place.lstat(), place.parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if above.st_mode & stat.S_IWOTH and status.st_uid not in (os.geteuid(), above.st_uid):
            raise ResourceError(
                f"{place}: belongs to user {status.st_uid}, in a folder where anybody may write;"
                " choose another name"
            )


def is_model(folder: Path) -> bool:
    """True for a model's folder that a run of ours wrote."""
    return (folder / "lowmem.json").is_file() and not folder.is_symlink()


def check_output(folder: Path) -> None:
    """Check the model's folder, which is replaced as a whole at the end: it must be ours or empty,
    and writable.

    Raises ResourceError.
    """
    refuse_strangers(folder)
    if fault := next((text for is_wrong, text in _faults_of_output(folder) if is_wrong), ""):
        raise ResourceError(f"output_dir {folder}: {fault}")
    for ending in ("tmp", "old"):  # export.py's
        refuse_strangers(folder.with_name(f".{folder.name}.{ending}"))


def _faults_of_output(folder: Path) -> list[tuple[bool, str]]:
    """Rows on a folder for a model: whether it is wrong so, and a text on that with what to do."""
    has_model = (folder / "lowmem.json").exists()
    before = folder.parent / f"{folder.name}.previous"
    parent = next(filter(Path.exists, folder.parents), folder)  # the root itself has none
    another = "choose another folder"
    return [
        (
            folder.is_symlink(),
            f"is a symbolic link, to {folder.resolve()}; give that folder itself",
        ),
        (
            folder.is_dir() and any(folder.iterdir()) and not has_model,
            f"holds files that no run of ours wrote; {another}",
        ),
        (
            folder.is_mount(),
            "is a mount point, and the model's folder is replaced as a whole; give a folder below"
            " it",
        ),
        (folder.exists() and not folder.is_dir(), f"is a file; {another}"),
        (
            has_model and os.path.lexists(before) and not is_model(before),
            f"its model would be kept as {before}, which no run of ours wrote; move that away, or"
            " choose another output_dir",
        ),
        (not parent.is_dir(), f"{parent} is a file; {another}"),
        # /proc and its like hold no files
        (
            not os.access(parent, os.W_OK) or not os.statvfs(parent).f_blocks,
            f"{parent} cannot be written to; {another}",
        ),
    ]


def other_size(folder: Path, sizes: Mapping[str, int]) -> tuple[Path, str] | None:
    """The first file of a folder that has not its recorded size, and both sizes in words."""
    for name, num_bytes in sizes.items():
        path = folder / name
        there = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        if there != f"{num_bytes:,} bytes":
            return path, f"found {there}, expected {num_bytes:,} bytes"
    return None
