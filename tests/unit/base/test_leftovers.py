"""Files that killed processes have left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from launch.base import leftovers

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def aged(path, seconds):
    moment = path.stat().st_mtime - seconds
    os.utime(path, (moment, moment))


def test_what_a_process_that_is_gone_has_left_is_removed_and_nothing_else(tmp_path, gone):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    left = [checkpoints / f".commits.json.{gone}.tmp", tmp_path / f".a.json.{gone}.tmp"]
    others = [checkpoints / f".plan.json.{os.getpid()}.tmp", tmp_path / f"tmp-{gone}-x2"]
    others += [tmp_path / "tmp-notes-x", checkpoints / "a.12.tmp.json", tmp_path / "commits.json"]
    for path in (*left, *others):
        path.mkdir() if path.name.startswith("tmp-") else path.write_text("[]")
    leftovers.sweep(tmp_path)
    assert all(path.exists() for path in left), "a process of another machine may be writing"
    for path in (*left, *others):
        aged(path, 61)
    leftovers.sweep(tmp_path)
    assert [path for path in (*left, *others) if path.exists()] == others


def test_a_folder_for_sockets_is_removed_when_no_process_has_a_socket_in_it(tmp_path):
    used, unused, young = (tmp_path / f"pymp-{name}" for name in ("used", "unused", "young"))
    for folder in (used, unused, young):
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(used / "listener-1"))
        aged(used, 3601)
        aged(unused, 3601)
        leftovers.sweep_socket_folders(tmp_path)
        assert (used.exists(), unused.exists(), young.exists()) == (True, False, True)
