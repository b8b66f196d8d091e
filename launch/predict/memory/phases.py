"""The memory of each part of a run, from the events of its allocator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.predict.memory import allocator
from launch.predict.memory.allocator import FREED, AllocatorConfig, Event
from launch.schema.phases import DeviceMemory, DevicePhases, HostMemory, HostPhases, Phase

Parts = Sequence[tuple[Phase, Sequence[Event]]]


def allocated_bytes(parts: Parts) -> dict[Phase, int]:
    """The highest bytes of live blocks in each part, as they were asked for."""
    highest: dict[Phase, int] = {}
    live: dict[int, int] = {}
    total = 0
    for phase, events in parts:
        highest[phase] = max(highest.get(phase, 0), total)
        for block, size_bytes in events:
            if size_bytes == FREED:
                total -= live.pop(block, 0)
            elif block >= 0:  # else the cache is emptied
                live[block] = size_bytes
                total += size_bytes
                highest[phase] = max(highest[phase], total)
    return highest


def reserved_bytes(parts: Parts, config: AllocatorConfig, available_bytes: int) -> list[int]:
    """Bytes that the allocator reserves in each part. If there are fewer, it gives cached blocks
    back and tries again; if that does not help either, the bytes that it would like count."""
    events = [events for _, events in parts]
    replays = allocator.replay_parts(events, config)
    if max(replay.peak_reserved_bytes for replay in replays) > available_bytes:
        limited = allocator.replay_parts(events, config, capacity_bytes=max(available_bytes, 0))
        replays = replays if limited[-1].out_of_memory else limited
    return [replay.peak_reserved_bytes for replay in replays]


def on_device(
    parts: Parts, reserved: Sequence[int], outside_bytes: int, unknown: Sequence[Phase] = ()
) -> DevicePhases:
    """The memory of a rank on its device; `unknown` parts are left out."""
    highest: dict[Phase, int] = {}
    for (phase, _), size_bytes in zip(parts, reserved, strict=True):
        highest[phase] = max(highest.get(phase, 0), size_bytes)
    live = allocated_bytes(parts)
    return DevicePhases(
        **{
            phase: DeviceMemory(live[phase], size_bytes, size_bytes + outside_bytes)
            for phase, size_bytes in highest.items()
            if phase not in unknown
        }
    )


def on_host(by_phase: Mapping[str, Mapping[str, int]]) -> HostPhases:
    return HostPhases(
        **{phase: HostMemory(sum(parts.values()), parts) for phase, parts in by_phase.items()}
    )


def highest(several: Sequence[DevicePhases]) -> DevicePhases:
    """The highest of each part."""
    by_phase = {
        phase: [memory for phases in several if (memory := getattr(phases, phase)) is not None]
        for phase in DevicePhases.__dataclass_fields__
    }
    return DevicePhases(
        **{
            phase: max(memories, key=lambda memory: memory.device_bytes)
            for phase, memories in by_phase.items()
            if memories
        }
    )
