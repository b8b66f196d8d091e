"""A replay of PyTorch's caching allocator: the bytes that it reserves for a log of allocations and
frees, and the request that fails.

Follows DeviceCachingAllocator in c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13, native
backend; "Source" names its functions. Compared byte for byte with the compiled allocator of torch
2.11.0 over a CUDA driver that only counts, on random logs under every setting, and with memory
snapshots of cards (tests/data/gpu), of one stream each. A block of another stream is never split
for the main one, nor the other way round. Left out: blocks that several streams use, graph captures
and private pools. Assumed: the driver places a new segment above the older ones and refuses only
when memory is used up.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from launch.predict.memory.allocator_config import INTERVALS, MIB, TORCH_DEFAULTS, AllocatorConfig

Event = tuple[int, int]  # id of a block and its bytes; FREED in place of the bytes where it dies

FREED = -1
EMPTY_CACHE: Event = (-1, 0)  # no block: torch.cuda.empty_cache() is called
# Blocks of an engine's stream n (1, 2) have ids from n * STREAM on; those of the main stream less.
STREAM = 1 << 48
_NUM_STREAMS = 3
BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple of it
_SMALL_BYTES = MIB  # kSmallSize: requests up to here share the small segments
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: requests from here have a segment of their own
_ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge, of such a segment
_ADDRESS_BITS = 64
_UNLIMITED_BYTES = 1 << 56


@dataclass(frozen=True)
class Replay:
    """The result of a log; peaks as torch.cuda.max_memory_allocated and max_memory_reserved count
    them.

    What is active is what is allocated. A log ends at the request that failed.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int  # requests for which every cached segment was given back, as num_alloc_retries
    failed_event: int | None = None  # index in the log

    @property
    def out_of_memory(self) -> bool:
        return self.failed_event is not None


def replay(
    events: Iterable[Event],
    config: AllocatorConfig = TORCH_DEFAULTS,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
) -> Replay:
    """The bytes that the allocator reserves for a log, and the request that fails if the driver has
    only capacity_bytes.

    device_bytes is the memory of the whole device, of which per_process_memory_fraction is a share
    and which bounds the addresses of an expandable segment; capacity_bytes unless given. Requests
    of no bytes take nothing.
    """
    return replay_parts([events], config, capacity_bytes, device_bytes)[0]


def replay_parts(
    parts: Iterable[Iterable[Event]],
    config: AllocatorConfig = TORCH_DEFAULTS,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
) -> list[Replay]:
    """replay() of a log in parts, with the peaks of each part, as if
    torch.cuda.reset_peak_memory_stats() were called between them. The part with the request that
    fails is the last of the list."""
    allocator = CachingAllocator(config, capacity_bytes, device_bytes)
    live: dict[int, Block] = {}
    replays: list[Replay] = []
    for events in parts:
        allocator.reset_peaks()
        replays.append(allocator.report(_failed_event(allocator, live, events)))
        if replays[-1].out_of_memory:
            break
    return replays


