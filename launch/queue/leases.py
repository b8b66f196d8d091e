"""Leases of this machine's memory: a file for each start, in a folder of all users.

A lease is alive while its process holds a lock of the kernel on it. The lock is a POSIX record
lock: child processes do not inherit it, it ends with its process however that ends, and the kernel
names the process to others. A lease counts only if its file belongs to the user of that process. Of
another user's lease only sizes, state and place in the order are read, each within bounds.

Every user may write into the folder. Of files of other users only the mutex, which all share, is
opened for writing, and none of them stops a start."""

import errno
import fcntl
import itertools
import os
import pwd
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from launch.base import files, locks, processes
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import HIDDEN

# Folders for all users, in order of preference: the first that this machine lets a user make
FOLDERS = (Path("/run/lock/lowmem"), Path("/tmp/lowmem-leases"))
NAME = re.compile(r"(\d{1,8})\.lease")
_LAST_NUMBER = 99_999_999  # after it come those that are free from 1 on
_MUTEX = "admission"  # locked while a start decides; it holds the number of the last lease
RECORD_BYTES = 8192  # size of each file, so that a new record replaces all of the last
MUTEX_S = 30.0  # a decision takes milliseconds
_READ_AGAIN_S = 0.01  # records that are being written
_FLOCK = "hhqqi4x"  # struct flock of fcntl(2)
# to read a file that any user may have made: no link, and no FIFO that would wait for a writer
_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

State = Literal["waiting", "blocked", "granted"]  # blocked: it may not start yet, whatever is free
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


@dataclass(frozen=True)
class Needs:
    """The most that a start takes, and the limits that it has set itself."""

    host_bytes: Bytes
    reserve_bytes: Bytes = 0  # host RAM that stays free beside it
    num_cards: Annotated[int, Field(ge=0, le=1024)] = 0
    card_bytes: Bytes = 0  # VRAM on each card
    vram_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of free VRAM that it may take
    disk_bytes: Bytes = 0
    disk_device: Annotated[int, Field(ge=0, le=1 << 64)] = 0
    host_limit_bytes: Bytes | None = None  # limit for all leases together
    card_limit_bytes: Bytes | None = None


@dataclass(frozen=True)
class Taken:
    """The part of a lease that its processes hold now, as they measured it."""

    host_bytes: Bytes = 0
    card_bytes: Bytes = 0  # VRAM on each card
    disk_bytes: Bytes = 0


@dataclass(frozen=True)
class Record:
    """The content of a lease's file."""

    boot: Annotated[str, Field(max_length=64)]
    state: State
    needs: Needs
    taken: Taken = Taken()
    # cards that it holds, by UUID
    cards: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=64)] = ()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    place: Annotated[int, Field(ge=0, le=10**9)] = 0  # among runs of one priority; 0: the number
    since_s: Annotated[float, Field(ge=0, le=1e11)] = 0.0  # unix time
    # shown to its own user only
    recipe: Annotated[str, Field(max_length=100)] = ""
    waits_for: Annotated[str, Field(max_length=500)] = ""
    run: Annotated[str, Field(max_length=2000)] = ""


@dataclass(frozen=True)
class Asked:
    """Changes that its user asks of a run, in a file beside its lease."""

    is_held: bool = False
    place: Annotated[int, Field(ge=0, le=10**9)] = 0
    is_yielded: bool = False  # it is to save and wait behind those that wait now


@dataclass(frozen=True)
class Lease:
    """A lease that is alive. `pid` is the kernel's word; 0: in a container that is not ours."""

    number: int
    uid: int
    pid: int
    record: Record

    @property
    def turn(self) -> tuple[int, int, int]:
        """The place in the order of runs that wait: the smallest is first."""
        return turn(self.record, self.number)

    @property
    def is_own(self) -> bool:
        return self.uid == os.geteuid()

    @property
    def name(self) -> str:
        """The run by number, user and process, and to its own user by recipe."""
        recipe = f"{self.record.recipe}, " if self.is_own and self.record.recipe else ""
        return f"run {self.number} of {user_name(self.uid)} ({recipe}{_process(self.pid)})"


