"""Rates of this machine's cores: measured once by the child with torch, and kept."""

import hashlib
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from launch.base import files
from launch.base.errors import LaunchError
from launch.data.worker import WORKER, MeasureCores, WorkerEnded
from launch.probe import packages
from launch.schema.machine import MEASURED_ALONE, CoreFigures

_TIMEOUT_S = 60
_AGAIN_S = 600  # then a busy machine is measured again
# lines of /proc/cpuinfo that tell processors apart, of x86 and of ARM
_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
_RATES, _SECONDS = ("flops_per_s", "bytes_per_s"), ("operator_s", "view_s", "module_s")


@dataclass(frozen=True)
class _Kept:
    figures: tuple[CoreFigures, ...]  # (): other programs had the cores each time


def kept_or_measured(folder: Path, num_cores: int) -> tuple[CoreFigures, ...]:
    """The figures of one thread and of so many, kept in the folder of traces; () if they cannot be
    measured now."""
    file = _file(folder, num_cores)
    stored = files.read_or_none(file, _Kept)
    if stored and (stored.figures or time.time() - file.stat().st_mtime < _AGAIN_S):
        return stored.figures
    return measure(folder, num_cores)


def measure(folder: Path, num_cores: int) -> tuple[CoreFigures, ...]:
    """Measure now, and keep the best of this and of what is kept. What was measured while other
    programs had the cores does not count."""
    file = _file(folder, num_cores)
    stored = files.read_or_none(file, _Kept) or _Kept(())
    try:
        reply = WORKER.ask(MeasureCores((1, num_cores)), _TIMEOUT_S)
    except (LaunchError, WorkerEnded):  # a plan's first trace says why the child cannot run
        return stored.figures
    figures = tuple(TypeAdapter(list[CoreFigures]).validate_json(reply))
    if min(each.core_share for each in figures) < MEASURED_ALONE:
        figures = stored.figures
    elif stored.figures:
        figures = tuple(map(_best, figures, stored.figures))
    with suppress(OSError):  # traces refuse a folder that keeps nothing
        files.store_json(file, _Kept(figures))
    return figures


def _best(measured: CoreFigures, stored: CoreFigures) -> CoreFigures:
    """The higher of each rate, and the fewer of all seconds."""

    def each(name: str, choose: Callable[[float, float], float]) -> Mapping[str, float]:
        return {
            key: choose(figure, getattr(stored, name).get(key, figure))
            for key, figure in getattr(measured, name).items()
        }

    return replace(
        measured,
        **{name: each(name, max) for name in _RATES},
        call_s=each("call_s", min),
        **{name: min(getattr(measured, name), getattr(stored, name)) for name in _SECONDS},
    )


def _file(folder: Path, num_cores: int) -> Path:
    """The file of this processor's figures with this torch, beside the traces (`*.json`)."""
    described: list[str] = []
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        described = [line for line in first.splitlines() if line.startswith(_PROCESSOR)]
    identity = [platform.machine(), *described, packages.version("torch"), str(num_cores)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    return folder / f"{digest}.cores"
