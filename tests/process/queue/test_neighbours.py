"""Files of another user in the folder of leases: nobody else's start ends, waits for ever, or
writes where it should not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.queue import admission, leases, starts
from launch.queue.leases import Asked, Needs, NoLeases, OwnLease
from tests import builders
from tests.process.queue.holders import said

NOBODY = 65534
LONG_S = 60.0  # of processor time; thousands of locked files took minutes
# CI is root, and runs them; no other user can start a process of a second one
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)
HOLD = f"""
import fcntl, os, resource, sys, time
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
kind, *names = sys.argv[1:]
files = []
for name in names:
    read = kind == "read"
    files.append(os.open(name, os.O_RDONLY if read else os.O_RDWR | os.O_CREAT, 0o644))
    fcntl.lockf(files[-1], fcntl.LOCK_SH if read else fcntl.LOCK_EX)
print("holds", flush=True)
time.sleep(600)  # a test kills it long before; one whose test died ends by itself
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of leases where each user may write."""
    folder = Path(tempfile.mkdtemp(prefix="leases-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def neighbour(place) -> Iterator[Neighbour]:
    with closing(Neighbour(place)) as user:
        yield user


class Neighbour:
    """Another user of the machine."""

    def __init__(self, place: Path) -> None:
        self.place, self.children = place, list[subprocess.Popen[str]]()

    def locks(self, *names: str, kind: str = "write") -> int:
        """A process that locks these files; its pid."""
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, kind, *names],
            cwd=self.place,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        assert said(child) == "holds"
        return child.pid

    def writes(self, name: str, text: str = "") -> Path:
        path = self.place / name
        path.write_text(text)
        os.chown(path, NOBODY, NOBODY)
        return path

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def taken(place: Path) -> OwnLease:
    record = leases.boot_record(state="granted", needs=Needs(1 << 30))
    with leases.admission(place) as begin:
        return begin(record)


def seen(place: Path) -> str:
    """The list that `queue` shows to others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "launch", "queue"],
        env=builders.environment(place / "w", LOWMEM_LEASES=str(place)),
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LONG_S
    return done.stdout


@needs_root
@pytest.mark.parametrize("name", ["999999999.lease", "99999999.lease", "admission"])
def test_a_largest_number_ends_nobodys_start(place, neighbour, name):
    neighbour.writes(name, "999999999")
    neighbour.locks(*([name] if name != "admission" else []))
    if name == "admission":
        (place / name).chmod(0o666)
    first, second = taken(place), taken(place)
    assert first.number != second.number
    for own in (first, second):
        assert f"\n{own.number:>4}  root " in seen(place)
        own.release()


@needs_root
def test_names_that_are_taken_are_passed_over(place, neighbour):
    neighbour.locks(*(f"{number}.lease" for number in range(1, 30)))
    (place / "30.lease").symlink_to("/etc/passwd")
    (place / "31.lease").mkdir()
    own = taken(place)
    assert own.number == 32
    own.release()


@needs_root
def test_a_lease_counts_only_with_the_process_of_its_user(place, neighbour):
    record = leases.boot_record(state="granted", needs=Needs(9 << 30))
    dead, locked = place / "7.lease", place / "8.lease"
    for path in (dead, locked):
        path.write_text(json.dumps(asdict(record)))
        path.chmod(0o644)  # whatever the umask
    locked.chmod(0o666)
    neighbour.locks("7.lease", kind="read")
    neighbour.locks("8.lease")
    assert leases.live(place) == []
    own = taken(place)  # removes what is left of the dead
    assert own.number == 1 and not dead.exists()
    own.release()


@needs_root
def test_thousands_of_locked_files_take_little_time(place, neighbour):
    neighbour.locks(*(f"{number}.lease" for number in range(1, 1601)))
    own = taken(place)
    assert own.number == 1601 and "1601  root " in seen(place)
    own.release()


@needs_root
def test_requests_of_others_count_nothing_and_stand_in_nobodys_way(place, neighbour):
    own, victim = taken(place), place / "victim"
    victim.write_text("mine")
    neighbour.writes(f"{own.number}.asked", '{"is_held": true}')
    neighbour.writes(f"{own.number}.00ff.asked", '{"is_held": true}')
    pid = os.getpid()
    for name in (f".{own.number}.asked.{pid}.tmp", f"{own.number}.11ff.asked"):
        (place / name).symlink_to(victim)
    assert leases.read_asked(own.path) == Asked()
    lease = leases.Lease(own.number, 0, pid, own.record)
    for asked in (Asked(is_held=True), Asked(place=3, is_yielded=True)):
        leases.write_asked(place, lease, asked)
        assert leases.read_asked(own.path) == asked
    own.settle_yield()
    assert leases.read_asked(own.path) == Asked(place=3)
    assert victim.read_text() == "mine"
    own.release()
    left = [path for path in place.glob("*.asked") if not path.is_symlink()]
    assert {path.stat().st_uid for path in left} == {NOBODY}


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "second name"])
def test_a_mutex_that_is_no_file_is_a_line_at_once(place, kind):
    path = place / "admission"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (place / "victim").write_text("important")
        os.link(place / "victim", path)
    with pytest.raises(NoLeases, match=r"admission: cannot be opened \(.*\); name a folder that"):
        leases.admission(place, patience_s=1e9).__enter__()
    assert leases.last_number(place) == 0
    assert kind != "second name" or (place / "victim").read_text() == "important"


