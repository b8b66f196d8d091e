"""What a rank on a CPU holds of the memory that its tensors come and go in: glibc's malloc, replayed.

torch's CPU allocator asks malloc for every tensor. Large blocks are mapped and given back when they are freed; but each
such free raises the threshold to the block's size, up to 32 MiB, and blocks below it are cut from the heap, where freed
ones stay as holes. Small objects of Python's lie between them, so that holes are hardly ever joined or given back: here
never. Source: glibc 2.31 to 2.41 malloc.c (sysmalloc, the dynamic threshold in __libc_free, best fit from sorted bins).
One arena: backward on CPUs runs in the thread that calls it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

MMAP_THRESHOLD_BYTES = 128 << 10  # M_MMAP_THRESHOLD as a process starts
MMAP_THRESHOLD_MAX_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX on 64 bit
ALIGNED_BYTES = 80  # header, and the alignment to 64 that torch asks for
ROUNDS = 2  # in the first the threshold settles
Event = tuple[int, int]  # (block, bytes) at its birth, (block, -1) at its end


def held_bytes(events: Sequence[Event]) -> int:
    """The most that is resident of these allocations, holes included, when they happen again and again."""
    freed = {block for block, size in events if size < 0}
    holes: list[int] = []  # sizes, sorted: the best fit is the first that is large enough
    live: dict[int, int] = {}  # block -> its size in the heap, or less its size where it is mapped
    heap = mapped = highest = 0
    threshold = MMAP_THRESHOLD_BYTES
    for number in range(ROUNDS):
        for block, size in events:
            if size >= 0:
                if number and block not in freed:
                    continue
                size += ALIGNED_BYTES
                if size >= threshold:
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
                    if threshold < -held <= MMAP_THRESHOLD_MAX_BYTES:
                        threshold = -held
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
