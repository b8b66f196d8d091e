"""Fixtures of faults: a cgroup whose processes the kernel ends, a clock that jumps."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
/* Once the file PYTHON_CLOCK exists, the wall clock is PYTHON_CLOCK_S seconds further. */
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    const char *file = getenv("PYTHON_CLOCK");
    if (id == CLOCK_REALTIME && file && access(file, F_OK) == 0)
        now->tv_sec += atol(getenv("PYTHON_CLOCK_S"));
    return code;
}
"""


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


@pytest.fixture
def jumping_clock(tmp_path) -> Callable[[int], tuple[Path, dict[str, str]]]:
    """A function that makes a clock: the file whose presence sets it forward by so many seconds,
    and the variables of a process that has it."""

    def make(by_s: int) -> tuple[Path, dict[str, str]]:
        source, library, moved = (tmp_path / name for name in ("clock.c", "clock.so", "moved"))
        source.write_text(CLOCK)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        variables = {"PYTHON_CLOCK": str(moved), "PYTHON_CLOCK_S": str(by_s)}
        return moved, {"LD_PRELOAD": str(library), **variables}

    return make
