"""Seconds of device memory: the driver's allocations by size, and torch's allocator over them."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

MIB, GIB = 1 << 20, 1 << 30
SEGMENTS = ((2 * MIB, 20), (20 * MIB, 20), (GIB, 3))  # torch's segments, and a large one
Timed = tuple[float, float]


def driver_pair(driver: ctypes.CDLL, size: int) -> Timed:
    """Seconds of one allocation by the driver and of its end."""
    pointer = ctypes.c_void_p()
    began = time.perf_counter()
    code = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    made = time.perf_counter()
    code = code or driver.cuMemFree_v2(ctypes.c_uint64(pointer.value or 0))
    if code:
        raise RuntimeError(f"the driver answers {code}")
    return made - began, time.perf_counter() - made


def pairs(measured: list[Timed]) -> Row:
    return {
        **clock.spread([made for made, _ in measured]),
        "free_s": statistics.median(freed for _, freed in measured),
        "samples": len(measured),
    }


def torch_pair(size: int) -> Timed:
    """Seconds of a tensor that torch has no block for, and of empty_cache() behind it."""
    torch.cuda.empty_cache()
    began = time.perf_counter()
    tensor = torch.empty(size, dtype=torch.uint8, device=clock.device())
    made = time.perf_counter()
    del tensor
    between = time.perf_counter()
    torch.cuda.empty_cache()
    return made - began, time.perf_counter() - between


def cached_row(size: int) -> Row:
    """A tensor from a block that torch has."""
    make = partial(torch.empty, size, dtype=torch.uint8, device=clock.device())

    def measure() -> Row:
        return clock.host_seconds(lambda _: make(), 100)

    return attempted({"case": f"torch, cached block {size // MIB} MiB", "bytes": size}, measure)


def repeated(pair: Callable[[], Timed], count: int) -> Row:
    torch.cuda.synchronize()
    return pairs([pair() for _ in range(count)])


def segment_rows(name: str) -> Iterator[Row]:
    """New segments of torch's allocator as it is set."""
    for size, count in SEGMENTS:
        fields = {"case": f"{name} {size // MIB} MiB", "bytes": size}
        yield attempted(fields, partial(repeated, partial(torch_pair, size), count))


def many_segments() -> Row:
    """empty_cache() over 50 segments of 20 MiB."""
    held = [torch.empty(20 * MIB, dtype=torch.uint8, device=clock.device()) for _ in range(50)]
    held.clear()
    began = time.perf_counter()
    torch.cuda.empty_cache()
    seconds = time.perf_counter() - began
    return {"s": seconds, "s_per_segment": seconds / 50}


def measure() -> Iterator[Row]:
    torch.cuda.empty_cache()
    driver = ctypes.CDLL("libcuda.so.1")
    for size, count in SEGMENTS:
        fields = {"case": f"driver {size // MIB} MiB", "bytes": size}
        yield attempted(fields, partial(repeated, partial(driver_pair, driver, size), count))
    yield from segment_rows("torch, new segment")
    for size, _ in SEGMENTS:
        yield cached_row(size)
    yield attempted({"case": "empty_cache of 50 segments"}, many_segments)
    names = (
        "_accelerator_setAllocatorSettings",
        "_cuda_cudaCachingAllocator_set_allocator_settings",
    )
    settings = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
    if settings is None:
        return
    torch.cuda.empty_cache()
    settings("expandable_segments:True")
    try:
        yield from segment_rows("torch, expandable segment")
    finally:
        torch.cuda.empty_cache()
        settings("expandable_segments:False")
