"""Admission of a start beside the leases of others. Pure arithmetic, but for those that read the
leases of now (leased_now, machines_to_wait_for).

What a lease's processes hold already is missing from what the probe calls free, so only the rest of
each lease is subtracted from it."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launch.base.text import size
from launch.predict import budgets
from launch.queue.leases import Lease, Needs, Taken, granted
from launch.schema.machine import GIB, Leased, Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe


@dataclass(frozen=True)
class _Shortage:
    """Memory or disk space that is too little for a start."""

    of: str
    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return (
            f"{size(self.needed_bytes)} of {self.of}, of which"
            f" {size(max(self.available_bytes, 0))} can be had"
        )


@dataclass(frozen=True)
class Supply:
    """Memory and disk space that are free now, and the leases beside which they are shared."""

    machine: Machine
    leases: Sequence[Lease]  # granted
    disks: Mapping[int, int] = field(default_factory=dict)  # free bytes by device number


def needs_of(plan: Plan, machine: Machine, recipe: Recipe, disk: tuple[int, int]) -> Needs:
    """The most that a plan takes. `disk`: device number and bytes of its checkpoints.

    An unpredicted job takes the bytes of its states."""
    estimate, launch, strategy = plan.estimate, recipe.launch, plan.strategy
    on_cards = strategy.device == "cuda"
    of_rank = estimate.offloaded_bytes + (0 if on_cards else estimate.device_bytes)
    limits = (
        None if limit is None else int(limit * GIB)
        for limit in (launch.host_limit_gib, launch.vram_limit_gib)
    )
    return Needs(
        estimate.host_bytes or of_rank * strategy.processes_per_machine,
        machine.host_available_bytes - budgets.host_budget_bytes(recipe, machine),
        strategy.processes_per_machine if on_cards else 0,
        estimate.device_bytes if on_cards else 0,
        launch.vram_fraction,
        disk[1],
        disk[0],
        *limits,
    )


def later_needs(needs: Needs, plan: Plan, taken: Taken) -> Needs:
    """The needs of a run whose second step has been measured: the most of what it took and what is
    predicted of the phases to come, evaluation and saving."""
    device = [each for each in (plan.phases.evaluation, plan.phases.save) if each]
    host = [each for each in (plan.host.evaluation, plan.host.save) if each]
    card_bytes = max(taken.card_bytes, *(each.device_bytes for each in device), 0)
    return replace(
        needs,
        host_bytes=max(taken.host_bytes, *(each.bytes for each in host), 0)
        if plan.estimate.host
        else max(taken.host_bytes, needs.host_bytes),
        card_bytes=(card_bytes if device else max(card_bytes, needs.card_bytes))
        if needs.num_cards
        else 0,
    )


def rest(lease: Lease) -> Taken:
    """The bytes of a lease that its processes may still take."""
    needs, taken = lease.record.needs, lease.record.taken
    return Taken(
        max(needs.host_bytes - taken.host_bytes, 0),
        max(needs.card_bytes - taken.card_bytes, 0),
        max(needs.disk_bytes - taken.disk_bytes, 0),
    )


def total(lease: Lease) -> Taken:
    """All bytes of a lease, taken or not."""
    needs, taken = lease.record.needs, lease.record.taken
    return Taken(
        max(needs.host_bytes, taken.host_bytes),
        max(needs.card_bytes, taken.card_bytes),
        max(needs.disk_bytes, taken.disk_bytes),
    )


def leased(leases: Sequence[Lease]) -> Leased:
    """The memory of these leases, and a line of a plan on them."""
    card_bytes: Counter[str] = Counter()
    card_untaken_bytes: Counter[str] = Counter()
    for lease in leases:
        for key in lease.record.cards:
            card_bytes[key] += total(lease).card_bytes
            card_untaken_bytes[key] += rest(lease).card_bytes
    beside = "; ".join(f"{lease.name} {_sizes(lease)}" for lease in leases)
    note = f"planned beside the leases of {beside} (--launch.wait waits for their end)"
    return Leased(
        sum(total(lease).host_bytes for lease in leases),
        sum(rest(lease).host_bytes for lease in leases),
        card_bytes,
        card_untaken_bytes,
        tuple(lease.number for lease in leases),
        (note,) if leases else (),
    )


def leased_now(say: Callable[[str], None] = lambda line: None) -> Leased:
    """The memory of this machine's granted leases, beside which a start is planned."""
    return leased(granted(say))


def machines_to_wait_for(now: Machine, recipe: Recipe) -> list[Machine]:
    """The machine as it will be when the leases of now have ended, and as it would be without any
    program: a run that waits is planned for the first of them that it fits."""
    return [
        budgets.by_free_memory(budgets.limited(machine, recipe)[0])
        for machine in (alone(now, granted()), empty(now))
    ]


def alone(machine: Machine, leases: Sequence[Lease]) -> Machine:
    """The machine as it will be when these leases have ended."""
    gpus = tuple(
        replace(
            gpu,
            free_bytes=min(
                gpu.free_bytes
                + sum(
                    lease.record.taken.card_bytes
                    for lease in leases
                    if gpu.key in lease.record.cards
                ),
                gpu.total_bytes,
            ),
        )
        for gpu in machine.gpus
    )
    taken_bytes = sum(lease.record.taken.host_bytes for lease in leases)
    available = min(machine.host_available_bytes + taken_bytes, machine.host_limit_bytes)
    return replace(machine, gpus=gpus, host_available_bytes=available)


