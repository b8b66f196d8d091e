"""A share that gives every file one owner (NFS all_squash, CIFS uid=): the seal says who wrote."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import builders

SOURCE = builders.CODE / "tests" / "data" / "one_owner.c"
PROGRAM = """
import os, sys
from pathlib import Path
from launch.run_folder import manifest
from tests.unit.training.checkpoints.test_checkpoint import committed
from training.checkpoints import commit

disk = Path(sys.argv[1]) / "runs" / "a"
disk.mkdir(parents=True)
folders = [committed(disk, step) for step in (1, 2, 3)]
print(folders[0].stat().st_uid, [manifest.fault(folder) for folder in folders])
print(manifest.key_note())
commit.rotate(disk, 2, set())
print(sorted(path.name for path in disk.iterdir()))
"""


def test_checkpoints_of_such_a_share_are_continued_and_rotated(tmp_path):
    library, disk = tmp_path / "one_owner.so", tmp_path / "share"
    disk.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    env = builders.environment(disk, XDG_STATE_HOME=str(tmp_path / "state"))
    env |= {"LOWMEM_ROOT": str(disk), "LD_PRELOAD": str(library), "ONE_OWNER_OF": str(disk)}
    argv = [sys.executable, "-c", PROGRAM, str(disk)]
    done = subprocess.run(argv, env=env, cwd=builders.CODE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verified, note, left = done.stdout.splitlines()
    assert verified == "1024 [None, None, None]" and os.geteuid() != 1024
    assert f"{disk} is another user's, or keeps no owner and mode of a file" in note
    assert left == "['checkpoint-000002', 'checkpoint-000003', 'commits.json']"