class NoLeases(ResourceError):
    """The folder of leases cannot be used now. A start that does not wait goes on without it."""


class OwnLease:
    """The lease of this process, until it is released or the process ends."""

    def __init__(self, path: Path, file: int, number: int, record: Record) -> None:
        self.path, self.number, self.record = path, number, record
        self.waits_for = ""  # reason that its user was told last
        self._file = file

    def write(self, **changes: Any) -> None:
        """Write the record with these changes; nothing if there are none."""
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            os.pwrite(self._file, _content(record), 0)

    def check_seen(self) -> None:
        """Raise NoLeases where others cannot see the lease: its folder was removed or replaced."""
        if not locks.is_same(self._file, self.path):
            raise NoLeases(
                f"{self.path}: the lease of this run is gone, and others cannot see it; put its"
                " folder back, or start the run again"
            )

    def is_yielded(self) -> bool:
        """True if its user has asked it to give its memory to those that wait."""
        return read_asked(self.path).is_yielded

    def settle_yield(self) -> None:
        """Take back the request to yield, which is done; its new place in the order stays."""
        request = read_asked(self.path)
        if request.is_yielded:
            _write_asked(self.path, os.geteuid(), replace(request, is_yielded=False))

    def release(self) -> None:
        """End the lease, unless that is done. Its files stay in a folder that has been closed."""
        if self.path in _own:
            with suppress(OSError):
                _remove_files(self.path, os.geteuid())
            _own.discard(self.path)
            os.close(self._file)


# To open and close a file of this process would end its lock.
_own: set[Path] = set()


def folder() -> Path:
    """The folder of this machine's leases: LOWMEM_LEASES, or one of FOLDERS, which is made for all
    users. Raises ResourceError if none of them can be used."""
    if named := os.environ.get("LOWMEM_LEASES"):
        if HIDDEN.search(named) or "\n" in named:
            raise ConfigError(
                f"LOWMEM_LEASES {named!r}: holds a control character; name another folder"
            )
        path = Path(named).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoLeases(
                f"LOWMEM_LEASES {named}: no folder for leases can be made there"
                f" ({error.strerror}); name another one"
            ) from error
        return path
    problems = []
    for path in FOLDERS:
        before = os.umask(0)
        try:
            path.mkdir(0o1777)
        except FileExistsError:
            pass
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        finally:
            os.umask(before)
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o1777 == 0o1777:
            return path
        problems.append(f"{path}: is not a folder where each user may write (mode 1777)")
    raise NoLeases(
        f"no folder for leases of this machine's memory ({'; '.join(problems)}); name one that its"
        " users share with LOWMEM_LEASES"
    )


def live(place: Path) -> list[Lease]:
    """Every lease in the folder that is alive, without those of this process. Raises NoLeases."""
    alive, paths = [], _lease_files(place)
    for wait_s in (_READ_AGAIN_S, _READ_AGAIN_S, 0.0):
        unread = []
        for path in paths:
            try:
                alive.append(_read(path))
            except ValidationError:
                unread.append(path)
            except OSError as error:
                raise _no_locks(place, error) from error
        if not unread:
            break
        time.sleep(wait_s)
        paths = unread
    return sorted((lease for lease in alive if lease), key=lambda lease: lease.number)


def of_this_machine(say: Callable[[str], None] = lambda line: None) -> list[Lease]:
    """Every lease that is alive; none, and a line, if there is no folder for them."""
    try:
        return live(folder())
    except ResourceError as error:
        say(f"memory is planned without leases: {error}")
        return []


def granted(say: Callable[[str], None] = lambda line: None) -> list[Lease]:
    """The leases that hold memory of this machine now."""
    return [lease for lease in of_this_machine(say) if lease.record.state == "granted"]


@contextmanager
def admission(place: Path, patience_s: float = MUTEX_S) -> Iterator[Callable[[Record], OwnLease]]:
    """Let one process of the machine decide at a time. Yields a function that takes a lease.

    Raises NoLeases if the folder cannot be written to, or if another process does not come to an
    end with its decision in time."""
    file = _mutex(place / _MUTEX, patience_s)
    try:
        yield lambda record: _begin(place, file, record)
    finally:
        os.close(file)


