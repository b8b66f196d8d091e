"""Bandwidth of copies between host and device, and seconds of pinning and of memory itself."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted, error_row

MIB, GIB = 1 << 20, 1 << 30
SIZES = (MIB, 64 * MIB, GIB)
STREAM_SAMPLES = 5


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def host_tensor(size: int, pinned: bool) -> torch.Tensor:
    """Bytes of host memory that have been written once."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(7)


def device_tensor(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=clock.device()).fill_(3)


def rate(size: int, seconds: Row) -> Row:
    return {**seconds, "bytes": size, "gb_s": size / seconds["s"] / 1e9}


def copy_row(size: int, pinned: bool, to_device: bool) -> Row:
    """One direction. Device seconds of pinned copies; of pageable ones wall seconds, as the host
    takes part; `issue_s` is the host's of a call."""

    def measure() -> Row:
        host, device = host_tensor(size, pinned), device_tensor(size)
        target, source = (device, host) if to_device else (host, device)
        copy = partial(target.copy_, source, non_blocking=pinned)
        first_s, issue_s = clock.first_seconds(copy), clock.issue_seconds([copy])
        if pinned:
            count = max(1, min(50, 256 * MIB // size))
            calls = clock.in_stream([copy] * count)
            samples = clock.elapsed(calls, clock.LEAD_S + count * 5e-6, STREAM_SAMPLES)
            samples = [each / count for each in samples]
        else:
            samples = clock.wall_seconds(copy, 3 if size == GIB else 9)
        return rate(size, {**clock.spread(samples), "first_s": first_s, "issue_s": issue_s})

    direction = "to device" if to_device else "to host"
    kind = "pinned" if pinned else "pageable"
    fields = {"case": f"{kind} {direction} {size // MIB} MiB", "direction": direction}
    return attempted({**fields, "pinned": pinned}, measure)


def both_ways_row(size: int) -> Row:
    """Pinned copies in both directions at once, on two streams; the rate is of both together."""

    def measure() -> Row:
        pairs = [(host_tensor(size, True), device_tensor(size)) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def copy() -> None:
            with torch.cuda.stream(streams[0]):
                pairs[0][1].copy_(pairs[0][0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                pairs[1][0].copy_(pairs[1][1], non_blocking=True)

        copy()
        return rate(2 * size, clock.spread(clock.wall_seconds(copy, 5)))

    return attempted({"case": f"pinned both ways {size // MIB} MiB", "pinned": True}, measure)


def beside_products_row(size: int) -> Row:
    """A pinned copy to the device while products run: the share of its rate that is left."""

    def measure() -> Row:
        host, device = host_tensor(size, True), device_tensor(size)
        a = torch.randn(4096, 4096, device=clock.device(), dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        products = clock.in_stream([partial(torch.mm, a, a)] * 40)
        (alone_s,) = clock.elapsed(products, clock.LEAD_S, 1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def copy_and_products() -> None:
            with torch.cuda.stream(stream):
                begin.record()
                device.copy_(host, non_blocking=True)
                end.record()
            products()

        (beside_s,) = clock.elapsed(copy_and_products, clock.LEAD_S, 1)
        copy_s = begin.elapsed_time(end) / 1e3
        return {**rate(size, {"s": copy_s}), "products_slower": beside_s / alone_s}

    return attempted({"case": f"pinned to device beside products {size // MIB} MiB"}, measure)


def strided_row(to_device: bool, pinned: bool) -> Row:
    """Every second column of 64 MiB, which is made contiguous on the way."""

    def measure() -> Row:
        host = host_tensor(128 * MIB, pinned).view(8192, -1)[:, ::2]
        device = device_tensor(128 * MIB).view(8192, -1)[:, ::2]
        target, source = (device, host) if to_device else (host, device)
        copy = partial(target.copy_, source, non_blocking=pinned)
        copy()
        return rate(64 * MIB, clock.spread(clock.wall_seconds(copy, 3)))

    direction = "to device" if to_device else "to host"
    kind = "pinned" if pinned else "pageable"
    return attempted({"case": f"strided {kind} {direction} 64 MiB", "pinned": pinned}, measure)


def pin_row(size: int) -> Row:
    """Seconds of pinned memory that the driver allocates, and of giving it back."""

    def measure() -> Row:
        driver, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        began = time.perf_counter()
        code = driver.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0)
        allocated = time.perf_counter()
        freed_code = driver.cuMemFreeHost(pointer)
        figures = {"s": allocated - began, "free_s": time.perf_counter() - allocated}
        return {
            **rate(size, figures),
            "s_per_gib": figures["s"] * GIB / size,
            **codes(code, freed_code),
        }

    return attempted({"case": f"pinned allocation {size // MIB} MiB"}, measure)


def codes(*numbers: int) -> Row:
    return {"driver_codes": list(numbers)} if any(numbers) else {}


def register_row(size: int) -> Row:
    """Seconds of pinning memory that is there, written or not, and of unpinning it."""

    def measure() -> Row:
        host, cudart = host_tensor(size, False), torch.cuda.cudart()
        began = time.perf_counter()
        code = int(cudart.cudaHostRegister(host.data_ptr(), size, 0))
        pinned = time.perf_counter()
        other = int(cudart.cudaHostUnregister(host.data_ptr()))
        figures = {"s": pinned - began, "free_s": time.perf_counter() - pinned}
        return {**rate(size, figures), "s_per_gib": figures["s"] * GIB / size, **codes(code, other)}

    return attempted({"case": f"registration {size // MIB} MiB"}, measure)


def torch_pin_row(size: int) -> Row:
    """torch's pinned memory: the first time, and again from its cache."""

    def measure() -> Row:
        make = partial(torch.empty, size, dtype=torch.uint8, pin_memory=True)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            tensor = make()
            seconds.append(time.perf_counter() - began)
            del tensor
        return {**rate(size, {"s": seconds[0]}), "again_s": seconds[1]}

    return attempted({"case": f"torch's pinned tensor {size // MIB} MiB"}, measure)


def memory_row(name: str, size: int, threads: int, call: Callable[[], object], moved: int) -> Row:
    """A call over host memory with so many threads."""

    def measure() -> Row:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            call()
            return rate(moved, clock.spread(clock.wall_seconds(call, 3)))
        finally:
            torch.set_num_threads(before)

    return attempted({"case": f"{name} {size // MIB} MiB, {threads} threads"}, measure)


def host_rows() -> Iterator[Row]:
    """The host's own memory: copies, first writes, float32 products and additions."""
    size = 512 * MIB if host_bytes() > 8 * GIB else 64 * MIB
    try:
        source, target = host_tensor(size, False), host_tensor(size, False)
        first, second = (torch.rand(1024, 1024) for _ in range(2))
        floats = source.view(torch.float32)
    except RuntimeError as error:
        yield error_row(error, case="host memory")
        return
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        yield memory_row("host copy", size, threads, partial(target.copy_, source), 2 * size)
        yield memory_row("host add in place", size, threads, partial(floats.add_, 1.0), 2 * size)
        fresh = partial(torch.ones, size // 4)
        yield memory_row("host first write", size, threads, fresh, size)
        product = partial(torch.mm, first, second)
        row = memory_row("host product float32 1024^3", 12 * MIB, threads, product, 12 * MIB)
        yield row if "error" in row else {**row, "gflops": 2 * 1024**3 / row["s"] / 1e9}


def into_pinned_rows(size: int) -> Iterator[Row]:
    """The host's own copies between pageable and pinned memory."""
    pageable, pinned = host_tensor(size, False), host_tensor(size, True)
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        for name, target, source in (
            ("pageable to pinned", pinned, pageable),
            ("pinned to pageable", pageable, pinned),
        ):
            yield memory_row(name, size, threads, partial(target.copy_, source), 2 * size)


def card_rows() -> Iterator[Row]:
    largest = SIZES if host_bytes() > 8 * GIB else SIZES[:2]
    for size in largest:
        for pinned in (True, False):
            for to_device in (True, False):
                yield copy_row(size, pinned, to_device)
    for size in (64 * MIB, 256 * MIB):
        yield both_ways_row(size)
    yield beside_products_row(256 * MIB)
    for to_device, pinned in ((True, False), (True, True), (False, False)):
        yield strided_row(to_device, pinned)
    for size in largest[1:]:
        yield pin_row(size)
        yield register_row(size)
    yield torch_pin_row(96 * MIB)  # a size that no other case has left in the cache
    yield from into_pinned_rows(64 * MIB)


def host() -> Iterator[Row]:
    yield from host_rows()


def measure() -> Iterator[Row]:
    yield from card_rows()
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty:
        empty()
