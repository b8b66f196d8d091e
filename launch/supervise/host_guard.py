"""Checks of the host's free RAM, every second, so that ranks save before the kernel kills one."""

from __future__ import annotations

import re
from pathlib import Path

from launch.base.text import size
from launch.probe import machine

# share of ten seconds in which all processes of the machine waited for memory
_STALLED_PERCENT = 50.0
_PRESSURE = re.compile(r"^full avg10=([\d.]+)", re.MULTILINE)


def pressure(
    limit_bytes: int, fraction: float, job_bytes: int, root: Path = Path("/")
) -> str | None:
    """The reason why a run should stop now, None without one. `fraction` is
    launch.host_stop_fraction of the limit; 0: never.

    Page cache counts as free. `job_bytes` is of JobMemory, because some limits (Slurm's, an
    rlimit) do not show how much of them is used."""
    if not fraction:
        return None
    free, why = machine.host_available(root)
    if free < (1 - fraction) * limit_bytes:
        return f"{size(free)} of host RAM is left ({why})"
    if job_bytes > fraction * limit_bytes:
        return f"the job takes {size(job_bytes)} of a host limit of {size(limit_bytes)}"
    try:
        stalled = _PRESSURE.search((root / "proc/pressure/memory").read_text(encoding="ascii"))
    except OSError:  # a kernel without it
        return None
    if stalled and float(stalled[1]) > _STALLED_PERCENT:
        return (
            f"every process waited for memory in {stalled[1]} % of the last 10 s"
            " (/proc/pressure/memory)"
        )
    return None