def empty(machine: Machine) -> Machine:
    """The machine as it would be without any program."""
    gpus = tuple(replace(gpu, free_bytes=gpu.total_bytes) for gpu in machine.gpus)
    return replace(machine, gpus=gpus, host_available_bytes=machine.host_limit_bytes)


def sizes(needs: Needs) -> str:
    """The memory of a start, as text."""
    parts = [f"{size(needs.host_bytes)} of host RAM"]
    if needs.num_cards:
        parts.append(f"{size(needs.card_bytes)} of VRAM on {needs.num_cards} card(s)")
    return " and ".join(parts)


def _sizes(lease: Lease) -> str:
    needs, more = total(lease), rest(lease)
    parts = [f"{size(needs.host_bytes)} of host RAM ({size(more.host_bytes)} not yet taken)"]
    if lease.record.cards:
        parts.append(
            f"{size(needs.card_bytes)} of each of {len(lease.record.cards)} card(s)"
            f" ({size(more.card_bytes)} not yet taken)"
        )
    return ", ".join(parts)


def shortage(needs: Needs, supply: Supply, ended: Collection[int] = ()) -> _Shortage | None:
    """The first memory that is too little for a start; None if all is there. `ended`: numbers of
    leases that are imagined to have ended."""
    live = [lease for lease in supply.leases if lease.number not in ended]
    machine = alone(supply.machine, [lease for lease in supply.leases if lease.number in ended])
    host_bytes = machine.host_available_bytes - sum(rest(lease).host_bytes for lease in live)
    host_bytes -= needs.reserve_bytes
    if needs.host_limit_bytes is not None:
        leased = sum(total(lease).host_bytes for lease in live)
        host_bytes = min(host_bytes, needs.host_limit_bytes - leased)
    if needs.host_bytes > host_bytes:
        return _Shortage("host RAM", needs.host_bytes, host_bytes)
    free = sorted(_cards(needs, machine, live).values(), reverse=True)
    card_bytes = free[needs.num_cards - 1] if 0 < needs.num_cards <= len(free) else 0
    if needs.num_cards and card_bytes < needs.card_bytes:
        return _Shortage(f"VRAM on {needs.num_cards} card(s)", needs.card_bytes, card_bytes)
    if needs.disk_device in supply.disks:
        leased = untaken_disk_bytes(live, needs.disk_device)
        disk_bytes = supply.disks[needs.disk_device] - leased
        if needs.disk_bytes > disk_bytes:
            return _Shortage("disk space", needs.disk_bytes, disk_bytes)
    return None


def untaken_disk_bytes(leases: Sequence[Lease], device: int) -> int:
    """Bytes of a disk that leases may still take."""
    return sum(
        rest(lease).disk_bytes for lease in leases if lease.record.needs.disk_device == device
    )


def chosen_cards(needs: Needs, supply: Supply) -> tuple[str, ...]:
    """The cards with the most memory for a start."""
    free = _cards(needs, supply.machine, supply.leases)
    return tuple(sorted(free, key=lambda key: -free[key])[: needs.num_cards])


def ahead_of(needs: Needs, waiting: Sequence[Lease], supply: Supply) -> Lease | None:
    """The first of the runs that wait before a start that it may not pass; None: it may pass all.

    It passes a run that it fits beside, on each card and in host RAM, and only until the turn of
    that run would have come without those that have passed it. A run that the machine is too small
    for holds nobody up."""
    # The machine when the leases of now have ended; then when other programs have ended, too
    machines = (alone(supply.machine, supply.leases), empty(supply.machine))
    for other in waiting:
        of_other = other.record.needs
        later = next((on for on in machines if not shortage(of_other, Supply(on, ()))), None)
        if later is None:
            continue
        cards = chosen_cards(of_other, Supply(later, ()))
        granted = replace(other, record=replace(other.record, cards=cards))
        passing = {lease.number for lease in supply.leases if lease.turn > other.turn}
        is_its_turn = shortage(of_other, supply, passing) is None
        if is_its_turn or shortage(needs, Supply(later, [granted])):
            return other
    return None


def _cards(needs: Needs, machine: Machine, live: Sequence[Lease]) -> dict[str, int]:
    """Bytes of each card that a start may have, within its share and its limit."""
    free = {}
    for gpu in machine.gpus:
        holders = [lease for lease in live if gpu.key in lease.record.cards]
        card_bytes = min(gpu.free_bytes, gpu.total_bytes)
        card_bytes -= sum(rest(lease).card_bytes for lease in holders)
        card_bytes = math.floor(card_bytes * needs.vram_fraction)
        if needs.card_limit_bytes is not None:
            leased = sum(total(lease).card_bytes for lease in holders)
            card_bytes = min(card_bytes, needs.card_limit_bytes - leased)
        free[gpu.key] = card_bytes
    return free
