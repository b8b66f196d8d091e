"""Sizes of pinned blocks, and the setting that makes them exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.predict.memory import allocator_config, pinned_memory
from launch.schema.machine import GIB, MIB
from launch.schema.plan import Strategy
from tests import builders


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (33 << 30, 64 << 30)]
)
def test_blocks_are_powers_of_two_without_the_setting(size: int, taken: int) -> None:
    assert pinned_memory.block_bytes(size, None) == taken


@pytest.mark.parametrize(
    ("size", "taken"), [(15 * MIB, 16 * MIB), (16 * MIB, 16 * MIB), (17 * MIB, 17 * MIB)]
)
def test_larger_blocks_are_exact_with_it(size: int, taken: int) -> None:
    assert pinned_memory.block_bytes(size, 16 * MIB) == taken


def offloading(**fields) -> Strategy:
    chosen = builders.plan(on=builders.machine(1)).strategy
    return replace(chosen, **{"mode": "deepspeed_zero2_offload", "backend": "nccl", **fields})


def test_only_states_that_stay_on_the_host_of_a_card_have_the_setting(monkeypatch) -> None:
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (0, 0))  # a torch from 2.13 on
    asked = offloading()
    assert pinned_memory.setting(asked) == "pinned_max_cached_size_mb:16"
    assert pinned_memory.max_kept_bytes(asked) == 16 * MIB
    # what each step pins and frees is kept: a driver takes milliseconds for it
    on_host = asked.with_levers(activation_offloading=True)
    assert pinned_memory.max_kept_bytes(on_host) == GIB
    for other in (offloading(mode="single_gpu"), offloading(device="cpu")):
        assert pinned_memory.setting(other) == ""
    # an older torch, which cannot be installed beside this one
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (99, 0))
    assert pinned_memory.setting(asked) == ""


def test_the_replay_takes_the_setting_as_one_that_changes_no_bytes_of_a_card() -> None:
    text = f"expandable_segments:True,{pinned_memory.setting(offloading())}"
    config = allocator_config.AllocatorConfig.parse(text)
    assert config == replace(allocator_config.TORCH_DEFAULTS, expandable_segments=True)
