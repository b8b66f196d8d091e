"""Processes that hold leases, or wait for them, without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests import builders

Hold = Callable[..., subprocess.Popen[str]]
PROGRAM = Path(__file__).with_name("hold_lease.py")


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