def boot_record(**fields: Any) -> Record:
    """A record of this boot of the machine, made now."""
    return Record(boot=processes.boot_id(), since_s=time.time(), **fields)


def turn(record: Record, number: int) -> tuple[int, int, int]:
    return -record.priority, record.place or number, number


def last_number(place: Path) -> int:
    """The number of the last lease that was taken in a folder; 0: none."""
    with suppress(OSError), files.descriptor(place / _MUTEX, _READING) as file:
        return _last_number(file)
    return 0


def _last_number(mutex: int) -> int:
    text = os.pread(mutex, 16, 0).strip(b" \0")
    return int(text) if text.isdigit() and int(text) <= _LAST_NUMBER else 0


def lease_path(place: Path, number: int) -> Path:
    return place / f"{number}.lease"


def write_asked(place: Path, lease: Lease, request: Asked) -> None:
    """Ask a run for changes; its process reads them at its next look. Raises NoLeases."""
    try:
        _write_asked(lease_path(place, lease.number), lease.uid, request)
    except OSError as error:
        raise NoLeases(f"{place}: cannot be written to ({error.strerror})") from error


def read_asked(path: Path) -> Asked:
    """The changes that the user of a lease has asked for; others' words do not count."""
    try:
        owner = path.lstat().st_uid
        newest = max(_asked_files(path, owner), key=lambda each: each.lstat().st_mtime_ns)
        with files.descriptor(newest, _READING) as file:
            return files.adapter(Asked).validate_json(os.pread(file, 256, 0), strict=True)
    except (OSError, ValueError):  # there is none, it is damaged, or the lease has just ended
        return Asked()


def _write_asked(path: Path, owner: int, request: Asked) -> None:
    """Write a request under a name that nobody can have taken, and remove those before it."""
    before = _asked_files(path, owner)
    path_of_request = path.with_suffix(f".{secrets.token_hex(8)}.asked")
    aside = path_of_request.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with files.descriptor(aside, flags, 0o644) as file:
        os.write(file, files.to_json(asdict(request)).encode())
        if os.geteuid() != owner:
            os.fchown(file, owner, -1)
    aside.rename(path_of_request)
    for earlier in before:
        earlier.unlink(missing_ok=True)


def _asked_files(path: Path, owner: int) -> list[Path]:
    """The requests to a lease that its user, or root in that user's name, has written."""
    name = re.compile(rf"{path.stem}(\.[0-9a-f]+)?\.asked")
    return [
        Path(entry.path)
        for entry in os.scandir(path.parent)
        if name.fullmatch(entry.name)
        and entry.is_file(follow_symlinks=False)
        and entry.stat(follow_symlinks=False).st_uid == owner
    ]


def _remove_files(path: Path, owner: int) -> None:
    """Remove a lease, and the requests to it."""
    for each in (*_asked_files(path, owner), path):
        each.unlink(missing_ok=True)


def _process(pid: int) -> str:
    return f"process {pid}" if pid else "a process in another container"


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _begin(place: Path, mutex: int, record: Record) -> OwnLease:
    """Take a lease with the next number, and remove those of ended processes. Raises NoLeases."""
    for path in _lease_files(place):
        _remove_if_dead(path)
    last = max([_last_number(mutex), *(lease.number for lease in live(place))])
    try:
        number, file = _new_file(place, last)
        lease = OwnLease(lease_path(place, number), file, number, record)
        try:
            os.fchmod(file, 0o644)  # for the other users, whatever the umask
            _lock(file, place)
            os.pwrite(file, _content(record), 0)
            os.pwrite(mutex, str(number).encode().ljust(16), 0)
        except BaseException:
            lease.release()
            raise
    except OSError as error:
        raise NoLeases(f"{place}: no lease can be written there ({error.strerror})") from error
    return lease


def _new_file(place: Path, last: int) -> tuple[int, int]:
    """The file of the first number after the last one that nobody has taken."""
    for number in itertools.chain(range(last + 1, _LAST_NUMBER + 1), range(1, last + 1)):
        path = lease_path(place, number)
        with suppress(FileExistsError):
            file = os.open(path, (os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC), 0o644)
            _own.add(path)
            return number, file
    raise AssertionError("a hundred million leases")


