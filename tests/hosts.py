"""Two machines on one: network namespaces joined by a cable that can be cut. Needs root and `ip`
(Debian: iproute2).

    with hosts.pair() as (a, b):
        b.popen(["python", "server.py"])
        a.run(["python", "client.py", b.address], timeout=10)
        b.cut()

Only the network is apart: files, /dev/shm, the pid space and the host name are shared, so Gloo must
be told the interface (GLOO_SOCKET_IFNAME, which run and popen set) or it takes 127.0.0.1 for the
other side.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = re.compile(r"lowmem-([0-9a-f]+)-\d+-[01]$")  # the process that made the namespace
STOP_S = 60.0  # for processes in a namespace to be gone after SIGKILL
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One side: a network namespace with a loopback and one interface."""

    name: str  # of the namespace
    interface: str
    address: str

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host; env (default os.environ) gets the interface for Gloo,
        unless it names one. It is on this host when this returns: a process that `ip` has yet to
        bring here would be missed by what kills all that run here."""
        environment = {"GLOO_SOCKET_IFNAME": self.interface, **(os.environ if env is None else env)}
        child = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *argv], env=environment, **options
        )
        while child.poll() is None and child.pid not in self.pids():
            time.sleep(0.01)
        return child

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host to its end, its output captured as text."""
        child = self.popen(
            argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            child.communicate()
            raise
        return subprocess.CompletedProcess(argv, child.returncode, out, err)

    def cut(self) -> None:
        """Pull the cable on this side: packets are lost both ways, open connections stay open and
        hear nothing."""
        _ip("-n", self.name, "link", "set", self.interface, "down")

    def heal(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.name, "link", "set", self.interface, "up")

    def pids(self) -> list[int]:
        """Every process on this host."""
        return _pids(self.name)


def missing() -> str:
    """Why no hosts can be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "no `ip`: apt-get install --no-install-recommends iproute2"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return (
        ""
        if tried.returncode == 0
        else f"no network namespaces: {tried.stderr.strip()} (root may make them)"
    )


@contextmanager
def pair(is_ipv6: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, with IPv4 or with nothing but IPv6. At the end their
    processes are killed and both are gone, however it ends; what a killed test process left is
    removed first."""
    for name in _names():
        if (match := TAG.match(name)) and not Path(f"/proc/{int(match[1], 16)}").exists():
            _remove(name)
    number = next(_numbers)
    tag = f"{os.getpid():x}-{number}"  # an interface's name has 15 characters at most
    network, width = f"10.213.{number % 256}.", ["24"]
    if is_ipv6:  # nodad: it may be used at once
        network, width = f"fd00:213:{number % 256:x}::", ["112", "nodad"]
    first, second = (
        Host(f"lowmem-{tag}-{i}", f"lm{tag}{'ab'[i]}", f"{network}{i + 1}") for i in (0, 1)
    )
    with ExitStack() as undo:
        for host in (first, second):
            _ip("netns", "add", host.name)
            undo.callback(_remove, host.name)
        _ip(
            *("link", "add", first.interface, "netns", first.name, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.name),
        )
        for host in (first, second):
            _ip("-n", host.name, "link", "set", "lo", "up")
            address = [f"{host.address}/{width[0]}", *width[1:], "dev", host.interface]
            _ip("-n", host.name, "address", "add", *address)
            if is_ipv6:
                _ip("-n", host.name, "address", "delete", "127.0.0.1/8", "dev", "lo")
            _ip("-n", host.name, "link", "set", host.interface, "up")
        yield first, second


def _names() -> list[str]:
    """Of every network namespace that `ip` has made."""
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _pids(name: str) -> list[int]:
    return [int(word) for word in _ip("netns", "pids", name).split()]


def _remove(name: str) -> None:
    """Kill what runs in a namespace, then delete it; its interface goes with it, and the other end
    of the cable."""
    deadline = time.monotonic() + STOP_S
    while pids := _pids(name):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} in {name} outlive SIGKILL")
        time.sleep(0.02)
    _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
