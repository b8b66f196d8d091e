"""What a rank on a CPU holds of the memory that its tensors come and go in: glibc's malloc, set and replayed.

torch's CPU allocator asks malloc for every tensor. By default large blocks are mapped, and small ones of Python's and
torch's keep the slack between others: a heap of twice the live bytes was measured. With SETTINGS slack is joined again
when a block is freed, and blocks below 32 MiB are always cut from the heap, which saves page faults too
(benchmarks/malloc_settings.py). Source: glibc 2.31 to 2.41 malloc.c (_int_memalign, tcache, fast bins, sysmalloc, best
fit from sorted bins). One arena: backward on CPUs runs in the thread that calls it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes
TRIM_THRESHOLD_BYTES = 1 << 30  # what a rank may keep at the heap's end; less is given back and faulted in every step
SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
    f":glibc.malloc.mmap_threshold={MMAP_THRESHOLD_BYTES}:glibc.malloc.trim_threshold={TRIM_THRESHOLD_BYTES}"
}
ALIGNED_BYTES = 80  # header, and the alignment to 64 that torch asks for
ROUNDS = 2  # the first leaves the holes that the second finds
Event = tuple[int, int]  # (block, bytes) at its birth, (block, -1) at its end


def held_bytes(events: Sequence[Event]) -> int:
    """The most that is resident of these allocations, holes included, when they happen again and again."""
    freed = {block for block, size in events if size < 0}
    holes: list[int] = []  # sizes, sorted: the best fit is the first that is large enough
    live: dict[int, int] = {}  # block -> its size in the heap, or less its size where it is mapped
    heap = mapped = highest = 0
    for number in range(ROUNDS):
        for block, size in events:
            if size >= 0:
                if number and block not in freed:
                    continue
                size += ALIGNED_BYTES
                if size >= MMAP_THRESHOLD_BYTES:
                    mapped += size
                    live[block] = -size
                else:
                    heap += _cut(holes, size)
                    live[block] = size
                highest = max(highest, mapped + heap)
            elif block in live:
                held = live.pop(block)
                if held > 0:
                    insort(holes, held)
                else:
                    mapped += held
    return highest


def _cut(holes: list[int], size: int) -> int:
    """Take `size` from the best hole, whose rest stays a hole; bytes by which the heap has to grow instead."""
    at = bisect_left(holes, size)
    if at == len(holes):
        return size
    rest = holes.pop(at) - size
    if rest:
        insort(holes, rest)
    return 0
