"""The memory that a candidate may take on its device and on the host, and by what it exceeds
that."""

from __future__ import annotations

from launch.base.text import size
from launch.predict.facts import PlanContext
from launch.predict.memory import context as memory_context
from launch.predict.memory import host_memory
from launch.schema.machine import GIB, Machine
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.recipe import Recipe

# of what is available; where it counts, the machine's host_available_reason begins with it
LIMIT = "launch.host_limit_gib"


def budget_bytes(context: PlanContext, candidate: Strategy) -> int:
    """The budget of one rank on its device: a share of the smallest card's free memory, at most the
    user's per_process_memory_fraction; or its part of the host's."""
    recipe, machine = context.recipe, context.machine
    if candidate.device == "cpu":
        return host_budget_bytes(recipe, machine) // candidate.processes_per_machine
    cards = machine.gpus[: candidate.processes_per_machine]
    budget = int(min(gpu.free_bytes for gpu in cards) * recipe.launch.vram_fraction)
    share = context.allocator.per_process_memory_fraction
    if share == 1.0:
        return budget
    # of the allocator alone, on each card
    allowed = int(share * min(gpu.total_bytes for gpu in cards))
    of_context, _ = memory_context.context_bytes(cards[0], context.import_memory.card)
    return min(budget, allowed + of_context)


def host_budget_bytes(recipe: Recipe, machine: Machine) -> int:
    reserve = int(recipe.launch.host_reserve_gib * GIB)
    # a small container is not all reserve
    if "host_reserve_gib" not in recipe.launch.model_fields_set:
        reserve = min(reserve, machine.host_limit_bytes // 8)
    return max(machine.host_available_bytes - reserve, 0)


def misses(
    context: PlanContext, candidate: Strategy, memory: MemoryEstimate, budget: int
) -> str | None:
    """The budget that is exceeded, with numbers; None when it fits."""
    if ruled_out := context.oom_history.rules_out(
        "device", candidate, memory.device_bytes - memory.margin_bytes, memory
    ):
        return ruled_out
    is_over = memory.device_bytes > budget and candidate.device == "cuda"
    if is_over and not context.assume_fits:
        if memory.peak is None:
            return f"model states {size(memory.model_state_bytes)} each, budget {size(budget)}"
        return f"{size(memory.device_bytes)} in {memory.peak.section}, budget {size(budget)}"
    return misses_host(context, candidate, memory)


def misses_host(context: PlanContext, candidate: Strategy, memory: MemoryEstimate) -> str | None:
    """The excess of the machine's RAM, with numbers; None when it fits."""
    budget = host_budget_bytes(context.recipe, context.machine)
    predicted = host_bytes(candidate, memory)
    if not memory.host_bytes:  # the ranks' shares of the states, of which mapped ones are shared
        copies = candidate.processes_per_machine - 1
        predicted -= copies * host_memory.mapped_weights_bytes(
            context.recipe, candidate, context.model, context.stored
        )
    if ruled_out := context.oom_history.rules_out("host", candidate, predicted, memory):
        return ruled_out
    needed = int(predicted * (1 + context.oom_history.host))
    if needed <= budget or context.assume_fits:
        return None
    phase = f" in {memory.host_phase}" if memory.host_phase else ""
    why = context.machine.host_available_reason
    if not why.startswith(LIMIT):
        available = size(context.machine.host_available_bytes)
        why = f"{available} available less launch.host_reserve_gib"
    return f"{size(needed)} in host RAM{phase}, budget {size(budget)} ({why})"


def host_bytes(candidate: Strategy, memory: MemoryEstimate) -> int:
    """Bytes of a machine's RAM that the job takes; if they are not predicted, those of the states
    that its ranks hold there."""
    if memory.host_bytes:
        return memory.host_bytes
    of_rank = memory.offloaded_bytes + (memory.device_bytes if candidate.device == "cpu" else 0)
    return of_rank * candidate.processes_per_machine
