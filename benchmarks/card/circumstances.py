"""The card, the host and the versions that rates were measured with; clocks and power meanwhile."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.rows import Row, attempted

PACKAGES = ("torch", "triton", "transformers", "bitsandbytes", "liger_kernel", "numpy")
QUERY_MS = 250
WATCHED = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
}
NAMED = ("name", "driver_version", "vbios_version", "power.limit", "clocks.max.sm")
LINKED = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def queried(*fields: str) -> dict[str, str]:
    """Fields that nvidia-smi answers; it is only asked."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True)
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def host_row() -> Row:
    return {
        "date": date.today().isoformat(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def card_row() -> Row:
    properties: Any = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": total,
        "free_bytes": free,
        "cudnn": torch.backends.cudnn.version(),
    }


def measure() -> Iterator[Row]:
    yield attempted({"case": "host"}, host_row)
    if torch.cuda.is_available():
        yield attempted({"case": "card"}, card_row)
        for fields in (NAMED, LINKED):
            yield attempted({"case": f"nvidia-smi {fields[0]}"}, lambda f=fields: queried(*f))


def watched_row(lines: list[str]) -> Row:
    """Least, median and most of each watched figure; of what nvidia-smi printed."""
    columns: dict[str, list[float]] = {name: [] for name in WATCHED.values()}
    for line in lines:
        for name, value in zip(columns, line.split(", "), strict=False):
            try:
                columns[name].append(float(value))
            except ValueError:
                continue  # a card without this sensor says [N/A]
    return {
        name: [min(values), statistics.median(values), max(values)]
        for name, values in columns.items()
        if values
    }


@contextmanager
def clocks_watched() -> Iterator[Row]:
    """Inside, nvidia-smi prints clocks, power and temperature; the row is filled at the end."""
    row: Row = {"case": "clocks and power"}
    argv = [
        *("nvidia-smi", f"--query-gpu={','.join(WATCHED)}", "--format=csv,noheader,nounits"),
        *("-i", "0", "-lms", str(QUERY_MS)),
    ]
    with tempfile.TemporaryFile("w+") as printed:
        try:
            process = subprocess.Popen(argv, stdout=printed, stderr=subprocess.DEVNULL)
        except OSError as error:
            row["error"] = f"{type(error).__name__}: {error}"
            yield row
            return
        began = time.perf_counter()
        try:
            yield row
        finally:
            process.terminate()
            process.wait()
            printed.seek(0)
            lines = printed.read().splitlines()
            row.update(watched_row(lines), samples=len(lines), s=time.perf_counter() - began)
