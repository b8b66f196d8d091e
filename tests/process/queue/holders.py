"""Processes that hold leases, or wait for them, without ranks."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from launch.base import files
from launch.queue import leases
from tests import builders

Hold = Callable[..., subprocess.Popen[str]]
PROGRAM = Path(__file__).with_name("hold_lease.py")
# A program without a lease: it takes as many bytes as its argument says
TAKE_MEMORY = """
import sys, time
taken = bytearray(int(sys.argv[1]))
taken[::4096] = b"1" * len(taken[::4096])
print("taken", flush=True)
time.sleep(600)  # the test kills it; one whose test died ends by itself
"""


@contextmanager
def holders(place: Path) -> Iterator[Hold]:
    """A function that starts a holder in a folder of leases; all of them end with the block."""
    children: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(place), *argv],
            env=builders.environment(place / "workspace"),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        children.append(child)
        return child

    try:
        yield start
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def said(child: subprocess.Popen[str]) -> str:
    """The next line of a holder."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


@contextmanager
def held_unseen(place: Path, number: int, record: leases.Record) -> Iterator[None]:
    """A lease whose process cannot be seen, as that of another container: the kernel names none
    for the lock of an open file."""
    path = leases.lease_path(place, number)
    path.write_text(files.to_json(asdict(record)), encoding="utf-8")
    with path.open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        yield
