"""Seconds of a device by its events and of the host by its clocks: medians, least and most."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.card.rows import REHEARSAL, Row

Call = Callable[[], object]
SAMPLE_S = 2e-3  # a sample's device time: launching a graph and reading events are 1 % of it
CASE_S = 16e-3  # device time of a case
MIN_SAMPLES, MAX_SAMPLES = 3, 9
MAX_CALLS = 200  # of a sample
MAX_SETS = 12  # of inputs that rotate
# The device sleeps before each sample, so that the host is ahead of it whatever a launch takes.
LEAD_S = 100e-6
CYCLES_PER_S = 2e9  # at least those of today's cards
HOST_BATCHES = 7
IS_REHEARSAL = REHEARSAL in os.environ  # a driver without a card has no graphs


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def cache_bytes() -> int:
    """The L2 cache's size; that of an H200 where torch does not say."""
    return getattr(torch.cuda.get_device_properties(device()), "L2_cache_size", 0) or 60 << 20


def memory_bytes() -> int:
    return torch.cuda.get_device_properties(device()).total_memory


def num_sets(set_bytes: int) -> int:
    """Sets of inputs that together are no longer in the cache when the first comes again."""
    wanted = math.ceil(2 * cache_bytes() / max(set_bytes, 1))
    affordable = memory_bytes() // 8 // max(set_bytes, 1)
    return max(1, min(wanted, MAX_SETS, affordable))


def spread(values: Sequence[float], prefix: str = "") -> Row:
    return {
        f"{prefix}s": statistics.median(values),
        f"{prefix}low_s": min(values),
        f"{prefix}high_s": max(values),
    }


def release_memory() -> None:
    """Give graphs' pools and cached blocks back once they are a third of the card."""
    if torch.cuda.memory_reserved() > memory_bytes() / 3:
        gc.collect()
        torch.cuda.empty_cache()


def sleep(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def captured(calls: Iterable[Call]) -> Call:
    """A replay of the calls as one CUDA graph of the current stream. torch.cuda.graph() would give
    all cached memory back first."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph.replay


def in_stream(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def elapsed(run: Call, lead_s: float, num_samples: int) -> list[float]:
    """Device seconds of each of some runs, which the host is ahead of."""
    pairs = []
    for _ in range(num_samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep(lead_s)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def elapsed_apart(run: Call, lead_s: float, num_samples: int) -> list[float]:
    """Device seconds of each of some runs that begin with an idle device."""
    return [elapsed(run, lead_s, 1)[0] for _ in range(num_samples)]


def first_seconds(call: Call) -> float:
    """Wall seconds of a first call: kernels loaded, plans made, workspaces allocated."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def issue_seconds(calls: Sequence[Call]) -> float:
    """Host seconds of issuing one of the calls."""
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def device_seconds(
    calls: Sequence[Call], graph: bool = True, case_s: float = CASE_S, sample_s: float = SAMPLE_S
) -> Row:
    """Device seconds of a call, the mean of a sample of them in a row, which takes the sets of
    inputs in turn; replays of a graph where the calls can be captured."""
    release_memory()
    first_s = first_seconds(calls[0])
    issue_seconds(calls)
    torch.cuda.synchronize()
    issue_s = issue_seconds(calls)
    torch.cuda.synchronize()
    rough_s = elapsed(in_stream(calls), LEAD_S + issue_s * len(calls), 1)[0] / len(calls)
    num_calls = max(1, min(MAX_CALLS, round(sample_s / max(rough_s, 1e-7))))
    if IS_REHEARSAL:
        num_calls, case_s = 1, 0.0
    sequence = [calls[number % len(calls)] for number in range(num_calls)]
    run, lead_s, error = in_stream(sequence), LEAD_S + 1.3 * issue_s * num_calls, ""
    if graph and not IS_REHEARSAL:
        try:
            run, lead_s = captured(sequence), LEAD_S
            run()
        except RuntimeError as refusal:
            error = str(refusal).splitlines()[0][:120]
            torch.cuda.synchronize()
            run, lead_s = in_stream(sequence), LEAD_S + 1.3 * issue_s * num_calls
    num_samples = round(case_s / max(rough_s * num_calls, 1e-7))
    samples = elapsed(run, lead_s, max(MIN_SAMPLES, min(MAX_SAMPLES, num_samples)))
    return {
        **spread([sample / num_calls for sample in samples]),
        "samples": len(samples),
        "calls": num_calls,
        "sets": len(calls),
        "graph": lead_s == LEAD_S,
        "first_s": first_s,
        "issue_s": issue_s,
        **({"not_captured": error} if error else {}),
    }


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python collects no cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_seconds(
    call: Callable[[Any], object],
    count: int = 200,
    per: int = 1,
    before: Call | None = None,
    batches: int = HOST_BATCHES,
) -> Row:
    """Wall and processor seconds of the host in a call, over the units that it has: of batches
    that begin with an idle device. `before` makes a batch's argument, which is not timed.

    Processor seconds are those of all threads: autograd's runs backward."""
    walls, processors = [], []
    with uncollected():
        for _ in range(batches + 1):  # the first warms up
            state = before() if before else None
            synchronize()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                call(state)
            walls.append((time.perf_counter() - began) / count / per)
            processors.append((time.process_time() - used) / count / per)
            synchronize()
    return {
        **spread(walls[1:]),
        "processor_s": statistics.median(processors[1:]),
        "samples": batches,
        "calls": count,
        **({"per": per} if per > 1 else {}),
    }


def wall_seconds(call: Call, samples: int = 3, after: Call | None = None) -> list[float]:
    """Wall seconds of each of some calls, with an idle device before and after; `after` is not
    timed."""
    walls = []
    for _ in range(samples):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        walls.append(time.perf_counter() - began)
        if after:
            after()
    return walls
