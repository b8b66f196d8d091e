"""A lock names who holds it, and is taken over from the dead, with their children or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.base import locks
from launch.base.errors import LockHeld, ResourceError
from tests import builders, cost

HOLD = """
import os, sys, time
from pathlib import Path
from launch.base import locks
with locks.lock(Path(sys.argv[1]), "the run"):
    if sys.argv[2:]:  # a forked child keeps the file open, as a data loader's worker does
        if os.fork() == 0:
            time.sleep(600)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock, in a session of its own."""
    argv = [sys.executable, "-c", HOLD, str(path), *words]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_a_second_start_is_refused_at_once_with_process_host_and_time(tmp_path):
    with holder(tmp_path / "lock") as child:

        def start() -> None:
            with pytest.raises(
                LockHeld, match=rf"the run is in use by process {child.pid} on \S+ since \d{{4}}-"
            ):
                locks.lock(tmp_path / "lock", "the run").__enter__()

        assert cost.count_calls(start, of=time.sleep) == 0
    with locks.lock(tmp_path / "lock", "the run"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


def test_a_killed_holders_child_that_has_the_file_open_does_not_keep_the_lock(tmp_path):
    with holder(tmp_path / "lock", "forks") as child:
        child.kill()
        child.wait()
        with (
            locks.lock(tmp_path / "lock", "the run"),
            pytest.raises(LockHeld, match=f"process {os.getpid()} "),
        ):
            locks.lock(tmp_path / "lock", "the run").__enter__()
    with locks.lock(tmp_path / "lock", "the run"):
        pass


@pytest.mark.shows(
    "F25", "locks of the dead, of a reused pid, of another host, of a container", code=9
)
@pytest.mark.parametrize(
    ("changed", "is_taken_over"),
    [
        ({}, False),
        ({"started": 1}, True),  # its pid is another process's by now
        ({"pid": 2**22 + 1}, True),
        ({"boot": "another"}, False),  # another machine of the same name
        ({"times": "time:[1]", "started": 1}, False),  # a container's clocks
        ({"times": "", "started": 1}, True),  # of an earlier version
        ({"host": "another"}, False),
        ({"host": "another", "boot": "another", "pid": 2**22 + 1}, False),  # not ours to judge
        ({"namespace": "pid:[1]", "pid": 2**22 + 1}, False),  # a container's
    ],
)
def test_a_holder_is_dead_only_where_that_is_proved(tmp_path, changed, is_taken_over):
    """The kernel says that the file is locked; who did it is read from the file."""
    path = tmp_path / "lock"
    with holder(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
        if is_taken_over:
            with locks.lock(path, "the run"):
                assert json.loads(path.read_text())["pid"] == os.getpid()
        else:
            with pytest.raises(LockHeld):
                locks.lock(path, "the run").__enter__()


def test_of_many_that_take_over_at_once_one_has_it(tmp_path):
    code = """
import sys, time
from pathlib import Path
from launch.base import locks
from launch.base.errors import LockHeld, ResourceError
try:
    with locks.lock(Path(sys.argv[1]), "the run"):
        print("held", flush=True)
        time.sleep(4)
except LockHeld as error:
    print("refused")
"""
    with holder(tmp_path / "lock", "forks") as child:
        child.kill()
        child.wait()
        argv = [sys.executable, "-c", code, str(tmp_path / "lock")]
        others = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(6)]
        said = sorted(other.communicate(timeout=60)[0].strip() for other in others)
    assert said == ["held"] + ["refused"] * 5


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_lock(tmp_path, make):
    make(tmp_path / ".lock")
    with (
        pytest.raises(ResourceError, match="cannot be locked"),
        locks.lock(tmp_path / ".lock", "it"),
    ):
        pass


@pytest.mark.parametrize(
    "content", ["{}", '{"host": "a"}', '{"pid": ', '{"pid":' * 500, '{"pid": "../a", "boot": 7}']
)
def test_a_lock_whose_content_is_damaged_names_no_holder_and_is_taken(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    with locks.lock(tmp_path / ".lock", "it"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    with locks.lock(tmp_path / ".lock", "it"):
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(LockHeld), locks.lock(tmp_path / ".lock", "it"):
            pass


@pytest.mark.parametrize("content", ["my own lines\n", "[]", "7"])
def test_a_file_of_the_users_is_no_lock(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    message = "holds lines that are not lowmem's; move it elsewhere"
    with pytest.raises(ResourceError, match=message), locks.lock(tmp_path / ".lock", "it"):
        pass
    assert (tmp_path / ".lock").read_text() == content


def test_an_output_dir_on_a_disk_without_locks_is_locked_with_the_runs(tmp_path):
    """sshfs, buckets: flock() fails there with ENOLCK, as it does below the folder `share`."""
    source, library = tmp_path / "no_locks.c", tmp_path / "no_locks.so"
    source.write_text(
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int flock(int file, int operation)
{
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/share/")) {
        errno = ENOLCK;
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}
"""
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    recipe = builders.recipe(tmp_path, output_dir=str(tmp_path / "share" / "model"))
    code = f"""
from pathlib import Path
from launch.base.errors import LaunchError
from launch.base.workspace import Workspace
from launch.run_folder import layout
from tests import builders
from launch.recipe import load
recipe, _ = load.load("{recipe}", [])
for runs in ("local", "share/runs"):
    try:
        with layout.output_lock(Workspace(Path("{tmp_path}", runs)), recipe):
            layout.output_lock(Workspace(Path("{tmp_path}", runs)), recipe).__enter__()
    except LaunchError as error:
        print(error)
"""
    argv = [sys.executable, "-c", code]
    env = {**builders.environment(tmp_path / "w"), "LD_PRELOAD": str(library)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    held, none = done.stdout.splitlines()
    assert "is in use by process" in held and "its file system keeps no locks" in none
