"""The two-host harness itself: both sides talk, a cut is a cut, and nothing stays behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hosts
from tests.hosts import Host

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    client, (address, _) = server.accept()
    client.sendall(address.encode())
    client.close()
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as server:
    print(server.recv(100).decode())
"""
# starts a child in a session of its own, both deaf to SIGTERM
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _possible():
    if why := hosts.missing():
        pytest.skip(why)


def serve(on: Host) -> str:
    """The port of a server that tells every client its address."""
    child = on.popen([sys.executable, "-c", SERVER, on.address], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child.stdout.readline().strip()


def ask(client: Host, server: Host, port: str) -> subprocess.CompletedProcess[str]:
    return client.run([sys.executable, "-c", CLIENT, server.address, port], timeout=60)


def test_each_host_reaches_the_other_and_nobody_else_does():
    with hosts.pair() as (a, b):
        port = serve(b)
        assert ask(a, b, port).stdout.strip() == a.address
        assert ask(b, a, serve(a)).stdout.strip() == b.address
        with pytest.raises(OSError, match=r"timed out|unreachable|refused|No route"):
            socket.create_connection((b.address, int(port)), timeout=0.5)


@pytest.mark.parametrize("side", [0, 1])
def test_a_cut_cable_ends_every_connection_until_it_is_healed(side):
    with hosts.pair() as pair:
        a, b = pair
        port = serve(b)
        pair[side].cut()
        failed = ask(a, b, port)
        assert failed.returncode != 0
        assert (
            "TimeoutError" in failed.stderr
            or "unreachable" in failed.stderr
            or "No route" in failed.stderr
        )
        pair[side].heal()
        assert ask(a, b, port).stdout.strip() == a.address


def test_both_hosts_may_use_the_same_port():
    with hosts.pair() as pair:
        for host in pair:
            code = f"import socket; socket.create_server(('{host.address}', 29500))"
            assert host.run([sys.executable, "-c", code]).returncode == 0


def test_gloo_is_told_the_interface_and_the_environment_is_the_one_given():
    with hosts.pair() as (a, b):
        assert a.run(["sh", "-c", "echo $GLOO_SOCKET_IFNAME"]).stdout.strip() == a.interface
        path = {"PATH": os.environ["PATH"]}
        said = b.run(
            ["sh", "-c", "echo $GLOO_SOCKET_IFNAME $HOME"], env={**path, "GLOO_SOCKET_IFNAME": "lo"}
        )
        assert said.stdout.strip() == "lo"


def test_nothing_stays_behind_even_after_a_failure(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    before = interfaces()
    with pytest.raises(ZeroDivisionError, match="division"), hosts.pair() as (a, b):
        child = a.popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert sorted(a.pids()) == sorted([child.pid, grandchild])
        print(1 / 0)
    assert child.wait(timeout=60) == -9
    assert not running(grandchild)
    assert not {a.name, b.name} & set(
        subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    )
    assert interfaces() == before


def test_what_a_killed_test_process_left_is_removed_by_the_next():
    code = """
import os, signal, subprocess
from tests import hosts
with hosts.pair() as (a, b):
    null = subprocess.DEVNULL
    print(a.name, a.popen(["sleep", "600"], stdout=null, stderr=null).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[3]
    died = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    name, pid = died.stdout.split()
    assert running(int(pid))
    with hosts.pair():
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    assert name not in names
    assert not running(int(pid))


def test_a_program_is_on_its_host_when_its_start_returns(tmp_path, monkeypatch):
    slow = tmp_path / "ip"
    slow.write_text(f'#!/bin/sh\n[ "$2" = exec ] && sleep 1\nexec {shutil.which("ip")} "$@"\n')
    slow.chmod(0o755)
    with hosts.pair() as (a, _):
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        child = a.popen(["sleep", "600"])
        assert child.pid in a.pids()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
