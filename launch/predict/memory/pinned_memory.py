"""Page-locked host memory as torch's cache of it takes it from the driver: sizes, and the setting
that decides them. Pure."""

from launch.probe import packages
from launch.probe.torch_build import numbers
from launch.schema.machine import GIB, MIB
from launch.schema.plan import Strategy

WITH_EXACT_SIZES = (2, 13)  # first version of torch that has KEY
# Larger blocks get the bytes that they ask for, and go back to the driver when they are freed:
# slices of states and gradients, which stay. Batches, and activations of every step, are kept.
# pinned_max_round_threshold_mb alone would keep blocks of many sizes, of which torch 2.13 hands out
# one that is too small (pytorch/pytorch pull 192722).
KEY = "pinned_max_cached_size_mb"
_MAX_KEPT_BYTES, _MAX_KEPT_WITH_ACTIVATIONS_BYTES = 16 * MIB, GIB


def max_kept_bytes(strategy: Strategy) -> int | None:
    """The largest block that is rounded up to a power of two and kept; None: every block is."""
    is_offloaded = strategy.launch_mode.offloads and strategy.pin_memory
    if (
        strategy.device == "cpu"
        or not is_offloaded
        or numbers(packages.version("torch"))[:2] < WITH_EXACT_SIZES
    ):
        return None
    return (
        _MAX_KEPT_WITH_ACTIVATIONS_BYTES
        if strategy.levers.activation_offloading
        else _MAX_KEPT_BYTES
    )


def setting(strategy: Strategy) -> str:
    """Settings that a plan adds to the allocator's; "" for none."""
    max_bytes = max_kept_bytes(strategy)
    return f"{KEY}:{max_bytes // MIB}" if max_bytes else ""


def block_bytes(size: int, max_kept: int | None) -> int:
    """Bytes that torch takes for a block. Source: torch 2.13 CachingHostAllocator.h; the driver
    without a card was asked for them."""
    if not size or (max_kept is not None and size > max_kept):
        return size
    return 1 << (size - 1).bit_length()
