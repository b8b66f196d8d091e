"""A build lock without a builder is taken away; a build that runs is waited for; a missing compiler
is named."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from launch.base.errors import ResourceError
from training.engines import ops


def test_a_lock_that_a_killed_build_left_is_removed_and_said(tmp_path):
    (tmp_path / "lock").touch()
    said: list[str] = []
    ops.unlock(tmp_path, said.append)
    assert not (tmp_path / "lock").exists()
    assert said == [f"removing {tmp_path}/lock: the build that wrote it is gone"]


def test_a_build_that_runs_is_waited_for(tmp_path):
    (tmp_path / "lock").touch()
    build = "import os, time; time.sleep(1.5); os.unlink('lock')"
    child = subprocess.Popen([sys.executable, "-c", build], cwd=tmp_path)
    said: list[str] = []
    began = time.monotonic()
    ops.unlock(tmp_path, said.append)
    assert time.monotonic() - began > 1
    assert said == [f"waiting for another build in {tmp_path}"]
    assert child.wait() == 0  # it found its lock still there


def test_a_missing_compiler_is_named_with_the_way_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ResourceError, match=r"there is no c\+\+ and no ninja.*zero_force_ds_cpu_optimizer: false"
    ):
        ops.check_compiler("cpu_adam")
