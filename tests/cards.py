"""Machines with cards that are not here: a libnvidia-ml.so.1 made of tests/data/fake_nvml.c,
folders of /sys and /dev, builds of torch that say what they are and cannot be imported."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.builders import CODE

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


def nvml(folder: Path) -> Path:
    """The folder with a libnvidia-ml.so.1 for LD_LIBRARY_PATH."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake libnvidia-ml.so.1 with")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, CODE / "tests/data/fake_nvml.c"], check=True
    )
    return folder


def device(
    root: Path, vendor: str, kind: str, driver: str = "", vram_gib: float | None = None
) -> Path:
    """Put a device on the PCI bus of a root."""
    bus = root / "sys/bus/pci"
    number = len(list(bus.glob("devices/*")))
    folder = bus / f"devices/0000:0{number}:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    if driver:
        (bus / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(f"../../drivers/{driver}")
    if vram_gib is not None:
        (folder / "mem_info_vram_total").write_text(f"{int(vram_gib * (1 << 30))}\n")
    return root


def file(root: Path, path: str, text: str = "") -> Path:
    """Put a file below a root."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root


def torch(
    folder: Path, version: str, cuda: str = "", hip: str = "", architectures: str = ""
) -> Path:
    """A folder for PYTHONPATH with a package torch as installed builds look from outside; to import
    it fails."""
    package = folder / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    lines = ["from typing import Optional", f"__version__ = {version!r}", "debug = False"]
    lines += [f"cuda: Optional[str] = {cuda or None!r}", f"hip: Optional[str] = {hip or None!r}"]
    (package / "version.py").write_text("\n".join(lines) + "\n")
    before = b"\x7fELF\0_sm_\0sm_words in a message\0gfx\0"
    (package / "lib" / "libtorch_python.so").write_bytes(
        before + architectures.encode() + b"\0more\0"
    )
    return folder
