"""Locks that allow one start at a time. A lock names its holder, and child processes of a dead
holder cannot keep it."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from launch.base import files, processes
from launch.base.errors import LockHeld, ResourceError

# time in which a forked worker of a dead holder, which has the lock's file open too, may end
_LEFTOVER_S = 1.0
_RETRY_S = 0.05


@dataclass(frozen=True)
class _Holder:
    """The process that holds a lock, as it stands in the lock's file."""

    pid: int
    host: str
    start_ticks: Annotated[int | None, Field(alias="started")]  # clock ticks since boot
    boot: str
    namespace: str  # the PID namespace in which `pid` counts
    since: str
    times: str = ""  # the namespace of its clocks


class NoLocks(ResourceError):
    """A file system that keeps no locks."""


@contextmanager
def lock(path: Path, label: str) -> Iterator[None]:
    """Hold `path` for this process. The kernel releases it when the process ends, however it ends.

    If the kernel does not, because a child of the dead holder has the file open or the file system
    keeps the lock, the lock is taken over as soon as its holder is proved dead. Raises LockHeld,
    which names the process that holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _taken(path, label)
    try:
        yield
    finally:
        os.ftruncate(file, 0)
        os.close(file)


def holder_pid(path: Path) -> int | None:
    """The process that holds a lock, for readers; 0: in another container, or on another machine;
    None if no living process does. The lock of a holder that is here is not touched."""
    # OSError: there is no such file, or none of ours
    with suppress(OSError), files.descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        holder = _holder(file)
        if not holder or _is_dead(holder):
            return None
        if _is_here(holder):
            return holder.pid
        try:  # it may have ended with its container: the kernel knows
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
    return None


def _taken(path: Path, label: str) -> int:
    """Take the lock; return the file descriptor that holds it."""
    until = time.monotonic() + _LEFTOVER_S
    while True:
        file = opened(path)
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
        except BlockingIOError:
            _refuse_living(file, label)
            if time.monotonic() > until:
                return _replace(path, label)
            time.sleep(_RETRY_S)
            continue
        if is_same(file, path):
            _check_ours(file, path)
            _sign(file)
            return file
        os.close(file)  # replaced between open and lock


def _check_ours(file: int, path: Path) -> None:
    """Raise ResourceError for a file with lines that no start has written."""
    if os.pread(file, 1, 0) not in (b"", b"{", b"\0"):
        os.close(file)
        raise ResourceError(f"{path}: holds lines that are not lowmem's; move it elsewhere")


def opened(path: Path) -> int:
    """The lock's file, open. Raises ResourceError if something else is in its place."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        reason = "it is not a regular file; remove it"
    except OSError as error:
        reason = f"{error.strerror}; remove it, or choose another folder (LOWMEM_ROOT, output_dir)"
    raise ResourceError(f"{path}: cannot be locked: {reason}")


def flock(file: int, operation: int, path: Path) -> None:
    """fcntl.flock() of a file, which `path` names. Raises BlockingIOError as it does, and NoLocks
    where there are none."""
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        raise NoLocks(
            f"{path.parent}: its file system keeps no locks ({error.strerror}); mount it with locks"
            " (NFS: not `nolock`), or put it on a local disk: LOWMEM_ROOT names the folder of runs"
            " and caches"
        ) from error


def _replace(path: Path, label: str) -> int:
    """Put a new file in the place of a file that only children of a dead holder have open."""
    with files.descriptor(
        path.with_name(f"{path.name}.guard"), os.O_RDWR | os.O_CREAT, 0o644
    ) as guard:
        # Two processes may take over at once: the second waits here, then finds the first alive
        flock(guard, fcntl.LOCK_EX, path)
        _refuse_living(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), label)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        flock(file, fcntl.LOCK_EX, path)
        _sign(file)
        aside.replace(path)
        return file


def _refuse_living(file: int, label: str) -> None:
    """Close the lock's file. Raises LockHeld unless its holder is proved dead."""
    holder = _holder(file)
    os.close(file)
    if not _is_dead(holder):
        name = "another process"
        if holder:
            name = f"process {holder.pid} on {holder.host} since {holder.since}"
        if holder and not _is_here(holder):
            name = (
                f"{holder.host} (another machine or container, its process {holder.pid}) since"
                f" {holder.since}"
            )
        raise LockHeld(f"{label} is in use by {' '.join(name.split())}; wait for it, or stop it")


def _sign(file: int) -> None:
    """Write this process into the lock's file, as its holder."""
    holder = _Holder(
        os.getpid(),
        socket.gethostname(),
        processes.start_ticks(os.getpid()),
        processes.boot_id(),
        _namespace("pid"),
        time.strftime("%Y-%m-%d %H:%M:%S"),
        _namespace("time"),
    )
    os.ftruncate(file, 0)
    os.pwrite(file, files.adapter(_Holder).dump_json(holder, by_alias=True), 0)


def _holder(file: int) -> _Holder | None:
    """The facts that the holder wrote; None while it is writing, or if it could not write."""
    try:
        return files.adapter(_Holder).validate_json(os.pread(file, 4096, 0))
    except ValueError:
        return None


def _is_dead(holder: _Holder | None) -> bool:
    """True if the holder is proved dead: it ran here, and no process or another process has its pid
    now. A lock of another boot may be that of another machine of the same name: after a restart
    the kernel has let go of it."""
    return (
        holder is not None
        and _is_here(holder)
        and processes.start_ticks(holder.pid) != holder.start_ticks
    )


def _is_here(holder: _Holder) -> bool:
    """True if a process of this machine wrote it, in this container: its pid and its time mean
    something."""
    times = (_namespace("time"), "")  # "": an earlier version wrote it
    here = (socket.gethostname(), processes.boot_id(), _namespace("pid"))
    return (holder.host, holder.boot, holder.namespace) == here and holder.times in times


def _namespace(kind: str) -> str:
    return str(Path(f"/proc/self/ns/{kind}").readlink())


def is_same(file: int, path: Path) -> bool:
    """True if the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except OSError:
        return False
