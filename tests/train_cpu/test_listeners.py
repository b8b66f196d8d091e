"""Two ranks of one machine listen nowhere but on its loopback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import builders, orphans


@pytest.mark.modes
def test_nothing_of_a_run_listens_beyond_the_loopback(tmp_path):
    recipe = builders.recipe(
        tmp_path, training={"num_train_epochs": 6}, launch={"num_processes": 2}
    )
    argv = [sys.executable, "-m", "launch", "run", str(recipe)]
    with subprocess.Popen(
        argv, env=builders.environment(tmp_path / "workspace"), stdout=subprocess.PIPE, text=True
    ) as child:
        seen = orphans.listening(child)
        assert child.stdout is not None
        assert child.returncode == 0, child.stdout.read()
    assert len(seen) >= 2, "the store and the ranks' own listeners were seen"
    assert {address for address, _ in seen} == {"127.0.0.1"}
