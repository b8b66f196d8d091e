"""Signs of a graphics card: those that need no vendor's library (the PCI bus, device files, the
files of drivers in /sys), and of an NVIDIA card's health: the reasons for which it lowers its
clocks, and the errors (Xid) that the driver reports through NVML and the kernel's log."""

import ctypes
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base.files import descriptor, system_text
from launch.base.text import size
from launch.schema.machine import GIB, Gpu
from launch.schema.result import Xid

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
            passed_over.append(
                f"{card}: {size(card.vram_bytes)} of memory of its own, as graphics built into a"
                " processor have"
            )
        else:
            signs.append(f"{card}, {size(card.vram_bytes)}")
    return signs, passed_over


def rocr_ids(root: Path) -> set[str]:
    """The ids by which ROCR_VISIBLE_DEVICES can name this machine's AMD cards, as the kernel has
    them; 0 is none."""
    matches = (
        re.search(r"^unique_id (\d+)$", system_text(file), re.MULTILINE)
        for file in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    )
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


# ---- health of NVIDIA cards
# ---------------------------------------------------------------------------

# Bits of NVML's reasons for lower clocks. Source: nvml.h, nvmlClocksEventReasons
IDLE, _POWER_CAP = 0x01, 0x04
_HOT = {0x40: "too hot (HW thermal slowdown)", 0x20: "too hot (SW thermal slowdown)"}
POWER = {
    0x80: "the power supply asks for less (HW power brake)",
    _POWER_CAP: "at its power limit (SW power cap), as under full load",
}
_HEAT_OR_POWER = {0x08: "heat or power (HW slowdown)"}
# NVML's function in newer drivers, and in drivers before 535
_ASK_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)

Bus = tuple[int, int]  # PCI domain and bus
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F]+):([\da-fA-F]+):[\da-fA-F.]+\): (\d+)\b.*")
# priority, number, microseconds since the start, flags; the message. Source: kernel docs,
# Documentation/ABI/testing/dev-kmsg
_KERNEL_RECORD = re.compile(r"^\d+,\d+,(\d+),[^;\n]*;(.*)", re.MULTILINE)
RECORD_BYTES = 8192  # a shorter read fails for long records


def slowdown(pynvml: Any, handle: Any) -> str:
    """The reason for which a card runs at lower clocks now, with its clock and temperature; "" if
    there is none, or the driver does not say."""
    bits = next(filter(None, (ask(pynvml, name, handle) for name in _ASK_REASONS)), 0)
    if bits & IDLE:  # some laptops have the cap beside it
        bits &= ~_POWER_CAP
    causes = [text for bit, text in {**_HOT, **POWER}.items() if bits & bit]
    causes = causes or [text for bit, text in _HEAT_OR_POWER.items() if bits & bit]
    if not causes:
        return ""
    clock, highest = (
        ask(pynvml, name, handle, pynvml.NVML_CLOCK_SM)
        for name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo")
    )
    celsius = ask(pynvml, "nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
    facts = (
        (causes, ", ".join(causes)),
        (clock and highest, f"{clock} of {highest} MHz"),
        (celsius, f"{celsius} °C"),
    )
    return "; ".join(text for is_known, text in facts if is_known)


def ask(pynvml: Any, name: str, *arguments: Any) -> Any:
    """The answer of NVML; None if this driver, this card or the user's nvidia-ml-py has none."""
    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


class XidWatch:
    """The Xids of NVIDIA cards from now on. NVML reports them to those who listen; the kernel's log
    has them too, for users who may read it."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._kernel_log = system_root(os.environ) / "dev/kmsg"
        self._since_s = time.monotonic()
        self._cards: dict[int, str] = {}  # address of a handle -> card
        self._on_bus: dict[Bus, str] = {}
        self._events: Any = None
        self._listen([gpu for gpu in gpus if gpu.vendor == "nvidia"])

    def read(self) -> tuple[Xid, ...]:
        """The Xids so far, in the order of their reports, each number once; ends listening."""
        of_kernel = kernel_xids(self._kernel_log, self._since_s, self._on_bus)
        return merged([*self._from_nvml()], [*of_kernel])

    def _listen(self, gpus: Sequence[Gpu]) -> None:
        if not gpus:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        with suppress(pynvml.NVMLError):  # events are for Linux, not for WSL2
            self._events = pynvml.nvmlEventSetCreate()
        for gpu in gpus:
            name = f"GPU {gpu.index} ({gpu.name})"
            with suppress(pynvml.NVMLError):  # lost, or too old for events
                card = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                place = pynvml.nvmlDeviceGetPciInfo(card)
                self._on_bus[int(place.domain), int(place.bus)] = name
                if self._events is not None:
                    pynvml.nvmlDeviceRegisterEvents(
                        card, pynvml.nvmlEventTypeXidCriticalError, self._events
                    )
                    self._cards[_address(card)] = name

    def _from_nvml(self) -> Iterator[Xid]:
        if not self._cards:
            return
        import pynvml

        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # a timeout: no more events
                break
            name = self._cards.get(_address(event.device), "a GPU")
            yield Xid(int(event.eventData), name, f"NVML: Xid {event.eventData} on {name}")
        pynvml.nvmlEventSetFree(self._events)
        pynvml.nvmlShutdown()
        self._cards = {}


def merged(of_nvml: Sequence[Xid], of_kernel: Sequence[Xid]) -> tuple[Xid, ...]:
    """Each number once, in the order of the reports. The kernel's line takes the place of NVML's,
    which has no words; of 154, the driver's advice, the newest line counts."""
    xids = {xid.number: xid for xid in reversed(of_nvml)}
    xids |= {xid.number: xid for xid in reversed(of_kernel)}
    xids |= {xid.number: xid for xid in of_kernel if xid.number == 154}
    numbers = dict.fromkeys(xid.number for xid in (*of_nvml, *of_kernel))
    return tuple(xids[number] for number in numbers)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def kernel_xids(log: Path, since_s: float, on_bus: Mapping[Bus, str]) -> Iterator[Xid]:
    """Yield the Xids of these cards in the kernel's log since a time of the monotonic clock; none
    if this user may not read it."""
    # this user may not read it, or there are no more records
    with suppress(OSError), descriptor(log, os.O_RDONLY | os.O_NONBLOCK) as file:
        while text := _next_records(file):
            for microseconds, message in _KERNEL_RECORD.findall(text):
                line = _XID_LINE.search(message)
                if line is None or int(microseconds) < since_s * 1e6:
                    continue
                if card := on_bus.get((int(line[1], 16), int(line[2], 16))):
                    yield Xid(int(line[3]), card, line[0])


def _next_records(file: int) -> str:
    """A record of the kernel's log, or several of a copy of it; "" after the last of a copy. Raises
    OSError after the log's last."""
    while True:
        try:
            return os.read(file, RECORD_BYTES).decode(errors="replace")
        except BrokenPipeError:  # records were overwritten; the next read goes on after them
            continue
