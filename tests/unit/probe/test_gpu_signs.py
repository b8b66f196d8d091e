"""Xids in the kernel's log, and the reasons for which a card is slower."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.probe import gpu_signs
from launch.schema.result import Xid

# github.com/NVIDIA/NVSentinel/issues/155, in the form of /dev/kmsg
OFF_THE_BUS = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"


def log(folder: Path, *records: tuple[float, str]) -> Path:
    """A kernel log whose records have times of the monotonic clock."""
    file = folder / "dev/kmsg"
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        "".join(f"4,{n},{s * 1e6:.0f},-;{text}\n" for n, (s, text) in enumerate(records))
    )
    return file


def test_the_kernels_log_gives_the_xids_since_a_time(tmp_path: Path):
    records = (
        (90.0, "NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101"),
        (101.0, "nvidia 0000:44:00.0: AER: Xid 48 is no line of the driver"),
        (102.0, OFF_THE_BUS),
        (103.0, OFF_THE_BUS.replace("44", "c1")),  # the card of somebody else
    )
    cards = {(0, 0x01): "GPU 0", (0, 0x44): "GPU 1"}
    found = [*gpu_signs.kernel_xids(log(tmp_path, *records), 100.0, cards)]
    assert found == [Xid(79, "GPU 1", OFF_THE_BUS)]


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path):
    assert not [*gpu_signs.kernel_xids(tmp_path / "dev/kmsg", 0.0, {(0, 0x44): "GPU 1"})]


def test_the_kernels_words_take_the_place_of_nvmls_number_and_the_newest_advice_counts():
    def advice(action: str) -> Xid:
        return Xid(154, "GPU 0", f"NVRM: Xid 154, GPU recovery action changed to {action}")

    silent = [Xid(number, "GPU 0", f"NVML: Xid {number} on GPU 0") for number in (154, 45, 154)]
    lost, twice = Xid(79, "GPU 0", OFF_THE_BUS), Xid(79, "GPU 1", OFF_THE_BUS)
    reset, reboot = advice("GPU Reset Required"), advice("Node Reboot Required")
    assert gpu_signs.merged(silent, []) == tuple(silent[:2])
    assert gpu_signs.merged(silent, [lost, reset, twice, reboot]) == (reboot, silent[1], lost)


class NVMLError(Exception):
    pass


def refuse(*_):
    raise NVMLError


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        (0, ""),
        (0x1 | 0x4, ""),  # idle
        (0x2 | 0x10 | 0x100, ""),  # as somebody has set it
        (0x40 | 0x8, "too hot (HW thermal slowdown)"),
        (0x20 | 0x4, "too hot (SW thermal slowdown), at its power limit (SW power cap)"),
        (0x80 | 0x8, "the power supply asks for less (HW power brake)"),
        (0x8, "heat or power (HW slowdown)"),
    ],
)
def test_a_driver_before_535_that_says_no_clock_still_says_the_reason(bits, reason):
    library = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCurrentClocksEventReasons=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: bits,
        nvmlDeviceGetClockInfo=refuse,
    )
    assert gpu_signs.slowdown(library, object()).removesuffix(", as under full load") == reason