def _lock(file: int, path: Path) -> None:
    """Raises BlockingIOError where another process has locked it, NoLeases without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(error.errno, error.strerror) from error
    except OSError as error:
        raise _no_locks(path, error) from error


def _no_locks(path: Path, error: OSError) -> NoLeases:
    return NoLeases(
        f"{path}: its file system keeps no locks ({error.strerror}); name a folder on a local disk"
        " with LOWMEM_LEASES"
    )


def _content(record: Record) -> bytes:
    content = files.to_json(asdict(record)).encode()
    if len(content) > RECORD_BYTES:
        content = files.to_json(asdict(replace(record, run=""))).encode()
    assert len(content) <= RECORD_BYTES
    return content.ljust(RECORD_BYTES)


def _lease_files(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if NAME.fullmatch(path.name) and path not in _own]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NoLeases(
            f"{place}: the leases there cannot be listed ({error.strerror}); name a folder that all"
            " users share with LOWMEM_LEASES"
        ) from error


def _read(path: Path) -> Lease | None:
    """The lease in a file that any user may have written; None if it is not alive, or holds no
    record of this boot of the machine. Raises ValidationError for one that is no record (yet)."""
    try:
        file = os.open(path, _READING | os.O_CLOEXEC)
    except OSError:  # it is gone, or no file of ours: a link, or closed to other users
        return None
    try:
        pid, uid = _holder(file), os.fstat(file).st_uid
        if pid is None:
            return None
        record = files.adapter(Record).validate_json(os.pread(file, RECORD_BYTES, 0), strict=True)
        if record.boot != processes.boot_id():  # a folder that several machines share
            return None
        return Lease(int(path.stem), uid, pid, record)
    finally:
        os.close(file)


def _holder(file: int) -> int | None:
    """The process that has locked a regular file for writing, and to whose user it belongs; None:
    there is none."""
    status, (kind, pid) = os.fstat(file), _obstacle(file)
    if not stat.S_ISREG(status.st_mode) or kind != fcntl.F_WRLCK:
        return None
    # "": the process is in another container, or hidden from this user
    owners = files.system_text(Path(f"/proc/{pid}/status"))
    uids = re.search(r"^Uid:(.*)", owners, re.MULTILINE)
    return pid if uids is None or str(status.st_uid) in uids[1].split() else None


def _obstacle(file: int) -> tuple[int, int]:
    """The kind of the lock that keeps others from writing to a file, and its process; 0: it is in
    another container."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    return kind, max(pid, 0)


def _remove_if_dead(path: Path) -> None:
    """Remove the lease of an ended process, unless it is another user's."""
    # it may be gone, or may not be removed
    with suppress(OSError), files.descriptor(path, _READING) as file:
        status = os.fstat(file)
        is_ours = os.geteuid() in (0, status.st_uid) and stat.S_ISREG(status.st_mode)
        if is_ours and _holder(file) is None:
            _remove_files(path, status.st_uid)


def _mutex(path: Path, patience_s: float) -> int:
    """The open file that only this process has locked."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            file = _shared_file(path)
        except (FileExistsError, FileNotFoundError):
            problem = "it is made and removed again and again"
        except OSError as error:
            raise NoLeases(
                f"{path}: cannot be opened ({error.strerror}); name a folder that all users share"
                " with LOWMEM_LEASES"
            ) from error
        else:
            try:
                _lock(file, path)
                if locks.is_same(file, path):
                    return file
                problem = "it is replaced or removed again and again"
            except BlockingIOError:
                problem = f"{_process(_obstacle(file)[1])} decides there and does not end"
            os.close(file)
        if time.monotonic() > until_s:
            raise NoLeases(
                f"{path}: {problem}; end that process, or name another folder for all users with"
                " LOWMEM_LEASES"
            )
        time.sleep(_READ_AGAIN_S)


def _shared_file(path: Path) -> int:
    """A file of all users, open. Raises OSError.

    Without O_CREAT if it is there: the kernel refuses that for another user's file in a folder
    where anybody may write (fs.protected_regular)."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(file, 0o666)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a regular file of this name alone")
