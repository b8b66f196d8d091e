"""Networks that ranks cannot meet on are named before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch.base import environment
from tests import builders, namespaces

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


@pytest.mark.parametrize(
    ("setup", "words", "named"),
    [
        ("true", ["--launch.num_processes=2"], "error: 127.0.0.1, at which the ranks"),
        pytest.param(
            *("true", ["--launch.mode=deepspeed_zero2"], "error: 127.0.0.1, at which the ranks"),
            marks=pytest.mark.modes,
        ),
        (
            "ip link set lo up; mount --bind /dev/null /etc/hosts; hostname nowhere",
            ["--launch.num_processes=2"],
            "error: localhost has no address (",
        ),
        (
            "ip link set lo up; ip address delete 127.0.0.1/8 dev lo",
            ["--launch.num_processes=2"],
            "error: 127.0.0.1, at which the ranks",
        ),
        (
            "ip link set lo up",
            ["--launch.nodes=2", "--launch.num_processes=2", "--launch.main_process_ip=fd00::1"],
            "error: launch.main_process_ip fd00::1 is no address of this machine",
        ),
    ],
)
def test_a_network_on_which_ranks_cannot_meet_is_one_line_before_anything_is_planned(
    tmp_path, setup, words, named
):
    recipe = builders.recipe(tmp_path, launch={"num_processes": 1})
    line = f"{sys.executable} -m launch run {recipe} {' '.join(words)}"
    flags = ("--net", "--mount", "--uts")
    done = namespaces.bash(f"{setup}; exec {line}", *flags, workspace=tmp_path / "w")
    assert done.returncode in (2, 11), done.stdout + done.stderr
    assert named in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "w/runs").glob("tiny/*/attempts/*/plan.json"))
    if "deepspeed" not in words[0]:  # with which one process too has to meet itself
        assert "plan" not in done.stdout and "tokenis" not in done.stdout


@pytest.mark.modes
def test_without_a_loopback_one_process_trains(tmp_path):
    recipe = builders.recipe(tmp_path, training={"max_steps": 2}, launch={"num_processes": 1})
    line = f"exec {sys.executable} -m launch run {recipe}"
    done = namespaces.bash(line, "--net", workspace=tmp_path / "w")
    assert done.returncode == 0, done.stdout + done.stderr
