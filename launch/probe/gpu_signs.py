"""Signs of a graphics card that need no vendor's library: the PCI bus, device files, and the files
of drivers in /sys."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.base.files import system_text
from launch.base.text import size
from launch.schema.machine import GIB

# another folder than / that holds dev, proc and sys; scripts/lib/bootstrap.sh reads it too
_SYSTEM_ROOT = "LOWMEM_SYSTEM_ROOT"
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_DISPLAY, _ACCELERATOR = "0x03", "0x12"  # PCI classes; AMD's MI300 is of the second
_NVIDIA_FILES = ("nvidia[0-9]*", "nvidiactl", "nvhost-gpu", "nvgpu")  # the last two: Jetson
# A BIOS gives the graphics of a Ryzen or an APU 0.5 to 4 GiB of the host's RAM as its own memory.
_BUILT_IN_BYTES = 4 * GIB
_PASSED_ON = "vfio-pci"  # the driver of a card that a virtual machine has


@dataclass(frozen=True)
class Card:
    """A graphics card on the PCI bus."""

    vendor: str
    address: str
    driver: str  # kernel driver; "" without one
    vram_bytes: int | None  # amdgpu's figure; None without amdgpu

    def __str__(self) -> str:
        return f"PCI {self.address}, {f'driver {self.driver}' if self.driver else 'no driver'}"


def system_root(environ: Mapping[str, str]) -> Path:
    """The folder that holds this machine's dev, proc and sys."""
    return Path(environ.get(_SYSTEM_ROOT) or "/")


def cards(root: Path, vendor: str) -> Iterator[Card]:
    """Yield a vendor's graphics cards on the PCI bus, except cards that are passed to a virtual
    machine."""
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        kind, of = system_text(device / "class"), _VENDORS.get(system_text(device / "vendor"))
        if of != vendor or not kind.startswith(
            (_DISPLAY, _ACCELERATOR) if of == "amd" else _DISPLAY
        ):
            continue
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        size = system_text(device / "mem_info_vram_total")
        if driver != _PASSED_ON:
            yield Card(vendor, device.name, driver, int(size) if size.isdigit() else None)


def nvidia(root: Path) -> list[str]:
    """Descriptions of every sign of an NVIDIA card."""
    files = [
        f"/dev/{path.name}"
        for pattern in _NVIDIA_FILES
        for path in sorted(root.glob(f"dev/{pattern}"))
    ]
    return [*map(str, cards(root, "nvidia")), *files]


def amd(root: Path) -> tuple[list[str], list[str]]:
    """(descriptions of AMD cards to train on, descriptions of AMD graphics that do not count).

    /dev/kfd alone proves nothing, because amdgpu makes it on every laptop with a Ryzen. The size
    of the card's own memory decides.
    """
    signs, passed_over = [], []
    for card in cards(root, "amd"):
        if card.vram_bytes is None:
            passed_over.append(f"{card}: the size of its memory is not known")
        elif card.vram_bytes <= _BUILT_IN_BYTES:
            memory = f"{size(card.vram_bytes)} of memory of its own"
            passed_over.append(f"{card}: {memory}, as graphics built into a processor have")
        else:
            signs.append(f"{card}, {size(card.vram_bytes)}")
    return signs, passed_over


def rocr_ids(root: Path) -> set[str]:
    """The ids by which ROCR_VISIBLE_DEVICES can name this machine's AMD cards, as the kernel has
    them; 0 is none."""
    files = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    matches = (re.search(r"^unique_id (\d+)$", system_text(file), re.MULTILINE) for file in files)
    return {f"GPU-{int(match[1]):016x}" for match in matches if match and int(match[1])}


def amd_fix(root: Path) -> str:
    """The fix that makes the installed AMD cards visible to this process."""
    compute = root / "dev/kfd"
    obstacles = (
        (
            not compute.exists(),
            "/dev/kfd, ROCm's way to them, is not here: a container needs --device /dev/kfd"
            " --device /dev/dri; elsewhere load the kernel's driver amdgpu",
        ),
        (
            not os.access(compute, os.R_OK | os.W_OK),
            "you may not open /dev/kfd: sudo usermod -aG render,video $USER, then log in again",
        ),
    )
    install = (
        "install rocm-smi or amd-smi, which list the cards (Debian, Ubuntu, Fedora: the package"
        " rocm-smi)"
    )
    return next((fix for is_met, fix in obstacles if is_met), install)
