"""What cannot be written down does not stop a training: a full log disk, a reader that has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import builders


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 KiB where the logs go."""
    folder = tmp_path / "workspace/logs"
    folder.mkdir(parents=True)
    if os.system(f"mount -t tmpfs -o size=16k none {folder}") != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    os.system(f"umount -l {folder}")


@pytest.mark.shows("F52", "a tmpfs of 16 KiB for the log; the log is cut, and that is said once")
def test_a_full_log_disk_is_said_once_and_training_goes_on(tmp_path, small_disk):
    recipe = builders.recipe(tmp_path, training={"num_train_epochs": 40})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the log ends here, training goes on") == 1
    (log,) = small_disk.glob("*.log")
    assert log.stat().st_size <= 16 << 10
    assert "step 1/240" in log.read_text()
    assert "step 240/240" not in log.read_text()
    assert "step 240/240" in done.stdout
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.shows("F52", "stdout is `| head -n 3`, closed, or /dev/full")
@pytest.mark.parametrize("reader", ["| head -n 3", ">&- 2>&-", "> /dev/full"])
def test_a_reader_that_has_gone_does_not_stop_training(tmp_path, reader):
    recipe = builders.recipe(tmp_path)
    line = f'"{sys.executable}" -m launch run "{recipe}" {reader}; exit "${{PIPESTATUS[0]}}"'
    environment = builders.environment(tmp_path / "workspace")
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model/config.json").exists()
    (log,) = Path(tmp_path / "workspace/logs").glob("*.log")
    assert "step 12/12" in log.read_text()
