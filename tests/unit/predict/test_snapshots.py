"""The allocator replay beside memory snapshots of real cards (tests/data/gpu): each request finds
the segment that it found on the card."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from launch.predict.memory.allocator import Block, CachingAllocator
from launch.predict.memory.allocator_config import AllocatorConfig

FOLDER = Path(__file__).parents[2] / "data" / "gpu"
SNAPSHOTS = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


class Card:
    """The replay of a snapshot, from the segments that exist before its first event."""

    def __init__(self, name: str, capacity_bytes: int | None = None) -> None:
        self.snapshot: dict[str, Any] = json.loads(
            gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())
        )
        config = AllocatorConfig(expandable_segments=self.snapshot["expandable_segments"])
        self.allocator = CachingAllocator(config, capacity_bytes)
        self.live: dict[int, Block] = {}
        for size_bytes, pool, blocks in self.snapshot["at_start"]:
            self._add_segment(size_bytes, pool, blocks)

    def _add_segment(self, size_bytes: int, pool_name: str, blocks: list[list[int]]) -> None:
        assert sum(block_bytes for block_bytes, _ in blocks) == size_bytes
        allocator = self.allocator
        pool, *_ = allocator.small if pool_name == "small" else allocator.large
        address, previous = pool.addresses(size_bytes), None
        allocator.reserved_bytes += size_bytes
        made = []
        for block_bytes, index in blocks:
            block = Block(pool, address, block_bytes, allocated=index >= 0)
            block.link(previous, None)
            address, previous = address + block_bytes, block
            made.append(block)
            if index >= 0:
                self.live[index] = block
                allocator.allocated_bytes += block_bytes
        for block in made:
            if not block.allocated:
                pool.insert(block)

    def allocate(self, index: int, size_bytes: int) -> int | None:
        """The bytes that the driver was asked for; None: out of memory."""
        before = self.allocator.reserved_bytes
        block = self.allocator.allocate(size_bytes)
        if block is None:
            return None
        self.live[index] = block
        return self.allocator.reserved_bytes - before

    def empty_cache(self) -> int:
        before = self.allocator.reserved_bytes
        self.allocator.empty_cache()
        return before - self.allocator.reserved_bytes


def test_there_are_snapshots():
    assert len(SNAPSHOTS) == 5


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_each_request_takes_the_segments_that_it_took_on_the_card(name):
    card = Card(name)
    for number, (kind, *values) in enumerate(card.snapshot["events"]):
        if kind == "+":
            index, size_bytes, *segments = values
            wanted = sum(segments[0]) if segments else 0
            assert card.allocate(index, size_bytes) == wanted, f"event {number}"
        elif kind == "-":
            card.allocator.free(card.live.pop(values[0]))
        elif kind == "returned":
            assert card.empty_cache() == values[0], f"event {number}"
        else:
            assert kind == "out of memory"
    ended = (card.allocator.reserved_bytes, card.allocator.allocated_bytes)
    assert ended == tuple(card.snapshot[f"end_{name}_bytes"] for name in ("reserved", "allocated"))


def test_the_request_that_failed_on_a_card_fails_after_the_cache_is_given_back():
    name = "expandable_out_of_memory"
    events = Card(name).snapshot["events"]
    failed = next(index for index, event in enumerate(events) if event[0] == "out of memory")
    _, requested_bytes, free_bytes = events[failed]
    used_bytes = sum(sum(event[3]) for event in events[:failed] if len(event) > 3)
    returned_bytes = sum(event[1] for event in events[:failed] if event[0] == "returned")
    card = Card(name, capacity_bytes=used_bytes - returned_bytes + free_bytes)
    for number, (kind, *values) in enumerate(events[:failed]):
        if kind == "+":
            is_retry = events[number - 1][0] == "returned"
            grown = sum(values[2]) if len(values) > 2 else 0
            wanted = grown - (events[number - 1][1] if is_retry else 0)
            assert card.allocate(*values[:2]) == wanted, f"event {number}"
            assert card.allocator.retries == (number > failed - 2)
        elif kind == "-":
            card.allocator.free(card.live.pop(values[0]))
    assert card.allocate(-1, requested_bytes) is None
