"""One start at a time: a lock that names its holder, and that a dead holder's leftovers cannot
keep."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.base import processes
from launch.base.errors import LockHeld

# for a forked worker of a dead holder, which has the lock's file open too, to end by itself
LEFTOVER_S = 1.0
RETRY_S = 0.05


@contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold `path` for this process; the kernel lets go when the process ends, however it ends.

    Where it does not, because a child of the dead holder has the file open, or the file system has
    forgotten nothing, the lock is taken over once its holder is proved dead. Raises LockHeld naming
    the process that has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _taken(path, what)
    try:
        yield
    finally:
        os.ftruncate(file, 0)
        os.close(file)


def _taken(path: Path, what: str) -> int:
    """The descriptor that holds the lock."""
    until = time.monotonic() + LEFTOVER_S
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(file)
            os.close(file)
            if not _is_dead(holder):
                raise LockHeld(
                    f"{what} is in use by {_words(holder)}; wait for it, or stop it"
                ) from error
            if time.monotonic() > until:
                return _replace(path, what)
            time.sleep(RETRY_S)
            continue
        if _is_same(file, path):
            _sign(file)
            return file
        os.close(file)  # replaced between open and lock


def _replace(path: Path, what: str) -> int:
    """A new file in the place of one that only a dead holder's children have open."""
    guard = os.open(path.with_name(f"{path.name}.guard"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)  # of two that take over, the second finds the first alive
        there = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = _holder(there)
        os.close(there)
        if not _is_dead(holder):
            raise LockHeld(f"{what} is in use by {_words(holder)}; wait for it, or stop it")
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        _sign(file)
        aside.replace(path)
        return file
    finally:
        os.close(guard)


def _sign(file: int) -> None:
    me = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": _started(os.getpid()),
        "boot": processes.boot_id(),
        "namespace": _namespace(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(me).encode(), 0)


def _holder(file: int) -> dict[str, Any]:
    """What the holder wrote; {} while it is writing, or where it could not."""
    try:
        return json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Proved to be: it was of this machine, and that boot is over, or its pid is nobody's or
    another's by now."""
    if holder.get("host") != socket.gethostname():
        return False
    if holder["boot"] != processes.boot_id():
        return True
    if holder["namespace"] != _namespace():  # a container of the same name, whose pids are others
        return False
    return _started(holder["pid"]) != holder["started"]


def _started(pid: int) -> int | None:
    """A process's start, in clock ticks since boot: with its pid it is one process alone. None: it
    is gone."""
    try:
        words = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in "ZX" else int(words[19])


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _words(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
