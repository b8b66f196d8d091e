"""What torch's caching allocator reserves for a log: its rules, its compiled figures, its
invariants."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.base.errors import ConfigError
from launch.predict.memory.allocator import (
    EMPTY_CACHE,
    FREED,
    STREAM,
    Block,
    CachingAllocator,
    Event,
    Replay,
    replay,
)
from launch.predict.memory.allocator_config import MIB, AllocatorConfig
from tests import cost

pytestmark = pytest.mark.unit

GIB = 1024 * MIB
PAGED = "expandable_segments:True"


def log(*steps: int | str) -> list[Event]:
    """Sizes allocate blocks 0, 1, 2, ...; "-1" frees block 1, "empty" empties the cache."""
    events: list[Event] = []
    count = 0
    for step in steps:
        if step == "empty":
            events.append(EMPTY_CACHE)
        elif isinstance(step, str):
            events.append((-int(step), FREED))
        else:
            events.append((count, step))
            count += 1
    return events


def run(*steps: int | str, conf: str = "", **limits: int) -> Replay:
    return replay(log(*steps), AllocatorConfig.parse(conf), **limits)


def reserved_mib(*steps: int | str, conf: str = "", **limits: int) -> float:
    return run(*steps, conf=conf, **limits).peak_reserved_bytes / MIB


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (0, 0), (3_000_000, 3_000_320)],
)
def test_a_request_takes_whole_blocks_of_512_bytes(requested, allocated):
    assert run(requested, conf=PAGED).peak_allocated_bytes == allocated


@pytest.mark.parametrize(
    ("requested", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (84 * MIB, 84),
    ],
)
def test_the_size_of_a_segment_follows_from_the_request(requested, segment_mib):
    assert reserved_mib(requested) == segment_mib


def test_small_requests_share_a_segment_until_it_is_full():
    assert reserved_mib(*[MIB // 4] * 8) == 2
    assert reserved_mib(*[MIB // 4] * 9) == 4


def test_small_and_large_requests_never_share():
    assert reserved_mib(20 * MIB, "-0", MIB) == 22


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left():
    # of 12 MiB 11 are taken: the last one stays with its block, and counts as allocated
    assert run(12 * MIB, "-0", 11 * MIB).peak_allocated_bytes == 12 * MIB
    # 1 MiB and 512 bytes are left of 12 MiB
    assert run(11 * MIB - 512).peak_allocated_bytes == 11 * MIB - 512
    assert reserved_mib(14 * MIB, "-0", 11 * MIB, 2 * MIB) == 14
    assert reserved_mib(14 * MIB, "-0", 11 * MIB, 3 * MIB + 1) == 34


def test_the_smallest_block_that_fits_is_taken():
    freed = (40 * MIB, 20 * MIB, 30 * MIB, "-0", "-1", "-2")
    assert reserved_mib(*freed, 19 * MIB, 30 * MIB, 40 * MIB) == 90
    assert reserved_mib(*freed, 41 * MIB) == 132


def test_of_equal_blocks_the_lowest_is_taken():
    # 40 MiB are free in the first segment, half of which is in use, and in a second one, which can
    # still be given back
    equal = (80 * MIB, "-0", 40 * MIB, 40 * MIB, 40 * MIB, "-1", "-3", 40 * MIB)
    assert not run(*equal, 50 * MIB, capacity_bytes=130 * MIB).out_of_memory
    # the last two of five pages stay together
    paged = ([20 * MIB] * 5, ("-1", "-3", 20 * MIB, "-4", 40 * MIB))
    assert reserved_mib(*paged[0], *paged[1], conf=PAGED) == 100


def test_freed_neighbours_become_one_block():
    assert (
        reserved_mib(40 * MIB, "-0", 10 * MIB, 10 * MIB, 20 * MIB, "-1", "-3", "-2", 40 * MIB) == 40
    )
    assert reserved_mib(40 * MIB, "-0", 10 * MIB, 10 * MIB, 20 * MIB, "-1", "-3", 30 * MIB) == 70


def test_a_driver_without_memory_gets_the_cached_segments_back_and_the_request_passes():
    result = run(30 * MIB, 30 * MIB, "-0", 40 * MIB, capacity_bytes=70 * MIB)
    assert (result.retries, result.out_of_memory, result.peak_reserved_bytes) == (
        1,
        False,
        70 * MIB,
    )
    assert run(30 * MIB, 30 * MIB, "-0", 40 * MIB, capacity_bytes=100 * MIB).retries == 0


def test_small_segments_go_back_too():
    assert run(MIB, "-0", 20 * MIB, capacity_bytes=20 * MIB).retries == 1


def test_a_segment_that_is_partly_used_is_not_given_back():
    result = run(30 * MIB, "-0", 2 * MIB, 40 * MIB, capacity_bytes=69 * MIB)
    assert (result.failed_event, result.retries) == (3, 1)
    assert run(30 * MIB, "-0", 2 * MIB, 40 * MIB, capacity_bytes=70 * MIB).failed_event is None


def test_more_than_the_whole_memory_fails_and_the_log_ends_there():
    result = run(4 * MIB, 90 * MIB, MIB, capacity_bytes=100 * MIB)
    assert result.failed_event == 1
    assert result.peak_allocated_bytes == 4 * MIB


def test_a_stream_does_not_take_what_another_has_freed_and_all_are_emptied():
    of_engine = STREAM + 1
    events = [(0, 20 * MIB), (0, FREED), (of_engine, 20 * MIB), (of_engine, FREED), (2, 20 * MIB)]
    assert replay(events).peak_reserved_bytes == 40 * MIB
    allocator = CachingAllocator(AllocatorConfig.parse(""))
    for block in (allocator.allocate(20 * MIB), allocator.allocate(20 * MIB, 1)):
        assert block is not None
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("conf", ["", PAGED])
def test_an_emptied_cache_leaves_what_lives_and_counts_as_no_retry(conf):
    assert reserved_mib(60 * MIB, "-0", 80 * MIB, conf="") == 140
    emptied = run(60 * MIB, MIB, "-0", "empty", 80 * MIB, conf=conf)
    assert (emptied.peak_reserved_bytes, emptied.retries) == (82 * MIB, 0)
    # a segment that something lives in stays whole
    kept = run(60 * MIB, "-0", 2 * MIB, "empty", 80 * MIB)
    assert kept.peak_reserved_bytes == 140 * MIB


def test_expandable_segments_grow_by_their_pages():
    assert reserved_mib(3 * MIB, conf=PAGED) == 20
    assert reserved_mib(30 * MIB, conf=PAGED) == 40
    assert reserved_mib(30 * MIB, 15 * MIB, conf=PAGED) == 60
    assert reserved_mib(MIB, MIB, MIB, conf=PAGED) == 4
    assert reserved_mib(30 * MIB, conf=f"{PAGED},large_segment_size_mb:12") == 36


def test_an_expandable_segment_grows_at_its_free_end_only_by_what_is_missing():
    # a free block of 40 MiB becomes one of 80, where segments of their own would add up to 120
    assert reserved_mib(40 * MIB, "-0", 80 * MIB, conf=PAGED) == 80
    assert reserved_mib(40 * MIB, "-0", 80 * MIB) == 120


def test_a_best_fit_leaves_the_growing_end_of_an_expandable_segment_alone():
    # 20 MiB free in the middle and 10 at the end: what fits the end is put in the middle
    steps = (20 * MIB, 20 * MIB, 10 * MIB, "-0", 10 * MIB)
    assert reserved_mib(*steps, 30 * MIB, conf=PAGED) == 80


def test_whole_free_pages_of_an_expandable_segment_go_back_and_their_addresses_are_filled_first():
    # 5 of 80 MiB live in front, 20 behind: pages 1 and 2 can go
    steps = (60 * MIB, 20 * MIB, "-0", 5 * MIB)
    result = run(*steps, 70 * MIB, conf=PAGED, capacity_bytes=120 * MIB)
    assert (result.retries, result.out_of_memory, result.peak_reserved_bytes) == (
        1,
        False,
        120 * MIB,
    )
    assert run(*steps, 81 * MIB, conf=PAGED, capacity_bytes=120 * MIB).out_of_memory
    hole = run(*steps, 70 * MIB, "-3", 55 * MIB, conf=PAGED, capacity_bytes=120 * MIB)
    assert (hole.retries, hole.out_of_memory) == (1, False)


def test_blocks_from_max_split_size_are_not_split_and_only_near_sizes_take_them():
    conf = "max_split_size_mb:40"
    # a small request leaves the large block alone
    assert reserved_mib(60 * MIB, "-0", 30 * MIB, conf=conf) == 90
    assert reserved_mib(60 * MIB, "-0", 40 * MIB, conf=conf) == 100  # 20 MiB too much
    taken = run(60 * MIB, "-0", 40 * MIB + 512, conf=conf)
    assert (taken.peak_reserved_bytes, taken.peak_allocated_bytes) == (60 * MIB, 60 * MIB)
    assert reserved_mib(60 * MIB, "-0", 40 * MIB, conf=f"{conf},max_non_split_rounding_mb:21") == 60
    # below 40 MiB all is as ever
    assert reserved_mib(38 * MIB, "-0", 20 * MIB, 18 * MIB, conf=conf) == 38
    # 2 MiB are left, and stay with the block
    equal = run(42 * MIB, "-0", 40 * MIB, MIB + 1, conf=conf)
    assert (equal.peak_reserved_bytes, equal.peak_allocated_bytes) == (62 * MIB, 43 * MIB + 512)


def test_unsplittable_blocks_go_back_before_the_rest_of_the_cache():
    conf = "max_split_size_mb:40"
    # one of 60 MiB goes, the free 30 MiB stay cached: no retry is counted
    result = run(60 * MIB, 30 * MIB, "-0", "-1", 90 * MIB, conf=conf, capacity_bytes=120 * MIB)
    assert result.retries == 1  # 60 MiB were not the 90 that are looked for
    result = run(90 * MIB, 30 * MIB, "-0", "-1", 64 * MIB, conf=conf, capacity_bytes=120 * MIB)
    assert (result.retries, result.out_of_memory) == (0, False)


def test_a_fraction_of_the_device_bounds_a_process():
    half = "per_process_memory_fraction:0.5"
    assert not run(1022 * MIB, conf=half, device_bytes=2 * GIB).out_of_memory
    assert not run(GIB, conf=half, device_bytes=2 * GIB).out_of_memory
    assert run(GIB + 1, conf=half, device_bytes=2 * GIB).out_of_memory
    assert not run(GIB + 1, conf=half, device_bytes=2 * GIB + 4 * MIB).out_of_memory


def test_segments_that_were_idle_longest_are_collected_above_the_threshold():
    # at the last one 90 MiB of 200 are reserved
    steps = (20 * MIB, 30 * MIB, "-0", 40 * MIB, "-1", 50 * MIB)
    half = "per_process_memory_fraction:0.5,garbage_collection_threshold"
    assert reserved_mib(*steps, conf=f"{half}:0.9", device_bytes=400 * MIB) == 140
    # 10 or 20 MiB too many: the older 20 suffice; one more MiB takes the other 30 too
    for threshold, reserved in (("0.4", 120), ("0.35", 120), ("0.345", 90)):
        collected = run(*steps, conf=f"{half}:{threshold}", device_bytes=400 * MIB)
        assert (collected.peak_reserved_bytes, collected.retries) == (reserved * MIB, 0)
    assert (
        reserved_mib(*steps, conf="garbage_collection_threshold:0.01", capacity_bytes=400 * MIB)
        == 140
    )


@pytest.mark.parametrize(  # test_allocator_settings in test/test_cuda.py of PyTorch
    ("divisions", "requested_mib", "allocated_mib"),
    [
        ("4", 84, 96),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 84, 88),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 400, 512),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 1500, 1500),
        ("4", 64, 64),
        ("1", 84, 84),
    ],
)
def test_sizes_are_rounded_up_to_a_division_of_a_power_of_two(
    divisions, requested_mib, allocated_mib
):
    conf = f"{PAGED},roundup_power2_divisions:{divisions}"
    assert run(requested_mib * MIB, conf=conf).peak_allocated_bytes == allocated_mib * MIB


@pytest.mark.parametrize(  # allocator_config_test in c10/test/core/AllocatorConfig_test.cpp
    ("interval_mib", "divisions"),
    [(1, 8), (32, 8), (64, 8), (128, 2), (256, 4), (512, 2), (1024, 4), (2048, 1)],
)
def test_divisions_hold_from_their_size_to_the_next(interval_mib, divisions):
    text = (
        "max_split_size_mb:40,"
        " roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],backend:native"
    )
    config = AllocatorConfig.parse(text)
    assert config.roundup_power2_divisions[interval_mib.bit_length() - 1] == divisions
    assert config.max_split_size_bytes == 40 * MIB


def test_no_settings_are_torchs_defaults_and_settings_of_the_host_change_nothing():
    assert AllocatorConfig.parse("") == AllocatorConfig()
    assert AllocatorConfig.parse(
        "pinned_use_background_threads:True,release_lock_on_cudamalloc:True,"
    ) == (AllocatorConfig())


def test_a_large_segment_size_bounds_what_may_be_split():
    config = AllocatorConfig.parse("max_split_size_mb:12,large_segment_size_mb:12")
    assert (config.large_segment_bytes, config.max_split_size_bytes) == (12 * MIB, 12 * MIB)
    assert config.max_non_split_rounding_bytes == 12 * MIB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:19", "from 20 up, found '19'"),
        ("max_split_size_mb:20MB", "found '20MB'"),
        ("max_split_size_mb=40", "expected key:value,key:value"),
        ("large_segment_size_mb:10", "from 11 up"),
        ("max_non_split_rounding_mb:11", "from 20 up"),
        ("expandable_segments:true", "True or False, found 'true'"),
        ("garbage_collection_threshold:1.2", "between 0 and 1, found '1.2'"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("per_process_memory_fraction:much", "between 0 and 1"),
        ("roundup_power2_divisions:3", "powers of two, found '3'"),
        ("roundup_power2_divisions:[63:8]", "powers of two, found '63'"),
        ("roundup_power2_divisions:[64:8", "expected key:value"),
        ("expandable_segment:True", "unknown; nearest: expandable_segments"),
        ("expandable_segments:True,expandable_segments:False", "there twice"),
        ("backend:cudaMallocAsync", "pool of the driver"),
        ("throw_on_cudamalloc_oom:True", "leave it out"),
    ],
)
def test_what_cannot_be_read_or_replayed_is_refused_with_the_reason(text, words):
    with pytest.raises(ConfigError, match=words):
        AllocatorConfig.parse(text)


def churn(events: int, seed: int) -> list[Event]:
    """Sizes around every limit, some of them again and again, freed in any order."""
    draw = random.Random(seed).random
    limits = [MIB, 10 * MIB, 20 * MIB, 40 * MIB]
    common = [int(draw() * 24 * MIB) + 1 for _ in range(12)]
    kinds = [
        lambda: 1 + int(draw() * 4096),
        lambda: limits[int(draw() * 4)] + (int(draw() * 3) - 1) * 512,
        lambda: common[int(draw() * 12)],
        lambda: 1 + int(draw() * 60 * MIB),
    ]
    made: list[Event] = []
    live: list[int] = []
    for index in range(events):
        if live and (len(live) > 40 or draw() < 0.45):
            made.append((live.pop(int(draw() * len(live))), FREED))
        else:
            made.append((index, kinds[int(draw() * 4)]()))
            live.append(index)
    return made


# the compiled allocator of torch 2.11.0+cu130 over a CUDA driver that only counts bytes
@pytest.mark.parametrize(
    ("conf", "capacity_mib", "allocated_bytes", "reserved_mib", "retries", "failed_event"),
    [
        ("", None, 914473472, 1254, 0, None),
        ("", 1166, 914473984, 1144, 1, None),
        ("", 1064, 913586688, 1054, 3, None),
        ("expandable_segments:True", None, 909917184, 988, 0, None),
        ("expandable_segments:True", 918, 835889664, 904, 2, 232),
        ("expandable_segments:True", 838, 738500096, 802, 1, 197),
        ("max_split_size_mb:20", None, 1017620480, 3440, 0, None),
        ("max_split_size_mb:20", 3198, 1017620480, 3180, 0, None),
        ("max_split_size_mb:20", 2924, 1017620480, 2920, 0, None),
        ("max_split_size_mb:30,max_non_split_rounding_mb:25", None, 1029347840, 1540, 0, None),
        ("max_split_size_mb:30,max_non_split_rounding_mb:25", 1432, 1029347840, 1424, 0, None),
        ("max_split_size_mb:30,max_non_split_rounding_mb:25", 1308, 1029347840, 1308, 1, None),
        ("roundup_power2_divisions:4", None, 965880320, 1128, 0, None),
        ("roundup_power2_divisions:4", 1048, 965880320, 1044, 2, None),
        ("roundup_power2_divisions:4", 958, 895500288, 956, 2, 232),
        ("roundup_power2_divisions:[1:8,4:2,16:4,>:1]", None, 927143424, 1308, 0, None),
        ("roundup_power2_divisions:[1:8,4:2,16:4,>:1]", 1216, 927143424, 1186, 1, None),
        ("roundup_power2_divisions:[1:8,4:2,16:4,>:1]", 1110, 927143424, 1080, 2, None),
        ("large_segment_size_mb:12", None, 913495040, 1268, 0, None),
        ("large_segment_size_mb:12", 1178, 913495040, 1148, 1, None),
        ("large_segment_size_mb:12", 1076, 913495040, 1048, 3, None),
        ("expandable_segments:True,large_segment_size_mb:12", None, 909917184, 992, 0, None),
        ("expandable_segments:True,large_segment_size_mb:12", 922, 847968256, 918, 4, 938),
        ("expandable_segments:True,large_segment_size_mb:12", 842, 791742976, 830, 2, 198),
        (
            "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6",
            None,
            914473472,
            1254,
            0,
            None,
        ),
        (
            "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6",
            1166,
            913672704,
            1094,
            0,
            None,
        ),
        (
            "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6",
            1064,
            871775744,
            1030,
            1,
            972,
        ),
    ],
)
def test_a_log_ends_as_in_the_compiled_allocator(
    conf, capacity_mib, allocated_bytes, reserved_mib, retries, failed_event
):
    config = AllocatorConfig.parse(conf)
    capacity_bytes = (capacity_mib or 1 << 22) * MIB
    if config.per_process_memory_fraction < 1:  # the fraction is the limit, not the driver
        capacity_bytes *= 2
    result = replay(churn(3000, seed=1), config, capacity_bytes)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (
        allocated_bytes,
        reserved_mib * MIB,
    )
    assert (result.retries, result.failed_event) == (retries, failed_event)


SETTINGS = [
    "",
    PAGED,
    "max_split_size_mb:20",
    "roundup_power2_divisions:4",
    f"{PAGED},large_segment_size_mb:12",
]
EVENTS = st.builds(churn, st.integers(1, 300), st.integers(0, 10**6))


def chain(block: Block) -> list[Block]:
    """All blocks of its segment, from the lowest."""
    while block.previous is not None:
        block = block.previous
    blocks = [block]
    while blocks[-1].next is not None:
        blocks.append(blocks[-1].next)
    return blocks


def feed(allocator: CachingAllocator, events: list[Event]) -> dict[int, Block]:
    """The blocks that live at the end of the log, or where it fails."""
    live: dict[int, Block] = {}
    for block_id, size_bytes in events:
        if size_bytes == FREED:
            allocator.free(live.pop(block_id))
        elif block := allocator.allocate(size_bytes):
            live[block_id] = block
        else:
            break
    return live


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from(SETTINGS), st.sampled_from([None, 800 * MIB, 400 * MIB]))
def test_segments_are_covered_by_blocks_and_every_byte_is_counted_once(
    events, conf, capacity_bytes
):
    allocator = CachingAllocator(AllocatorConfig.parse(conf), capacity_bytes)
    live = feed(allocator, events)
    wanted_bytes = sum(
        allocator.rounded(size) for block_id, size in events if size != FREED and block_id in live
    )
    assert allocator.allocated_bytes == sum(block.size_bytes for block in live.values())
    assert (
        wanted_bytes
        <= allocator.allocated_bytes
        <= allocator.reserved_bytes
        <= allocator.peak_reserved_bytes
    )
    if conf.startswith(PAGED):
        assert allocator.allocated_bytes == wanted_bytes
    free = [
        block for pool in (*allocator.small, *allocator.large) for block in pool.blocks.values()
    ]
    segments = {id(blocks[0]): blocks for blocks in map(chain, [*live.values(), *free])}
    mapped = [block for blocks in segments.values() for block in blocks if block.mapped]
    assert sum(block.size_bytes for block in mapped) == allocator.reserved_bytes
    assert {id(block) for block in mapped} == {id(block) for block in [*live.values(), *free]}
    for blocks in segments.values():
        for block, following in pairwise(blocks):
            assert block.address + block.size_bytes == following.address  # none overlaps another
            assert block.allocated or following.allocated or block.mapped != following.mapped


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.sampled_from(SETTINGS))
def test_a_log_whose_blocks_all_die_leaves_whole_segments(events, conf):
    allocator = CachingAllocator(AllocatorConfig.parse(conf))
    for block in feed(allocator, events).values():
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    for pool in (*allocator.small, *allocator.large):
        for block in pool.blocks.values():
            assert [part.mapped for part in chain(block)] == (
                [True, False] if conf.startswith(PAGED) else [True]
            )


def test_the_unlimited_peak_is_not_always_enough():
    # on a small device less address space follows a free block, so that best fit chooses otherwise
    events, config = churn(119, seed=62), AllocatorConfig.parse(PAGED)
    peak_bytes = replay(events, config).peak_reserved_bytes
    assert replay(events, config, peak_bytes).failed_event == 104  # as the compiled allocator
    assert not replay(events, config, 300 * MIB).out_of_memory


def test_twice_as_many_events_take_twice_as_long():
    """A scan of the free blocks at each request takes four times as long."""

    def replay_holes(number: int) -> int:
        holes = [(index, 1 + index * 7919 % (64 * 1024)) for index in range(number)]
        holes += [(index, FREED) for index in range(0, number, 2)]
        holes += [(number + index, 1 + index * 104_729 % (64 * 1024)) for index in range(number)]
        return cost.count_lines(lambda: replay(holes))

    assert replay_holes(4000) < 2.5 * replay_holes(2000)
