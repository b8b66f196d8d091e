"""Cost of a call as counts, which are the same on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def count_calls(run: Callable[[], object], of: Callable[..., Any] | None = None) -> int:
    """Calls of Python and C functions while `run` runs; of one C function, if it is named."""
    count = 0

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count
        if of is None:
            count += event in ("call", "c_call")
        else:
            count += event == "c_call" and called is of

    outer = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(outer)
    return count


def count_lines(run: Callable[[], object]) -> int:
    """Lines of Python that are executed while `run` runs, each time that they are."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(outer)
    return count


def count_read_bytes(run: Callable[[], object]) -> int:
    """Bytes that this process reads from files while `run` runs."""

    def read_bytes() -> int:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return int(lines[0].removeprefix("rchar: "))

    before = read_bytes()
    run()
    return read_bytes() - before
