"""Memory, load and temperature of NVIDIA cards now, as NVML says."""

from dataclasses import dataclass
from typing import Any

from launch.probe.gpu_health import ask


@dataclass(frozen=True)
class CardState:
    """A card now; None where its driver does not say."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    busy_percent: int | None
    celsius: int | None


def cards() -> list[CardState]:
    """The cards of this machine; [] without NVML. NVML stays open for the next look."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, or a card fell off the bus
        return []


def _card(pynvml: Any, index: int) -> CardState:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
    rates = ask(pynvml, "nvmlDeviceGetUtilizationRates", handle)
    return CardState(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
        celsius=ask(pynvml, "nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
    )
