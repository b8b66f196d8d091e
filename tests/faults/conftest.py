"""The fixture of tests in which the kernel ends processes for want of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of memory, removed with the test."""
    group = Path("/sys/fs/cgroup/memory") / f"lowmem-test-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError as error:
        # in a container of others; .ci/run may make one, and runs these tests
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            break
        except OSError:
            time.sleep(0.1)
