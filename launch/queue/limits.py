"""Limits that a recipe sets to the memory of its plans: launch.host_limit_gib and
launch.vram_limit_gib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from launch.base.text import size
from launch.predict.budgets import LIMIT, host_budget_bytes
from launch.queue.admission import card_key, total
from launch.queue.leases import Lease
from launch.schema.machine import GIB, Machine
from launch.schema.recipe import Recipe


def limited(
    machine: Machine, recipe: Recipe, leases: Sequence[Lease] = ()
) -> tuple[Machine, tuple[str, ...]]:
    """The machine with no more memory than the limits let a plan take, and a line of the plan for
    each limit, which names the value that counts. The limits are of all leases together."""
    lines = []
    if recipe.launch.host_limit_gib is not None:
        machine, line = _limited_host(machine, recipe, recipe.launch.host_limit_gib, leases)
        lines.append(line)
    if recipe.launch.vram_limit_gib is not None and machine.gpus:
        machine, line = _limited_cards(
            machine, recipe.launch.vram_limit_gib, recipe.launch.vram_fraction, leases
        )
        lines.append(line)
    return machine, tuple(lines)


def _limited_host(
    machine: Machine, recipe: Recipe, limit_gib: float, leases: Sequence[Lease]
) -> tuple[Machine, str]:
    leased = sum(total(lease).host_bytes for lease in leases)
    budget, limit = host_budget_bytes(recipe, machine), max(int(limit_gib * GIB) - leased, 0)
    available = machine.host_available_bytes
    beside = f"{size(available)} available less {size(available - budget)} of reserve"
    name = f"{LIMIT} {limit_gib:g}" + _less(leased)
    if limit >= budget:
        return machine, (
            f"host RAM: at most {size(budget)}, {beside} (launch.host_reserve_gib), which is less"
            f" than {name}"
        )
    limited = replace(
        machine,
        host_available_bytes=available - (budget - limit),  # what is reserved stays reserved
        host_available_reason=f"{name}, and the reserve beside it",
    )
    return limited, f"host RAM: at most {size(limit)} ({name}), which is less than {beside}"


def _limited_cards(
    machine: Machine, limit_gib: float, fraction: float, leases: Sequence[Lease]
) -> tuple[Machine, str]:
    gpus, least_limit, most_leased = [], int(limit_gib * GIB), 0
    for gpu in machine.gpus:
        holders = (lease for lease in leases if card_key(gpu) in lease.record.cards)
        leased = sum(total(lease).card_bytes for lease in holders)
        limit = max(int(limit_gib * GIB) - leased, 0)
        most_free = math.ceil(limit / fraction)  # of which a plan takes `fraction`
        gpus.append(replace(gpu, free_bytes=min(gpu.free_bytes, most_free)))
        least_limit, most_leased = min(least_limit, limit), max(most_leased, leased)
    limited = replace(machine, gpus=tuple(gpus))
    least = int(min(gpu.free_bytes for gpu in machine.gpus) * fraction)
    free = f"{fraction:g} of what is free (launch.vram_fraction)"
    name = f"launch.vram_limit_gib {limit_gib:g}" + _less(most_leased)
    if limited == machine:
        return machine, f"VRAM: at most {free}, which is less than {name}"
    if least < least_limit:
        return limited, (
            f"VRAM: at most {size(least_limit)} per card ({name}), or {free} where that is less,"
            f" as {size(least)} of the fullest card"
        )
    return limited, (
        f"VRAM: at most {size(least_limit)} per card ({name}), which is less than {free}"
    )


def _less(leased_bytes: int) -> str:
    return f" less {size(leased_bytes)} of leases" if leased_bytes else ""
