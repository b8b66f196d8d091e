"""The memory of each part of a run, from the events of its allocator. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from launch.predict.memory import allocator
from launch.predict.memory.allocator import FREED, AllocatorConfig, Event, Replay
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


def replays(parts: Parts, config: AllocatorConfig, available_bytes: int) -> list[Replay]:
    """Replay the allocator, part by part. If there are fewer bytes, it gives
    cached blocks back and tries again; if that does not help either, what it would like counts."""
    events = [events for _, events in parts]
    unlimited = allocator.replay_parts(events, config)
    if max(replay.peak_reserved_bytes for replay in unlimited) <= available_bytes:
        return unlimited
    limited = allocator.replay_parts(events, config, capacity_bytes=max(available_bytes, 0))
    return unlimited if limited[-1].out_of_memory else limited


def on_device(
    parts: Parts, replays: Sequence[Replay], outside_bytes: int, unknown: Sequence[Phase] = ()
) -> DevicePhases:
    """The memory of a rank on its device; `unknown` parts are left out."""
    by_phase: dict[Phase, list[Replay]] = defaultdict(list)
    for (phase, _), replay in zip(parts, replays, strict=True):
        by_phase[phase].append(replay)
    return DevicePhases(
        **{
            phase: DeviceMemory(allocated, reserved, reserved + outside_bytes)
            for phase, of_phase in by_phase.items()
            if phase not in unknown
            for allocated in [max(replay.peak_allocated_bytes for replay in of_phase)]
            for reserved in [max(replay.peak_reserved_bytes for replay in of_phase)]
        }
    )


def on_cpu(parts: Parts) -> DevicePhases:
    """The bytes of tensors of a rank on a CPU, where nothing is reserved beyond them."""
    live = allocated_bytes(parts)
    return DevicePhases(**{phase: DeviceMemory(size, size, size) for phase, size in live.items()})


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