def _failed_event(
    allocator: "CachingAllocator", live: "dict[int, Block]", events: Iterable[Event]
) -> int | None:
    """Replay these events. Returns the index of the request that fails."""
    for index, (block_id, size_bytes) in enumerate(events):
        if (block_id, size_bytes) == EMPTY_CACHE:
            allocator.empty_cache()
        elif size_bytes > 0:
            block = allocator.allocate(size_bytes, block_id // STREAM)
            if block is None:
                return index
            assert block_id not in live, f"event {index}: block {block_id} lives already"
            live[block_id] = block
        elif size_bytes < 0 and block_id in live:
            allocator.free(live.pop(block_id))
    return None


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment: live, free, or addresses without memory in an expandable one."""

    pool: "_Pool"
    address: int
    size_bytes: int
    mapped: bool = True
    allocated: bool = False
    inserted_at: int = 0  # gc_count_base
    previous: "Block | None" = None
    next: "Block | None" = None

    @property
    def split(self) -> bool:
        return self.previous is not None or self.next is not None

    def link(self, previous: "Block | None", following: "Block | None") -> None:
        """Put the block between two neighbours."""
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self

    def split_off(self, size_bytes: int, mapped: bool = True) -> None:
        """Keep the first bytes; the others become a free block behind it."""
        remainder = Block(
            self.pool, self.address + size_bytes, self.size_bytes - size_bytes, mapped
        )
        remainder.link(self, self.next)
        self.pool.insert(remainder)
        self.size_bytes = size_bytes


class _Pool:
    """The free blocks of one class of sizes: by size, then by address (BlockComparatorSize)."""

    def __init__(self, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.sort_keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []
        self.next_address = 0
        self.searches = 0  # get_free_blocks_call_count

    def insert(self, block: Block) -> None:
        block.inserted_at = self.searches
        if block.mapped:
            key = block.size_bytes << _ADDRESS_BITS | block.address
            insort(self.sort_keys, key)
            self.blocks[key] = block
        else:
            insort(self.unmapped, block, key=attrgetter("address"))

    def remove(self, block: Block) -> None:
        if block.mapped:
            key = block.size_bytes << _ADDRESS_BITS | block.address
            del self.sort_keys[bisect_left(self.sort_keys, key)], self.blocks[key]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=attrgetter("address"))]

    def at_least(self, size_bytes: int) -> int:
        """Index in `sort_keys` of the smallest block that holds so many bytes."""
        return bisect_left(self.sort_keys, size_bytes << _ADDRESS_BITS)

    def addresses(self, size_bytes: int) -> int:
        """The start of a range of addresses above all earlier ones."""
        start = self.next_address
        self.next_address += size_bytes
        return start


def _merge_neighbours(block: Block) -> None:
    """Source: try_merge_blocks."""
    for other in (block.previous, block.next):
        if other is None or other.allocated or other.mapped != block.mapped:
            continue
        block.pool.remove(other)
        block.size_bytes += other.size_bytes
        if other is block.previous:
            block.address = other.address
            block.link(other.previous, block.next)
        else:
            block.link(block.previous, other.next)


class CachingAllocator:
    """DeviceCachingAllocator: each stream has two pools, over a driver that has capacity_bytes."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.config = config
        self.capacity_bytes = _UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
        self.device_bytes = self.capacity_bytes if device_bytes is None else device_bytes
        share = config.per_process_memory_fraction
        # setMemoryFraction
        self.allowed_bytes = int(share * self.device_bytes) if share < 1.0 else None
        self.collects = self.allowed_bytes is not None and config.garbage_collection_threshold > 0.0
        self.max_split_bytes = config.max_split_size_bytes or _UNLIMITED_BYTES
        self.rounds = any(count > 1 for count in config.roundup_power2_divisions)
        self.small = [_Pool(True, _SMALL_SEGMENT_BYTES) for _ in range(_NUM_STREAMS)]
        self.large = [_Pool(False, config.large_segment_bytes) for _ in range(_NUM_STREAMS)]
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = (
            self.peak_reserved_bytes
        ) = 0
        self.retries = 0

    def report(self, failed_event: int | None = None) -> Replay:
        return Replay(
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
            self.retries,
            failed_event,
        )

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes, self.peak_reserved_bytes = (
            self.allocated_bytes,
            self.reserved_bytes,
        )

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block | None:
        """A block for a request of at least one byte, or None where torch raises OutOfMemoryError.
        Source: malloc."""
        size_bytes = self.rounded(requested_bytes)
        pool = (self.small if size_bytes <= _SMALL_BYTES else self.large)[stream]
        block = self._take_free(pool, size_bytes) or self._take_new(pool, size_bytes)
        if block is None:
            return None
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes and self._splits(pool, size_bytes, rest_bytes):
            block.split_off(size_bytes)
        block.allocated = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Join the block with free neighbours and return it to its pool. Source: free_block."""
        self.allocated_bytes -= block.size_bytes
        block.allocated = False
        _merge_neighbours(block)
        block.pool.insert(block)

    def rounded(self, size_bytes: int) -> int:
        """Source: round_size, roundup_power2_next_division."""
        if self.rounds:
            interval = min(max(size_bytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
            divisions = self.config.roundup_power2_divisions[interval]
            if divisions > 1 and size_bytes > BLOCK_BYTES * divisions:
                step_bytes = (1 << (size_bytes.bit_length() - 1)) // divisions
                return -(-size_bytes // step_bytes) * step_bytes
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def segment_bytes(self, size_bytes: int) -> int:
        """Bytes of the segment that the driver is asked for. Source: get_allocation_size."""
        if size_bytes <= _SMALL_BYTES:
            return _SMALL_SEGMENT_BYTES
        if size_bytes < _MIN_LARGE_BYTES:
            return self.config.large_segment_bytes
        return -(-size_bytes // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES

    def _splits(self, pool: _Pool, size_bytes: int, rest_bytes: int) -> bool:
        """Source: should_split."""
        if pool.small or self.config.expandable_segments:
            return rest_bytes >= BLOCK_BYTES
        return size_bytes < self.max_split_bytes and rest_bytes > _SMALL_BYTES

    def _take_free(self, pool: _Pool, size_bytes: int) -> Block | None:
        """The best fit among the free blocks. Source: get_free_block."""
        if self.collects:
            pool.searches += 1
        sort_keys, index = pool.sort_keys, pool.at_least(size_bytes)
        if index == len(sort_keys):
            return None
        block = pool.blocks[sort_keys[index]]
        # a block before unmapped addresses counts as large as it can become
        if self.config.expandable_segments:
            while index + 1 < len(sort_keys):
                larger = pool.blocks[sort_keys[index + 1]]
                if _expandable_bytes(larger) >= _expandable_bytes(block):
                    break
                index, block = index + 1, larger
        if size_bytes < self.max_split_bytes:
            if block.size_bytes >= self.max_split_bytes:
                return None
        elif block.size_bytes >= size_bytes + self.config.max_non_split_rounding_bytes:
            return None
        del pool.blocks[sort_keys.pop(index)]
        return block

    def _take_new(self, pool: _Pool, size_bytes: int) -> Block | None:
        """Memory from the driver; if it has too little, cached segments go back to it first.
        Source: malloc."""
        if self.collects:
            self._collect_garbage()
        block = self._ask_driver(pool, size_bytes)
        if block is None and self._release_oversize(pool, size_bytes):
            block = self._ask_driver(pool, size_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size_bytes)
        return block

    def _ask_driver(self, pool: _Pool, size_bytes: int) -> Block | None:
        """Source: alloc_block."""
        segment_bytes = self.segment_bytes(size_bytes)
        if (
            self.allowed_bytes is not None
            and self.reserved_bytes + segment_bytes > self.allowed_bytes
        ):
            return None
        if self.config.expandable_segments:
            return self._expand(pool, size_bytes)
        if not self._reserve(segment_bytes):
            return None
        return Block(pool, pool.addresses(segment_bytes), segment_bytes)

    def _reserve(self, size_bytes: int) -> bool:
        """cudaMalloc or cuMemCreate."""
        if self.reserved_bytes + size_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _collect_garbage(self) -> None:
        """Gives back the large segments that were free the longest. Source:
        garbage_collect_cached_blocks."""
        assert self.allowed_bytes is not None
        threshold_bytes = int(self.config.garbage_collection_threshold * self.allowed_bytes)
        target_bytes = self.reserved_bytes - threshold_bytes
        if target_bytes <= 0 or self.config.expandable_segments:
            return
        idle = [block for pool in self.large for block in pool.blocks.values() if not block.split]
        while target_bytes > 0 and idle:
            ages = [block.pool.searches - block.inserted_at for block in idle]
            mean = sum(ages) / len(ages)
            old = [block for block, age in zip(idle, ages, strict=True) if age >= mean]
            idle = [block for block, age in zip(idle, ages, strict=True) if age < mean]
            target_bytes -= sum(block.size_bytes for block in old)
            for block in old:
                self._release(block)

    def _release_oversize(self, pool: _Pool, size_bytes: int) -> bool:
        """Gives back unsplittable blocks, one that is large enough or the largest. Source:
        release_available..."""
        if self.config.max_split_size_bytes is None or self.config.expandable_segments:
            return False
        wanted_bytes = max(size_bytes, self.max_split_bytes)
        index = pool.at_least(wanted_bytes)
        if index < len(pool.sort_keys):
            self._release(pool.blocks[pool.sort_keys[index]])
            return True
        released_bytes = 0
        while pool.sort_keys and released_bytes < wanted_bytes:
            block = pool.blocks[pool.sort_keys[-1]]
            if block.size_bytes < self.max_split_bytes:
                break
            released_bytes += block.size_bytes
            self._release(block)
        return released_bytes >= wanted_bytes

    def empty_cache(self) -> None:
        """Gives every segment that nothing lives in back to the driver. Source:
        release_cached_blocks, release_blocks."""
        for pool in (*self.large, *self.small):
            for block in [pool.blocks[key] for key in pool.sort_keys]:
                if self.config.expandable_segments:
                    self._unmap(block)
                elif not block.split:
                    self._release(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _expand(self, pool: _Pool, size_bytes: int) -> Block | None:
        """The lowest free range that can be made large enough. Source:
        try_allocate_expandable_block."""
        block = self._expandable_block(pool, size_bytes)
        if not block.mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            following = block.next
            assert following is not None
            if not self._map(following, min(size_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable_block(self, pool: _Pool, size_bytes: int) -> Block:
        """Source: find_expandable_block."""
        for block in pool.unmapped:
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            if _free_bytes_from(block) >= size_bytes:
                return block
        # ExpandableSegment
        pages = -(-(self.device_bytes + self.device_bytes // 8) // pool.page_bytes)
        segment_bytes = max(pages, 1) * pool.page_bytes
        block = Block(pool, pool.addresses(segment_bytes), segment_bytes, mapped=False)
        pool.insert(block)
        return block

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Gives the first pages of an unmapped block memory, all or none. Source: map_block."""
        pool = block.pool
        mapped_bytes = -(-size_bytes // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped_bytes):
            return False
        pool.remove(block)
        block.mapped = True
        if mapped_bytes < block.size_bytes:
            block.split_off(mapped_bytes, mapped=False)
        _merge_neighbours(block)
        pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Takes the memory of the whole pages in a free block. Source: unmap_block."""
        pool = block.pool
        start = -(-block.address // pool.page_bytes) * pool.page_bytes
        end = (block.address + block.size_bytes) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            before = Block(pool, block.address, start - block.address)
            before.link(block.previous, block)
            pool.insert(before)
        if block.address + block.size_bytes > end:
            block.split_off(end - block.address)
        block.address, block.size_bytes, block.mapped = start, end - start, False
        self.reserved_bytes -= end - start
        _merge_neighbours(block)
        if block.split:  # else the whole segment is empty: release_expandable_segment
            pool.insert(block)


def _expandable_bytes(block: Block) -> int:
    following = block.next
    return block.size_bytes + (
        following.size_bytes if following is not None and not following.mapped else 0
    )


def _free_bytes_from(block: Block | None) -> int:
    free_bytes = 0
    while block is not None and not block.allocated:
        free_bytes += block.size_bytes
        block = block.next
    return free_bytes
