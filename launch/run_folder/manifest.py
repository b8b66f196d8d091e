"""Manifests of checkpoints: files and hashes, sealed with the user's key; faults of a checkpoint;
the list of our own."""

import errno
import fnmatch
import hmac
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.base import files as base_files
from launch.base.errors import CheckpointError, ConfigError, ResourceError
from launch.base.workspace import Workspace

logger = logging.getLogger("lowmem")

FILE = "manifest.json"
# list beside the checkpoints: those that we have committed and not removed
_COMMITS = "commits.json"
NAME = re.compile(r"^checkpoint-\d{6,}$")
# all that is written beside checkpoints: unfinished ones, those that are being removed, the list
WRITTEN = re.compile(r"(tmp-([a-z]+-)?)?checkpoint-\d{6,}|commits\.(json|damaged)")
KEY_BYTES, _MOST_KEY_BYTES = 32, 4096
_KEY_NAME, CLOUD_KEY_NAME = "checkpoint.key", "cloud.key"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Files that transformers, Accelerate and DeepSpeed look for in a checkpoint, by name or pattern,
# and then load.
LOADED = re.compile(r"\.(pt|pth|bin|pkl|safetensors|distcp|metadata|json)$|^latest$")
_HASHING_THREADS = 4  # sha256 of one file is one core's work
# Facts of a manifest that continuing reads.
FACTS = ("samples_seen", "world_size", "engine", "zero_stage", "mode")
# The parts of a checkpoint that continuing needs, and their files: one for each rank where the
# pattern says so.
_PARTS_OF_TRAINER = {
    "the position of the training": "trainer_state.json",
    "the learning-rate schedule": "scheduler.pt",
}
_WHOLE = {"the weights": "*model*.safetensors", "the optimizer's states": "optimizer.pt"}
PARTS = {
    "plain": _WHOLE,
    "ddp": _WHOLE,
    "deepspeed": {
        "the name of its step": "latest",
        "the weights": "*model_states.pt",
        "the optimizer's states": "*zero_pp_rank_{rank}_*optim_states.pt",
    },
    "fsdp2": {
        "the weights": "pytorch_model_fsdp_0/.metadata",
        "the optimizer's states": "optimizer_0/.metadata",
    },
}


def name(step: int) -> str:
    return f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def read(folder: Path) -> dict[str, Any]:
    return json.loads(base_files.regular_bytes(folder / FILE))


