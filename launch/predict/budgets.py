"""The memory that a candidate may take on its device and on the host, beside leases and within the
recipe's limits, and by what it exceeds that."""

import math
from dataclasses import replace

from launch.base.text import size
from launch.predict.facts import Facts
from launch.predict.memory import context as memory_context
from launch.predict.memory import host_memory
from launch.schema.machine import GIB, NOT_LEASED, Leased, Machine
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.recipe import Recipe

# Limit of available host RAM; where it applies, the machine's host_available_reason begins with it
LIMIT = "launch.host_limit_gib"


def budget_bytes(facts: Facts, candidate: Strategy) -> int:
    """The budget of one rank on its device: a share of the smallest card's free memory, at most the
    user's per_process_memory_fraction; or its part of the host's."""
    recipe, machine = facts.recipe, facts.machine
    if candidate.device == "cpu":
        return host_budget_bytes(recipe, machine) // candidate.processes_per_machine
    cards = machine.gpus[: candidate.processes_per_machine]
    budget = int(min(gpu.free_bytes for gpu in cards) * recipe.launch.vram_fraction)
    share = facts.installed.allocator.per_process_memory_fraction
    if share == 1.0:
        return budget
    # torch's fraction limits the allocator alone, on each card
    allowed = int(share * min(gpu.total_bytes for gpu in cards))
    of_context, _ = memory_context.context_bytes(cards[0], facts.installed.import_memory.card)
    return min(budget, allowed + of_context)


def host_budget_bytes(recipe: Recipe, machine: Machine) -> int:
    reserve = int(recipe.launch.host_reserve_gib * GIB)
    # a small container is not all reserve
    if "host_reserve_gib" not in recipe.launch.model_fields_set:
        reserve = min(reserve, machine.host_limit_bytes // 8)
    return max(machine.host_available_bytes - reserve, 0)


def misses(facts: Facts, candidate: Strategy, memory: MemoryEstimate, budget: int) -> str | None:
    """The budget that is exceeded, with numbers; None when it fits."""
    if ruled_out := facts.history.oom.rules_out(
        "device", candidate, memory.device_bytes - memory.margin_bytes, memory
    ):
        return ruled_out
    is_over = memory.device_bytes > budget and candidate.device == "cuda"
    if is_over and not facts.wishes.assume_fits:
        if memory.peak is None:
            return f"model states {size(memory.model_state_bytes)} each, budget {size(budget)}"
        return f"{size(memory.device_bytes)} in {memory.peak.section}, budget {size(budget)}"
    return misses_host(facts, candidate, memory)


def misses_host(facts: Facts, candidate: Strategy, memory: MemoryEstimate) -> str | None:
    """The excess of the machine's RAM, with numbers; None when it fits."""
    budget = host_budget_bytes(facts.recipe, facts.machine)
    predicted = host_bytes(candidate, memory)
    if not memory.host_bytes:  # the ranks' shares of the states, of which mapped ones are shared
        copies = candidate.processes_per_machine - 1
        predicted -= copies * host_memory.mapped_weights_bytes(
            facts.recipe, candidate, facts.model.size, facts.model.stored
        )
    if ruled_out := facts.history.oom.rules_out("host", candidate, predicted, memory):
        return ruled_out
    needed = int(predicted * (1 + facts.history.oom.host))
    if needed <= budget or facts.wishes.assume_fits:
        return None
    phase = f" in {memory.host_phase}" if memory.host_phase else ""
    why = facts.machine.host_available_reason
    if not why.startswith(LIMIT):
        why = f"{size(facts.machine.host_available_bytes)} available less launch.host_reserve_gib"
    return f"{size(needed)} in host RAM{phase}, budget {size(budget)} ({why})"


def host_bytes(candidate: Strategy, memory: MemoryEstimate) -> int:
    """Bytes of a machine's RAM that the job takes; if they are not predicted, those of the states
    that its ranks hold there."""
    if memory.host_bytes:
        return memory.host_bytes
    of_rank = memory.offloaded_bytes + (memory.device_bytes if candidate.device == "cpu" else 0)
    return of_rank * candidate.processes_per_machine


def beside(machine: Machine, leased: Leased) -> Machine:
    """The machine with the memory that others have not leased."""
    gpus = tuple(
        replace(gpu, free_bytes=max(gpu.free_bytes - leased.card_untaken_bytes.get(gpu.key, 0), 0))
        for gpu in machine.gpus
    )
    return replace(
        machine,
        gpus=gpus,
        host_available_bytes=max(machine.host_available_bytes - leased.host_untaken_bytes, 0),
    )


def by_free_memory(machine: Machine) -> Machine:
    """The machine whose cards with the most free memory come first, and of equal memory the newest:
    a plan takes the first cards. Ranks that another launcher has started have their cards."""
    order = sorted(machine.gpus, key=lambda gpu: gpu.architecture, reverse=True)
    return replace(machine, gpus=tuple(sorted(order, key=lambda gpu: -gpu.free_bytes)))


def limited(
    machine: Machine, recipe: Recipe, leased: Leased = NOT_LEASED
) -> tuple[Machine, tuple[str, ...]]:
    """The machine with no more memory than the limits let a plan take, and a line of the plan for
    each limit, which names the value that counts. The limits are of all leases together."""
    lines = []
    if recipe.launch.host_limit_gib is not None:
        machine, line = _limited_host(machine, recipe, recipe.launch.host_limit_gib, leased)
        lines.append(line)
    if recipe.launch.vram_limit_gib is not None and machine.gpus:
        machine, line = _limited_cards(
            machine, recipe.launch.vram_limit_gib, recipe.launch.vram_fraction, leased
        )
        lines.append(line)
    return machine, tuple(lines)


def _limited_host(
    machine: Machine, recipe: Recipe, limit_gib: float, leased: Leased
) -> tuple[Machine, str]:
    budget = host_budget_bytes(recipe, machine)
    limit = max(int(limit_gib * GIB) - leased.host_bytes, 0)
    available = machine.host_available_bytes
    beside = f"{size(available)} available less {size(available - budget)} of reserve"
    name = f"{LIMIT} {limit_gib:g}" + _less(leased.host_bytes)
    if limit >= budget:
        return machine, (
            f"host RAM: at most {size(budget)}, {beside} (launch.host_reserve_gib), which is less"
            f" than {name}"
        )
    limited = replace(
        machine,
        host_available_bytes=available - (budget - limit),  # the reserve stays whole
        host_available_reason=f"{name}, and the reserve beside it",
    )
    return limited, f"host RAM: at most {size(limit)} ({name}), which is less than {beside}"


def _limited_cards(
    machine: Machine, limit_gib: float, fraction: float, leased: Leased
) -> tuple[Machine, str]:
    leased_bytes = [leased.card_bytes.get(gpu.key, 0) for gpu in machine.gpus]
    limits = [max(int(limit_gib * GIB) - of_card, 0) for of_card in leased_bytes]
    gpus = tuple(  # a plan takes `fraction` of what is free
        replace(gpu, free_bytes=min(gpu.free_bytes, math.ceil(limit / fraction)))
        for gpu, limit in zip(machine.gpus, limits, strict=True)
    )
    limited, least_limit = replace(machine, gpus=gpus), min(limits)
    least = int(min(gpu.free_bytes for gpu in machine.gpus) * fraction)
    free = f"{fraction:g} of what is free (launch.vram_fraction)"
    name = f"launch.vram_limit_gib {limit_gib:g}" + _less(max(leased_bytes))
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
