"""The least that a kernel takes: in a graph, in a stream that the host is ahead of, behind the
host; by its size; and the gap between kernels, as the profiler sees them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

LAUNCHES = 400  # a stream takes about 1,000 before the host waits
NUMBERS = (1, 1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=clock.device(), dtype=dtype)


def smallest_kernels() -> dict[str, Callable[[], object]]:
    x, y, square = ones(1), ones(1), ones(64, 64, dtype=torch.bfloat16)
    column, row = ones(64, 1), ones(8, 1024)
    return {
        "add in place": partial(x.add_, 1),
        "copy, a kernel": partial(torch.add, x, y),
        "copy, a memcpy": partial(x.copy_, y),
        "zero": x.zero_,
        "broadcast mul": partial(torch.mul, column, column.t()),
        "sum": row.sum,
        "softmax": partial(row.softmax, -1),
        "product 64x64x64 bfloat16": partial(torch.mm, square, square),
        "cast": partial(row.to, torch.bfloat16),
    }


def stream_seconds(call: Callable[[], object], is_ahead: bool) -> Row:
    """Seconds a launch in a stream: the device's where the host is ahead, else the slower's."""
    run = clock.in_stream([call] * LAUNCHES)
    run()
    torch.cuda.synchronize()
    lead_s = LAUNCHES * 15e-6 if is_ahead else 0
    return clock.spread([each / LAUNCHES for each in clock.elapsed_apart(run, lead_s, 5)])


def measure() -> Iterator[Row]:
    for name, call in smallest_kernels().items():
        yield attempted({"case": f"{name}, graph"}, partial(clock.device_seconds, [call]))
        for is_ahead in (True, False):
            place = "stream ahead" if is_ahead else "stream behind the host"
            yield attempted({"case": f"{name}, {place}"}, partial(stream_seconds, call, is_ahead))
    for count in NUMBERS:
        x = ones(count)
        fields = {"case": f"add in place of {count} float32, graph", "bytes": 8 * count}
        yield attempted(fields, partial(clock.device_seconds, [partial(x.add_, 1)]))


def kernel_times(profile: Any) -> list[tuple[float, float]]:
    """(start, end) of the profile's kernels, in microseconds and in order."""
    cuda = torch.autograd.DeviceType.CUDA
    return sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == cuda and event.time_range.end > event.time_range.start
    )


def profiled(run: Callable[[], object]) -> Row:
    """Seconds of the kernels of a run and of the gaps between them."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    times = kernel_times(profile)
    if len(times) < 3:
        raise RuntimeError(f"the profiler saw {len(times)} kernels")
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    return {
        "s": statistics.median(end - start for start, end in times) / 1e6,
        "gap_s": statistics.median(gaps) / 1e6,
        "gap_low_s": min(gaps) / 1e6,
        "gap_mean_s": statistics.mean(gaps) / 1e6,
        "kernels": len(times),
    }


def slept(run: Callable[[], object]) -> Callable[[], object]:
    """The run behind a sleep of the device, so that the host is ahead."""

    def both() -> None:
        clock.sleep(3e-3)
        run()

    return both


def profile() -> Iterator[Row]:
    """Gaps by the profiler, which makes the host slower from here on: the last group."""
    if clock.IS_REHEARSAL:
        yield {"case": "all", "error": "a driver without a card ends a process that is profiled"}
        return
    began = time.perf_counter()
    x, large = ones(1), ones(1 << 22)
    for name, tensor in (("1 number", x), ("4 million", large)):
        calls = [partial(tensor.add_, 1)] * 100
        for place, make in (
            ("stream ahead", lambda calls: slept(clock.in_stream(calls))),
            ("graph", clock.captured),
            ("stream behind the host", clock.in_stream),
        ):
            case = f"add in place of {name}, {place}"
            yield attempted({"case": case}, lambda make=make, calls=calls: profiled(make(calls)))
    yield {"case": "profiler", "s": time.perf_counter() - began}
