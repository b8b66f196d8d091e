"""The memory of each part of a run, from the events of its allocator. Replays are kept beside the
trace by all that they are of: a plan that asks again replays nothing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from launch.base import files
from launch.base.workspace import code_digest
from launch.predict.memory import allocator, malloc
from launch.predict.memory.allocator import FREED, AllocatorConfig, Event, Replay
from launch.predict.memory.loading import Load
from launch.predict.traces import DAMAGE, Trace
from launch.schema.phases import DeviceMemory, DevicePhases, HostMemory, HostPhases, Phase
from launch.schema.recorded_step import content_of, grouped, with_digest

# The code that a replay runs
_CODE = ("launch/predict/memory", "launch/predict/traces.py")
Parts = Sequence[tuple[Phase, Sequence[Event]]]
_Sizes = dict[str, int]


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


@dataclass(frozen=True)
class RunEvents:
    """The events of a run of these micro-batches, made when a replay of them is not kept."""

    trace: Trace
    num_samples: int
    eval_samples: int | None
    load: Load

    @cached_property
    def _parts(self) -> Parts:
        return self.trace.run(self.num_samples, self.eval_samples, self.load)

    @cached_property
    def allocated_bytes(self) -> dict[Phase, int]:
        """The highest bytes of live blocks in each part."""
        return self._stored("allocated", {}, _Sizes, lambda: allocated_bytes(self._parts))

    def resident_bytes(self, written: Mapping[int, int], by_threads: bool) -> dict[str, int]:
        """malloc.resident_bytes()."""
        return self._stored(
            "malloc",
            {"written": sorted(written.items()), "by_threads": by_threads},
            _Sizes,
            lambda: malloc.resident_bytes(self._parts, written, by_threads),
        )

    def replays(self, config: AllocatorConfig, available_bytes: int) -> list[tuple[Phase, Replay]]:
        """Replay a card's allocator, part by part. If there are fewer bytes, it gives cached blocks
        back and tries again; if that does not help either, what it would like counts."""
        unlimited = self._replays(config, None)
        if max(replay.peak_reserved_bytes for _, replay in unlimited) <= available_bytes:
            return unlimited
        limited = self._replays(config, max(available_bytes, 0))
        return unlimited if limited[-1][1].out_of_memory else limited

    def _replays(
        self, config: AllocatorConfig, capacity_bytes: int | None
    ) -> list[tuple[Phase, Replay]]:
        def replayed() -> list[tuple[Phase, Replay]]:
            phases, events = zip(*self._parts, strict=True)
            replays = allocator.replay_parts(events, config, capacity_bytes)
            return list(zip(phases, replays, strict=False))

        options = {"config": asdict(config), "capacity_bytes": capacity_bytes}
        return self._stored("card", options, list[tuple[Phase, Replay]], replayed)

    def _stored(
        self,
        name: str,
        options: Mapping[str, Any],
        noun: Any,
        compute: Callable[[], Any],
    ) -> Any:
        """A result, of the type `noun`, that is kept by all that it is of."""
        load = self.load
        order = (load.func.__name__, load.keywords) if isinstance(load, partial) else load.__name__
        of_run = self.trace.of_run(self.num_samples, self.eval_samples)
        number = files.digest([name, of_run, order, options, code_digest(*_CODE)])
        file = self.trace.file.with_name(f"{self.trace.file.stem}-{number}.replay")
        adapter = files.adapter(noun)
        try:
            return adapter.validate_json(content_of(files.regular_bytes(file).decode()))
        except DAMAGE:
            result = compute()
        if self.trace.keeps_replays:
            with suppress(OSError):  # the folder may be read-only; then the next plan replays again
                files.write_atomic(file, with_digest(adapter.dump_json(result).decode()))
        return result


def on_device(replays: Sequence[tuple[Phase, Replay]], outside_bytes: int) -> DevicePhases:
    """The memory of a rank on its device."""
    return DevicePhases(
        **{
            phase: DeviceMemory(allocated, reserved, reserved + outside_bytes)
            for phase, of_phase in grouped(replays).items()
            for allocated in [max(replay.peak_allocated_bytes for replay in of_phase)]
            for reserved in [max(replay.peak_reserved_bytes for replay in of_phase)]
        }
    )


def on_cpu(live: Mapping[Phase, int]) -> DevicePhases:
    """The bytes of tensors of a rank on a CPU, where nothing is reserved beyond them."""
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
