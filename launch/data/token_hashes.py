"""Hashes of a token cache: a flipped bit or half a file would be trained on, so its files are
verified when opened."""

import hashlib
import json
import stat
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from launch.base import files as base_files
from launch.data import token_cache

FILE = "hashes.json"  # {"files": {relative path: {"bytes", "sha256"}}}
THREADS = 4  # sha256 of one file is one core's work
CHUNK_BYTES = 8 << 20
POLL_S = 0.2


def write(folder: Path, goes_on: Callable[[], None] = lambda: None) -> None:
    """Write the hashes of all files of a finished token cache."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    digests = _digests(paths, goes_on)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    base_files.write_json(folder / FILE, {"files": files})


def fault(folder: Path, goes_on: Callable[[], None] = lambda: None) -> str | None:
    """The first damage of a token cache, or None: every file is as it was written.

    `goes_on` is called several times a second; what it raises ends the reading."""
    files = _read(folder)
    if files is None:
        return f"{FILE} is missing or cannot be read"
    if added := {path.name for path in folder.glob("*.arrow")} - files.keys():
        return f"{min(added)} was added to it"
    try:
        for name, (expected_bytes, _) in files.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != expected_bytes:
                return f"{name} has {status.st_size} bytes, expected {expected_bytes}"
        digests = _digests([folder / name for name in files], goes_on)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    changed = [
        name
        for (name, (_, expected)), digest in zip(files.items(), digests, strict=True)
        if digest != expected
    ]
    return f"{changed[0]} was changed after it was written" if changed else None


def counts(folder: Path) -> dict[str, Any] | None:
    """Counts of the rows of a token cache, for planning; None where there is no cache, or this part
    of it is damaged."""
    _, expected = (_read(folder) or {}).get(token_cache.TOKENS_READY, (0, ""))
    try:
        content = base_files.regular_bytes(folder / token_cache.TOKENS_READY)
    except OSError:
        return None
    return json.loads(content) if hashlib.sha256(content).hexdigest() == expected else None


def _read(folder: Path) -> dict[str, tuple[int, str]] | None:
    """{relative path: (bytes, sha256)}; None where there is no such file, or it is damaged."""
    try:
        described = json.loads(base_files.regular_bytes(folder / FILE))
        files = {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in described["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return files if token_cache.TOKENS_READY in files else None


def _digests(paths: list[Path], goes_on: Callable[[], None]) -> list[str]:
    is_over = threading.Event()
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(_sha256, path, is_over) for path in paths]
        pending: set[Future[str]] = set(futures)
        try:
            while pending:
                pending = wait(pending, POLL_S, FIRST_COMPLETED).not_done
                goes_on()
            return [future.result() for future in futures]
        finally:
            is_over.set()
            pool.shutdown(cancel_futures=True)


def _sha256(path: Path, is_over: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not is_over.is_set() and (chunk := file.read(CHUNK_BYTES)):
            digest.update(chunk)
    return digest.hexdigest()
