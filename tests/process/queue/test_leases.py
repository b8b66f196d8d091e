"""Leases of real processes: taken one at a time, gone with their process, and not to be believed in
what another user writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from launch.base.errors import ConfigError, ResourceError
from launch.queue import leases
from launch.queue.leases import Needs
from launch.schema.machine import GIB
from tests import builders
from tests.process.queue.holders import said

STRANGER = 65534


def test_of_six_starts_at_once_as_many_get_a_lease_as_there_is_memory_for(tmp_path, hold):
    lines = [said(child) for child in [hold("4") for _ in range(6)]]
    assert sorted(lines)[:2] == ["holds 1", "holds 2"]
    refusals = sorted(lines)[2:]
    assert all("the plan needs 4.00 GiB of host RAM, of which 2.00" in line for line in refusals)
    pids = [lease.pid for lease in leases.live(tmp_path)]
    assert len(pids) == 2 and all(f"process {pid})" in refusals[0] for pid in pids)


def test_a_lease_ends_with_its_process_though_a_child_has_its_file_open(tmp_path, hold):
    child = hold("4", "fork")
    assert said(child) == "holds 1"
    assert [lease.number for lease in leases.live(tmp_path)] == [1]
    child.kill()
    child.wait()
    assert leases.live(tmp_path) == []
    assert said(hold("9")) == "holds 2"  # and its file is removed
    assert sorted(path.name for path in tmp_path.glob("*.lease")) == ["2.lease"]


def test_a_process_does_not_end_its_own_lease_by_reading_all_of_them(tmp_path):
    record = leases.boot_record(state="granted", needs=Needs(GIB))
    with leases.admission(tmp_path) as begin:
        own = begin(record)
    assert leases.live(tmp_path) == []
    code = "from launch.queue import leases; from pathlib import Path\n"
    code += f"print(*[lease.pid for lease in leases.live(Path({str(tmp_path)!r}))])"
    env = builders.environment(tmp_path / "workspace")
    argv = [sys.executable, "-c", code]
    for pids in (str(os.getpid()), ""):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == pids
        if pids:
            own.release()
    assert list(tmp_path.glob("*.lease")) == []


@pytest.mark.parametrize(
    "damage",
    ["link", "fifo", "negative", "huge", "text", "endless", "other boot", "other state"],
)
def test_a_file_that_is_no_lease_of_this_boot_holds_nothing(tmp_path, damage):
    """The process that wrote it is alive and has it locked, as another user's could be."""
    record = asdict(leases.boot_record(state="granted", needs=Needs(GIB)))
    if damage in ("negative", "huge", "text"):
        record["needs"]["host_bytes"] = {"negative": -1, "huge": 1 << 60, "text": "1"}[damage]
    if damage == "other boot":
        record["boot"] = "another"
    if damage == "other state":
        record["state"] = "mine"
    path, target = tmp_path / "1.lease", tmp_path / "target"
    target.write_text(json.dumps(record) + " " * (1 << 20 if damage == "endless" else 0))
    if damage == "endless":
        target.write_text(" " * (1 << 20) + json.dumps(record))
    if damage == "link":
        path.symlink_to(target)
    elif damage == "fifo":
        os.mkfifo(path)
    else:
        target.rename(path)
    lock = "import fcntl, sys, time\nfile = open(sys.argv[1], 'r+b')\n"
    lock += "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('locked', flush=True)\ntime.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", lock, str(target if damage in ("link", "fifo") else path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert said(child) == "locked"
        assert leases.live(tmp_path) == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_of_another_users_lease_the_sizes_count_and_no_text_is_shown(tmp_path, hold):
    tmp_path.chmod(0o1777)
    child = hold("4", "as a stranger")
    assert said(child) == "holds 1"
    (lease,) = leases.live(tmp_path)
    assert (lease.uid, lease.pid) == (STRANGER, child.pid)
    assert lease.record.needs.host_bytes == 4 * GIB
    assert lease.name == f"run 1 of {leases.user_name(STRANGER)} (process {child.pid})"
    assert said(hold("9")).startswith("the plan needs")
    assert said(hold("2")) == "holds 2"  # in the files that a stranger has made


def test_a_folder_that_is_named_is_made_and_one_with_control_characters_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path / "a b" / "leases"))
    assert leases.folder() == tmp_path / "a b" / "leases"
    assert leases.folder().is_dir()
    monkeypatch.setenv("LOWMEM_LEASES", "a\nb")
    with pytest.raises(ConfigError, match=r"LOWMEM_LEASES 'a.nb': holds a control character"):
        leases.folder()


def test_the_folder_of_a_machine_is_open_to_all_its_users(tmp_path, monkeypatch):
    monkeypatch.delenv("LOWMEM_LEASES")
    shared, squatted = tmp_path / "shared", tmp_path / "squatted"
    squatted.mkdir(0o700)
    # not the machine's own folders
    monkeypatch.setattr(leases, "FOLDERS", (tmp_path / "missing" / "lowmem", squatted, shared))
    before = os.umask(0o077)
    try:
        assert leases.folder() == shared
    finally:
        os.umask(before)
    assert shared.stat().st_mode & 0o7777 == 0o1777
    monkeypatch.setattr(leases, "FOLDERS", (squatted,))
    with pytest.raises(ResourceError, match=r"mode 1777.*LOWMEM_LEASES"):
        leases.folder()


def test_a_start_that_does_not_fit_beside_a_lease_ends_with_3_and_names_its_holder(tmp_path, hold):
    holder = hold("4")
    assert said(holder) == "holds 1"
    recipe = builders.recipe(tmp_path / "workspace")
    limit = "--launch.host_limit_gib=4.2"
    done = builders.launch(
        tmp_path / "workspace", "run", str(recipe), limit, LOWMEM_LEASES=str(tmp_path)
    )
    assert done.returncode == 3, done.stderr
    assert f"(\\x1b[31mtiny, process {holder.pid}) 4.00 GiB of host RAM" in done.stderr
    assert "launch.host_limit_gib 4.2 less 4.00 GiB of leases" in done.stderr
    assert list(tmp_path.glob("workspace/runs/tiny/[0-9]*")) == []
    assert [path.name for path in tmp_path.glob("*.lease")] == ["1.lease"]