def written_with(folder: Path) -> dict[str, str]:
    """Versions of the libraries that wrote a checkpoint; {} where its manifest is damaged."""
    try:
        return {str(package): str(of) for package, of in read(folder)["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


# ---- the seal
# ---------------------------------------------------------------------------


def key_file() -> Path:
    """The file that another machine or user needs to continue what is sealed here."""
    named, of_root, of_home = _key_files()
    return named or (of_root if of_root.exists() or of_home is None else of_home)


def key() -> bytes:
    """The user's secret, made at its first use: in the file that LOWMEM_KEY names, else in the home
    folder, where there is one, and beside the runs, where another machine with that disk finds it.
    Raises ResourceError."""
    named, of_root, of_home = _key_files()
    try:
        if named:
            return _read_key(named) or _made_key(named, os.urandom(KEY_BYTES))
        if content := _read_key(of_root):
            return content
        content = of_home and _read_key(of_home)
        if of_home and not content:
            with suppress(OSError):  # a container's home is "/" for a user that it does not know
                content = _made_key(of_home, os.urandom(KEY_BYTES))
        if not content:
            return _made_key(of_root, os.urandom(KEY_BYTES))
    except OSError as error:
        raise _unwritten(error) from error
    with suppress(OSError):  # a disk may keep no owner: key_note() says so
        _made_key(of_root, content)
    return content


def cloud_key_file() -> Path:
    """The file of the key that rented machines get, made at its first use. It is not the user's
    own: who reads it there can seal no checkpoint that this machine takes. Raises
    ResourceError."""
    named, of_root, _ = _key_files()
    path = named or of_root.with_name(CLOUD_KEY_NAME)
    try:
        if not _read_key(path):
            _made_key(path, os.urandom(KEY_BYTES))
    except OSError as error:
        raise _unwritten(error) from error
    return path


def _unwritten(error: OSError) -> ResourceError:
    return ResourceError(
        f"{error.filename or 'a new key'}: {error.strerror}; the key that seals checkpoints is kept"
        " there; name another file, which can be written to, with LOWMEM_KEY"
    )


def key_note() -> str:
    """A line for runs whose disk does not carry the key; "" for others."""
    named, of_root, of_home = _key_files()
    if named or _read_key(of_root):
        return ""
    return (
        f"{of_root.parents[1]} is another user's, or keeps no owner and mode of a file, so that the"
        f" key which seals checkpoints is in {of_home}: another machine continues this run with"
        " LOWMEM_KEY=a copy of that file"
    )


def root_note() -> str:
    """A line for root in the folder of another user, who cannot go on with what root leaves there;
    "" for others."""
    root = Workspace.here().root
    if os.geteuid() or not (owner := root.stat().st_uid):
        return ""
    return (
        f"{root} belongs to user {owner}, who cannot change what root writes there: start as that"
        f" user (docker: --user {owner}), or give it back afterwards: chown -R {owner} {root}"
    )


def _key_files() -> tuple[Path | None, Path, Path | None]:
    """The files of this user's keys: named by LOWMEM_KEY, beside the runs, in the home folder.

    None is in a run's folder: a run that is given away does not carry it."""
    named, of_home = os.environ.get("LOWMEM_KEY"), None
    with suppress(ConfigError):  # a user may have no home
        state = os.environ.get("XDG_STATE_HOME") or base_files.expanded("~/.local/state")
        of_home = Path(state) / "lowmem" / _KEY_NAME
    of_root = Workspace.here().root / ".lowmem" / _KEY_NAME
    return base_files.expanded(named) if named else None, of_root, of_home


def _read_key(path: Path) -> bytes | None:
    """The key in a file; None without one, or beside the runs of another user. Raises
    ResourceError for one that is not this user's alone, and OSError."""
    try:
        status = path.stat()
        if path.parent.name == ".lowmem" and status.st_uid != os.geteuid():
            return None
        if not stat.S_ISREG(status.st_mode):
            raise ResourceError(
                f"{path}: is no file, and the key that seals checkpoints should be one; remove it"
            )
        with path.open("rb") as file:
            content = file.read(_MOST_KEY_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        if path.parent.name == ".lowmem":
            return None
        raise
    if len(content) < KEY_BYTES:
        raise ResourceError(
            f"{path}: found {len(content)} bytes, expected {KEY_BYTES}; remove it to make a new key"
        )
    # a mounted secret is root's; Kubernetes lets the group of a pod read it (fsGroup)
    open_bits = 0o077 if status.st_uid == os.geteuid() else 0o037
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & open_bits:
        raise ResourceError(
            f"{path}: the key that seals checkpoints must be yours alone; chmod 600, or remove it"
        )
    return content


def _made_key(path: Path, content: bytes) -> bytes:
    """The key that the file holds now, which is made. Raises OSError, also where the file's owner
    and mode are not kept."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_theirs = path.parent.lstat().st_uid != os.geteuid() or path.parent.is_symlink()
    if path.parent.name == ".lowmem" and is_theirs:
        raise OSError(errno.EPERM, "its folder is another user's", str(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, "its disk keeps no owner and mode", str(path))
        with suppress(FileExistsError):  # not over one that another process has made meanwhile
            os.link(aside, path)
    finally:
        aside.unlink()
    return path.read_bytes()


def _seals(described: Mapping[str, Any]) -> Iterator[str]:
    """The seals of a manifest under each of the caller's keys."""
    for path in filter(None, _key_files()):
        with suppress(OSError, ResourceError):
            if content := _read_key(path):
                yield seal(described, content)


def seal(described: Mapping[str, Any], content: bytes | None = None) -> str:
    """HMAC-SHA256 of a manifest, without its seal, under the user's key."""
    text = json.dumps(
        {field: value for field, value in described.items() if field != "seal"}, sort_keys=True
    )
    return hmac.new(content or key(), text.encode(), "sha256").hexdigest()


# ---- faults
# ---------------------------------------------------------------------------


def fault(folder: Path, hashed: bool = True, allow: Collection[str] = ()) -> str | None:
    """The fault of a checkpoint, or None: every file is the one that its sealed manifest describes,
    and it has every part that a training needs to go on.

    Without `hashed` sizes are compared instead of content. `allow` "seal" takes a checkpoint that
    was sealed elsewhere."""
    try:
        described = read(folder)
        files = {
            relative: (entry["bytes"], entry["sha256"])
            for relative, entry in described["files"].items()
        }
        sealed, checks_modes = str(described.get("seal", "")), described.get("keeps_modes", True)
        checks_owners = described.get("keeps_owners", True)  # a share may give all files one owner
        missing = _missing_part(described, files)
    except FileNotFoundError:
        return f"{folder.name} has no {FILE}: it was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{folder.name}/{FILE} cannot be read"
    if "seal" not in allow and not any(
        hmac.compare_digest(sealed, ours) for ours in _seals(described)
    ):
        return (
            f"{folder.name}/{FILE} does not have the seal of your key: it was changed, or written"
            " by another user or machine. Checkpoints hold pickles, which can run code: only if"
            " you trust where it comes from, set LOWMEM_KEY to a copy of the key from there"
            f" ({key_file()}), or add --resume.allow=seal"
        )
    if problem := _untrusted(folder, files, checks_modes, checks_owners):
        return problem
    for relative, (expected_bytes, _) in files.items():
        path = folder / relative
        if not path.is_file():
            return f"{folder.name}/{relative} is missing"
        if path.stat().st_size != expected_bytes:
            return (
                f"{folder.name}/{relative} has {path.stat().st_size:,} bytes, expected"
                f" {expected_bytes:,}"
            )
    if missing:
        return f"{folder.name} lacks {missing}, without which its training cannot go on"
    if not hashed:
        return None
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        try:
            digests = list(pool.map(base_files.sha256, [folder / relative for relative in files]))
        except OSError as error:
            return f"{folder.name}/{error.filename or ''}: {error.strerror}"
    for (relative, (_, expected)), digest in zip(files.items(), digests, strict=True):
        if digest != expected:
            return f"{folder.name}/{relative} was changed after it was written"
    return None


def _missing_part(described: Mapping[str, Any], files: Collection[str]) -> str | None:
    """The first part that a checkpoint lacks, with its file."""
    for fact in FACTS:
        if fact not in described:
            return f"{fact} in its {FILE}"
    engine, num_ranks = described["engine"], described["world_size"]
    states = "rng_state.pth" if num_ranks == 1 else "rng_state_{rank}.pth"
    parts = {**_PARTS_OF_TRAINER, **PARTS[engine], "the random states": states}
    if described.get("mixed_precision") == "fp16" and engine != "deepspeed":
        parts["the scale of fp16"] = "scaler.pt"
    for part, pattern in parts.items():
        for rank in range(num_ranks if "{rank}" in pattern else 1):
            name = pattern.replace("{rank}", str(rank))
            if not fnmatch.filter(files, name):
                return f"{part} ({name})"
    return None


def _untrusted(
    folder: Path, files: Collection[str], checks_modes: bool, checks_owners: bool
) -> str | None:
    """The file through which somebody else could have put something into the checkpoint that
    resuming would load."""
    for path in (folder, *sorted(folder.rglob("*"))):
        status, shown = path.lstat(), path.relative_to(folder.parent)
        if stat.S_ISLNK(status.st_mode):
            return f"{shown} is a symbolic link, which no checkpoint of ours has; remove it"
        if checks_owners and status.st_uid not in (os.geteuid(), 0):
            return f"{shown} belongs to user {status.st_uid}, not to you; chown it if you trust it"
        if checks_modes and status.st_mode & WRITABLE_BY_OTHERS:
            return f"{shown} can be written to by others; chmod go-w it if you trust it"
        if stat.S_ISREG(status.st_mode):
            relative = str(path.relative_to(folder))
            if relative not in files and relative != FILE and LOADED.search(path.name):
                return (
                    f"{shown} is not one of the files of that checkpoint, and may be loaded with"
                    " it; remove it"
                )
    return None


def newest_valid(
    checkpoints: Path, allow: Collection[str] = (), hashed: bool = True
) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and the fault of each newer one."""
    faults = []
    for folder in reversed(committed(checkpoints)):
        problem = fault(folder, hashed, allow)
        if problem is None:
            return folder, faults
        faults.append(problem)
    return None, faults


def committed(checkpoints: Path) -> list[Path]:
    """Folders named as our checkpoints are, oldest step first."""
    return sorted(
        (path for path in checkpoints.glob("checkpoint-*") if NAME.match(path.name)), key=step_of
    )


# ---- the list of our commits
# ---------------------------------------------------------------------------


def _listed(checkpoints: Path) -> dict[str, str]:
    """Folder names and their seals; a list that is damaged is put aside, and nothing that it named
    is removed."""
    file = checkpoints / _COMMITS
    try:
        return base_files.read(file, dict[str, str]) or {}
    except CheckpointError as error:
        file.rename(file.with_suffix(".damaged"))
        logger.warning("%s: put aside; older checkpoints stay", str(error).partition(";")[0])
        return {}


def written(checkpoints: Path) -> list[Path]:
    """Files and folders beside checkpoints, under names that a run writes."""
    return sorted(
        path
        for path in checkpoints.iterdir()
        if WRITTEN.fullmatch(path.name) and not path.is_symlink()
    )


def ours(checkpoints: Path) -> list[Path]:
    """The committed checkpoints that the list names, oldest step first: what rotation may
    remove."""
    listed = _listed(checkpoints)
    return [folder for folder in committed(checkpoints) if folder.name in listed]


def list_commit(checkpoints: Path, folder_name: str, sealed: str) -> None:
    """Add a checkpoint to the list, before the rename that makes it visible: a checkpoint that is
    not listed would never be removed."""
    base_files.write_json(checkpoints / _COMMITS, {**_listed(checkpoints), folder_name: sealed})


def strike_commit(checkpoints: Path, folder_name: str) -> None:
    remaining = {key: value for key, value in _listed(checkpoints).items() if key != folder_name}
    base_files.write_json(checkpoints / _COMMITS, remaining)


# ---- libraries
# ---------------------------------------------------------------------------

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets")
# another major.minor of these may read a file differently
_WRITE_FILES = ("torch", "transformers", "deepspeed")


def versions() -> dict[str, str]:
    """The version of each package that is imported from elsewhere, and of the installed others."""
    installed = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed | {package: version for package, version, _ in imported_from_elsewhere()}


def imported_from_elsewhere() -> Iterator[tuple[str, str, Path]]:
    """Packages that this process has imported from another folder than the one in which they are
    installed, such as one of PYTHONPATH, with their version and file."""
    for package in PACKAGES:
        module = sys.modules.get(package)
        if module is None or not (file := getattr(module, "__file__", None)):
            continue
        with suppress(metadata.PackageNotFoundError):
            place = Path(str(metadata.distribution(package).locate_file(package))).resolve()
            if not Path(file).resolve().is_relative_to(place):
                yield package, str(getattr(module, "__version__", "unknown")), Path(file)


def version_changes(then: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """("package X -> Y", True if it may read files differently) for each package of another
    version."""
    current_versions = versions()
    for package, old in then.items():
        new = current_versions.get(package)
        if new != old:
            is_deep = package in _WRITE_FILES and (
                new is None or new.split(".")[:2] != old.split(".")[:2]
            )
            yield f"{package} {old} -> {new or 'not installed'}", is_deep