@needs_root
@pytest.mark.parametrize("kind", ["closed", "foreign", "full"])
def test_a_start_without_a_usable_folder_goes_on_without_a_lease(place, kind):
    code = f"""
import os
from pathlib import Path
from launch.base import files
from launch.queue import leases
place, record = Path({str(place)!r}), leases.boot_record(state="granted", needs=leases.Needs(1))
leases.live(Path("/nowhere")), files.adapter(leases.Record)
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
def begin():
    with leases.admission(place, 0.5) as begin:
        begin(record)
for look in (lambda: leases.live(place), begin):
    try:
        look()
    except leases.NoLeases as error:
        print(error)
"""
    if kind == "full":
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "none", str(place)]
        if subprocess.run(mount, capture_output=True).returncode:
            # a container without the right to mount; CI has it
            pytest.skip("this machine lets no file system be mounted")
    else:
        place.chmod(0o700 if kind == "closed" else 0o755)
    try:
        if kind == "full":
            (place / "admission").write_bytes(b"1" * 4096)
            (place / "admission").chmod(0o666)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    finally:
        if kind == "full":
            subprocess.run(["umount", "-l", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    expected = {
        "closed": ["the leases there cannot be listed (Permission denied)", "cannot be opened"],
        "foreign": ["admission: cannot be opened (Permission denied)"],
        "full": ["no lease can be written there (No space left on device)"],
    }[kind]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, words in zip(lines, expected, strict=True):
        assert words in line


def test_a_folder_on_a_disk_without_locks_is_named(place, tmp_path):
    source, library = tmp_path / "no_locks.c", tmp_path / "no_locks.so"
    source.write_text(
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int fcntl64(int file, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *value = va_arg(rest, void *);
    va_end(rest);
    if (command == F_GETLK) {
        errno = ENOLCK;
        return -1;
    }
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(file, command, value);
}
"""
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (place / "1.lease").touch()
    code = f"""
from pathlib import Path
from launch.queue import leases
try:
    leases.live(Path({str(place)!r}))
except leases.NoLeases as error:
    print(error)
"""
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "its file system keeps no locks (No locks available)" in done.stdout, done.stderr


@needs_root
def test_who_waits_goes_on_waiting_for_a_start_that_never_decides(place, neighbour, monkeypatch):
    # pauses alone: what is waited for is real
    monkeypatch.setattr(starts, "MUTEX_S", 0.2)
    monkeypatch.setattr(starts, "POLL_S", 0.05)
    (place / "admission").touch()
    (place / "admission").chmod(0o666)
    pid = neighbour.locks("admission")
    os.kill(pid, signal.SIGSTOP)
    record = leases.boot_record(state="granted", needs=Needs(1))
    with pytest.raises(NoLeases, match=f"process {pid} decides there and does not end"):
        leases.admission(place, 0.1).__enter__()
    lines: list[str] = []
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    supply = admission.Supply(builders.machine(), ())
    own, _ = starts.wait(place, record, lambda _: supply, lambda _: "", lines.append)
    assert len(lines) == 1 and lines[0].startswith("waiting for a look at the leases: ")
    assert f"process {pid} decides there" in lines[0]
    own.release()


def test_an_error_of_a_look_is_waited_for_and_said_once(place, monkeypatch):
    monkeypatch.setattr(starts, "POLL_S", 0.01)  # a pause alone
    looks: list[int] = []

    def supply(granted):
        looks.append(1)
        if len(looks) < 5:
            raise OSError("nvidia-smi does not answer")
        return admission.Supply(builders.machine(), granted)

    lines: list[str] = []
    record = leases.boot_record(state="granted", needs=Needs(1))
    own, _ = starts.wait(place, record, supply, lambda _: "", lines.append)
    assert lines == ["waiting for a look at the leases: nvidia-smi does not answer"]
    own.release()


def test_a_run_whose_folder_of_leases_is_replaced_does_not_start(place, tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "POLL_S", 0.01)  # a pause alone
    moved, lines = tmp_path / "moved", list[str]()

    def blocked(own: OwnLease) -> str:
        if not moved.exists() and not lines[1:]:
            place.rename(moved)
            place.mkdir()
            return "the next look"
        return ""

    def say(line: str) -> None:
        lines.append(line)
        if "is gone" in line:
            shutil.rmtree(place)
            moved.rename(place)

    record = leases.boot_record(state="granted", needs=Needs(1))
    supply = admission.Supply(builders.machine(), ())
    own, _ = starts.wait(place, record, lambda _: supply, blocked, say)
    assert [("is gone, and others cannot see it" in line) for line in lines[:2]] == [False, True]
    own.release()


def test_a_lease_of_the_version_before_is_counted(place):
    """Its record has these keys; another version reads ours by the same."""
    code = f"""
import fcntl, json, os, sys, time
needs = {{"host_bytes": 7, "reserve_bytes": 0, "num_cards": 0, "card_bytes": 0,
    "vram_fraction": 1.0, "disk_bytes": 0, "disk_device": 0, "host_limit_bytes": None,
    "card_limit_bytes": None}}
taken = {{"host_bytes": 0, "card_bytes": 0, "disk_bytes": 0}}
record = {{"boot": {leases.boot_record(state="granted", needs=Needs(1)).boot!r}, "state": "granted",
    "needs": needs, "taken": taken, "cards": [], "priority": 0, "place": 0, "since_s": 1.0,
    "recipe": "tiny", "waits_for": "", "run": "/runs/tiny/1"}}
file = os.open({str(place / "4.lease")!r}, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
fcntl.lockf(file, fcntl.LOCK_EX)
os.pwrite(file, json.dumps(record).encode().ljust(8192), 0)
print(json.dumps(record), flush=True)
time.sleep(600)  # a test kills it long before; one whose test died ends by itself
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        written = json.loads(said(child))
        (lease,) = leases.live(place)
        assert (lease.number, lease.pid) == (4, child.pid)
        assert json.loads(json.dumps(asdict(lease.record))) == written
    finally:
        child.kill()
        child.wait()
