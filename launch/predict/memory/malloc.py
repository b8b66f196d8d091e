"""Memory that a rank on a CPU holds for tensors that come and go: glibc's malloc, set and
replayed.

torch's CPU allocator asks malloc for every tensor. By default large blocks are mapped, and small
ones of Python's and torch's keep the slack between others: a heap of twice the live bytes was
measured. With SETTINGS slack is joined again when a block is freed, and a block is mapped only
where the heap, which is not given back, would have to grow by 32 MiB or more for it; that saves
page faults too (benchmarks/malloc_settings.py). Source: glibc 2.31 to 2.41 malloc.c (_int_memalign,
tcache, fast bins, sysmalloc, best fit from sorted bins). One arena: backward on CPUs runs in the
thread that calls it. Pure.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes
# Free memory that a rank may keep at the heap's end. With a lower limit it is given back and
# faulted in again in every step.
TRIM_THRESHOLD_BYTES = 1 << 30
SETTINGS = {
    "GLIBC_TUNABLES": (
        "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
        f":glibc.malloc.mmap_threshold={MMAP_THRESHOLD_BYTES}:glibc.malloc.trim_threshold={TRIM_THRESHOLD_BYTES}"
    )
}
# Bytes that a block takes beyond its own: header, and what stands before the next multiple of 64
ALIGNED_BYTES = 64
# Bytes that a hole needs beyond the block's: torch asks for a multiple of 64 (_int_memalign)
SLACK_BYTES = 112
# Space for a large block, as a multiple of its bytes: objects that come and go divide free memory
_LARGE_ROOM = 1.55
MAPPED = -1  # instead of a start in the heap
# Objects of Python and torch that the first step leaves behind each tensor, ...
OBJECT_BYTES = 2 << 10
_OBJECTS_BYTES = 9 << 20  # ... and in all: holes beside them are not joined
Event = tuple[int, int]  # (block, bytes) at its birth, (block, -1) at its end


def resident_bytes(
    parts: Sequence[tuple[str, Sequence[Event]]],
    written: Mapping[int, int] = {},
    by_threads: bool = False,
) -> dict[str, int]:
    """The highest resident bytes in each part of a run, which come one after another in one heap,
    holes included; a part may come again. It is the mean of a heap with objects between the tensors
    and one without, because where objects lie is chance.

    `written`: of a block of so many bytes only these are ever written, so that no more of it is in
    RAM if it is mapped. `by_threads`: large blocks are Gloo's, whose threads have other heaps.
    """
    without, among = (
        replay(parts, written, objects, by_threads) for objects in (0, _OBJECTS_BYTES)
    )
    return {part: (size + among[part]) // 2 for part, size in without.items()}


def replay(
    parts: Sequence[tuple[str, Sequence[Event]]],
    written: Mapping[int, int],
    objects_bytes: int,
    by_threads: bool = False,
) -> dict[str, int]:
    """The same of a heap with objects of so many bytes."""
    heap = _Heap(math.inf if by_threads else _LARGE_ROOM)
    live: dict[int, tuple[int, int]] = {}  # block -> (its start in the heap, or MAPPED; its bytes)
    highest: dict[str, int] = {}
    mapped = objects = 0
    for part, events in parts:
        highest[part] = max(highest.get(part, 0), mapped + heap.resident)
        for block, size in events:
            if size >= 0 and block >= 0:  # else the cache of a card is emptied
                rounded = (size + ALIGNED_BYTES + 15) // 16 * 16
                live[block] = heap.take(rounded, size + SLACK_BYTES), rounded
                if live[block][0] == MAPPED:
                    live[block] = MAPPED, written.get(size, rounded)
                    mapped += live[block][1]
                if objects < objects_bytes:
                    heap.take(OBJECT_BYTES, OBJECT_BYTES)
                    objects += OBJECT_BYTES
                highest[part] = max(highest[part], mapped + heap.resident)
            elif block in live:
                start, block_bytes = live.pop(block)
                if start == MAPPED:
                    mapped -= block_bytes
                else:
                    heap.free(start, block_bytes)
    return highest


class _Heap:
    """One arena: the best hole is cut, neighbours are joined, the end grows and is reached
    again."""

    def __init__(self, large_room: float = _LARGE_ROOM) -> None:
        self._large_room = large_room  # times the bytes of a large block
        self.resident = 0  # bytes up to the highest end since what is free there was given back
        self._end = 0
        self._holes: list[
            tuple[int, int]
        ] = []  # (bytes, start), sorted: the best fit is the first that is large enough
        self._sizes: dict[int, int] = {}  # a hole's start -> its size
        self._starts: dict[int, int] = {}  # a hole's end -> its start

    def take(self, size: int, needed: float) -> int:
        """The start of the block, in a hole of `needed` bytes or at the end; MAPPED where the end
        would grow by much."""
        is_large = size >= MMAP_THRESHOLD_BYTES
        if is_large:
            needed = size * self._large_room
        index = bisect_left(self._holes, (needed, -1))
        if index == len(self._holes):
            if is_large and self._end + needed > self.resident:
                return MAPPED
            start, self._end = self._end, self._end + size
            self.resident = max(self.resident, self._end)
            return start
        hole, start = self._holes.pop(index)
        del self._sizes[start], self._starts[start + hole]
        if hole > size:
            self._add(start + size, hole - size)
        return start

    def free(self, start: int, size: int) -> None:
        if start in self._starts:
            before = self._starts[start]
            size += self._drop(before)
            start = before
        if start + size in self._sizes:
            size += self._drop(start + size)
        if start + size == self._end:
            self._end = start
            if self.resident - start > TRIM_THRESHOLD_BYTES:
                self.resident = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        self._sizes[start], self._starts[start + size] = size, start
        insort(self._holes, (size, start))

    def _drop(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
        return size
