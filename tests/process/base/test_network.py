"""Networks that ranks cannot meet on are named before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch.base import environment
from tests import builders

CODE = """
from launch.base import environment
try:
    environment.check_loopback()
except environment.NetworkError as error:
    print(error.exit_code, error)
"""


def test_a_machine_without_its_loopback_is_named(tmp_path):
    environment.check_loopback()
    argv = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", CODE]
    done = subprocess.run(argv, env=builders.environment(tmp_path), capture_output=True, text=True)
    if done.stderr.startswith("unshare"):
        # a kernel without user namespaces; CI has them
        pytest.skip("this machine lets nobody make a network namespace")
    assert done.stdout.startswith("11 127.0.0.1, at which the ranks"), done.stderr
    assert "`ip link set lo up`" in done.stdout
