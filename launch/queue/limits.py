"""Limits that a recipe sets to the memory of its plans: launch.host_limit_gib and
launch.vram_limit_gib."""

from __future__ import annotations

import math
from dataclasses import replace

from launch.base.text import size
from launch.predict.budgets import host_budget_bytes
from launch.schema.machine import GIB, Machine
from launch.schema.recipe import Recipe


def limited(machine: Machine, recipe: Recipe) -> tuple[Machine, tuple[str, ...]]:
    """The machine with no more memory than the limits let a plan take, and a line of the plan for
    each limit, which names the value that counts."""
    lines = []
    if recipe.launch.host_limit_gib is not None:
        machine, line = _limited_host(machine, recipe, recipe.launch.host_limit_gib)
        lines.append(line)
    if recipe.launch.vram_limit_gib is not None and machine.gpus:
        machine, line = _limited_cards(
            machine, recipe.launch.vram_limit_gib, recipe.launch.vram_fraction
        )
        lines.append(line)
    return machine, tuple(lines)


def _limited_host(machine: Machine, recipe: Recipe, limit_gib: float) -> tuple[Machine, str]:
    budget, limit = host_budget_bytes(recipe, machine), int(limit_gib * GIB)
    available = machine.host_available_bytes
    beside = f"{size(available)} available less {size(available - budget)} of reserve"
    if limit >= budget:
        return machine, (
            f"host RAM: at most {size(budget)}, {beside} (launch.host_reserve_gib), which is less"
            f" than launch.host_limit_gib {limit_gib:g}"
        )
    limited = replace(
        machine,
        host_available_bytes=available - (budget - limit),  # what is reserved stays reserved
        host_available_reason=f"launch.host_limit_gib = {limit_gib:g}, and the reserve beside it",
    )
    return limited, (
        f"host RAM: at most {size(limit)} (launch.host_limit_gib), which is less than {beside}"
    )


def _limited_cards(machine: Machine, limit_gib: float, fraction: float) -> tuple[Machine, str]:
    limit = int(limit_gib * GIB)
    most_free = math.ceil(limit / fraction)  # of which a plan takes `fraction`
    gpus = tuple(replace(gpu, free_bytes=min(gpu.free_bytes, most_free)) for gpu in machine.gpus)
    least = int(min(gpu.free_bytes for gpu in machine.gpus) * fraction)
    free = f"{fraction:g} of what is free (launch.vram_fraction)"
    if gpus == machine.gpus:
        return machine, (
            f"VRAM: at most {free}, which is less than launch.vram_limit_gib {limit_gib:g}"
        )
    if least < limit:
        return replace(machine, gpus=gpus), (
            f"VRAM: at most {size(limit)} per card (launch.vram_limit_gib), or {free} where that is"
            f" less, as {size(least)} of the fullest card"
        )
    return replace(machine, gpus=gpus), (
        f"VRAM: at most {size(limit)} per card (launch.vram_limit_gib), which is less than {free}"
    )
