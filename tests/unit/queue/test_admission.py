"""Arithmetic of admission: what is free beside leases, and which runs may pass others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.predict import budgets
from launch.queue import admission
from launch.queue.admission import Supply
from launch.queue.leases import Lease, Needs, Record, Taken
from launch.schema.machine import GIB
from launch.schema.phases import DeviceMemory, DevicePhases, HostMemory, HostPhases
from launch.schema.plan import MemoryEstimate
from tests.builders import gpu, machine, plan, recipe_of

pytestmark = pytest.mark.unit


def lease(number: int, host: float, taken: float = 0, **fields: Any) -> Lease:
    """A lease of so many GiB of host RAM, of which `taken` are in use."""
    needs = Needs(int(host * GIB), **fields.pop("needs", {}))
    record = Record("boot", fields.pop("state", "granted"), needs, **fields)
    return Lease(number, 0, 100 + number, replace(record, taken=Taken(int(taken * GIB))))


def on_card(number: int, card: str, needed: float, taken: float = 0) -> Lease:
    needs = Needs(0, num_cards=1, card_bytes=int(needed * GIB))
    record = Record("boot", "granted", needs, Taken(0, int(taken * GIB)), cards=(card,))
    return Lease(number, 0, 100 + number, record)


def needs(host: float, **fields: Any) -> Needs:
    return Needs(int(host * GIB), **fields)


def supply(*leases: Lease, free: float, total: float = 10, **fields: Any) -> Supply:
    on = machine(host_available_bytes=int(free * GIB), host_limit_bytes=int(total * GIB), **fields)
    return Supply(on, leases)


def test_only_what_a_lease_has_not_taken_is_missing_from_free_memory():
    """Its processes' 3 GiB are already missing from the 12 that the probe shows."""
    on = budgets.beside(
        machine(), admission.leased([lease(1, host=5, taken=3), lease(2, host=1, taken=2)])
    )
    assert on.host_available_bytes == (12 - 2 - 0) * GIB


def test_a_lease_of_one_card_leaves_the_others_alone():
    cards = (gpu(0, uuid="A"), gpu(1, uuid="B"))
    on = budgets.beside(
        machine(cards=cards), admission.leased([on_card(1, "B", needed=10, taken=4)])
    )
    assert [each.free_bytes // GIB for each in on.gpus] == [19, 13]
    gone = admission.alone(machine(cards=cards), [on_card(1, "B", needed=10, taken=1)])
    assert [each.free_bytes // GIB for each in gone.gpus] == [19, 20]  # all of the card


def test_limits_are_of_all_leases_together():
    recipe = recipe_of(launch={"host_limit_gib": 6})
    on, (line,) = budgets.limited(machine(), recipe, admission.leased([lease(1, host=4, taken=4)]))
    assert budgets.host_budget_bytes(recipe, on) == 2 * GIB
    assert "launch.host_limit_gib 6 less 4.00 GiB of leases" in line
    recipe = recipe_of(launch={"vram_limit_gib": 6})
    cards = (gpu(0, uuid="A"), gpu(1, uuid="B"))
    on, _ = budgets.limited(
        machine(cards=cards), recipe, admission.leased([on_card(1, "B", needed=4)])
    )
    assert [round(each.free_bytes * 0.95 / GIB, 6) for each in on.gpus] == [6, 2]


@pytest.mark.parametrize(
    ("asked", "leases", "refused"),
    [
        (needs(4), [], None),
        (needs(4, reserve_bytes=7 * GIB), [], "host RAM"),
        (needs(4), [lease(1, host=6)], None),
        (needs(4), [lease(1, host=7)], "host RAM"),
        (needs(4), [lease(1, host=7, taken=2)], None),
        (needs(6), [lease(1, host=7, taken=2)], "host RAM"),
        (needs(4, host_limit_bytes=7 * GIB), [lease(1, host=4, taken=4)], "host RAM"),
        (needs(0, num_cards=2, card_bytes=18 * GIB), [], None),
        (needs(0, num_cards=2, card_bytes=20 * GIB), [], "VRAM on 2 card(s)"),
        (needs(0, num_cards=3, card_bytes=1), [], "VRAM on 3 card(s)"),
        (needs(0, num_cards=1, card_bytes=18 * GIB), [on_card(1, "A", 19)], None),
        (needs(0, num_cards=2, card_bytes=18 * GIB), [on_card(1, "A", 19)], "VRAM on 2 card(s)"),
        (
            needs(0, num_cards=2, card_bytes=15 * GIB),
            [on_card(1, "A", 10, taken=4)],
            "VRAM on 2 card(s)",
        ),
        (needs(0, num_cards=1, card_bytes=GIB, card_limit_bytes=GIB), [on_card(1, "A", 1)], None),
        (
            needs(0, num_cards=2, card_bytes=GIB, card_limit_bytes=GIB),
            [on_card(1, "A", 1)],
            "VRAM on 2 card(s)",
        ),
        (needs(0, disk_bytes=8 * GIB, disk_device=1), [], None),
        (needs(0, disk_bytes=9 * GIB, disk_device=1), [], "disk space"),
        (
            needs(0, disk_bytes=8 * GIB, disk_device=1),
            [lease(1, host=0, needs={"disk_bytes": GIB, "disk_device": 1})],
            "disk space",
        ),
        (
            needs(0, disk_bytes=8 * GIB, disk_device=1),
            [lease(1, host=0, needs={"disk_bytes": GIB, "disk_device": 2})],
            None,
        ),
        # a lease without checkpoints takes nothing of a disk, and one that has saved none all of it
        (
            needs(0, disk_bytes=8 * GIB, disk_device=1),
            [lease(1, host=0, needs={"disk_device": 1})],
            None,
        ),
        (
            needs(0, disk_bytes=7 * GIB + 1, disk_device=1),
            [lease(1, host=0, needs={"disk_bytes": GIB, "disk_device": 1})],
            "disk space",
        ),
    ],
)
def test_a_start_fits_if_each_memory_has_its_bytes_beside_all_leases(asked, leases, refused):
    cards = (gpu(0, uuid="A"), gpu(1, uuid="B"))
    on = machine(cards=cards, host_available_bytes=10 * GIB)
    shortage = admission.shortage(asked, Supply(on, leases, {1: 8 * GIB}))
    assert (shortage and shortage.of) == refused


@pytest.mark.parametrize(
    ("asked", "leases", "refused"),
    [
        (needs(10), [lease(1, host=5, taken=5)], None),
        (needs(11), [lease(1, host=5, taken=5)], "host RAM"),
        (needs(10), [lease(1, host=5, taken=5), lease(2, host=1)], "host RAM"),
        (needs(0, num_cards=1, card_bytes=20 * GIB), [on_card(1, "A", 5, taken=5)], None),
        (needs(0, num_cards=1, card_bytes=21 * GIB), [on_card(1, "A", 5, taken=5)], "VRAM"),
    ],
)
def test_a_lease_that_has_ended_leaves_no_more_than_the_machine_has(asked, leases, refused):
    asked = replace(asked, vram_fraction=1.0)
    on = supply(*leases, free=8, cards=(gpu(0, uuid="A"),))
    shortage = admission.shortage(asked, on, {1})
    assert (shortage and shortage.of.split(" on ")[0]) == refused


def test_the_cards_with_the_most_memory_are_chosen():
    cards = tuple(
        gpu(index, uuid=name, free_bytes=free * GIB)
        for index, (name, free) in enumerate((("A", 9), ("B", 19), ("C", 15)))
    )
    of_two = Supply(machine(cards=cards), [on_card(1, "B", needed=12)])
    assert admission.chosen_cards(needs(0, num_cards=2, card_bytes=GIB), of_two) == ("C", "A")


@pytest.mark.parametrize(
    ("leases", "free", "waiting", "asked", "first"),
    [
        # 10 GiB, 6 of them run 1's. Run 2 waits for 8, and 2 fit beside it
        ([lease(1, 6, 6)], 4, [lease(2, 8)], 2, None),
        ([lease(1, 6, 6)], 4, [lease(2, 8)], 3, 2),
        ([lease(0, 3, 3), lease(1, 3, 3)], 4, [lease(2, 5)], 4, None),
        # run 3 has passed run 2, whose turn would have come without it
        ([lease(1, 3, 3), lease(3, 3, 3)], 4, [lease(2, 5)], 1, 2),
        ([lease(1, 3, 3), lease(3, 3, 3)], 4, [lease(2, 8)], 1, None),
        # it is the turn of run 4
        ([lease(1, 6, 6)], 4, [lease(2, 8), lease(4, 2)], 2, 4),
        # 6 GiB are of a program without a lease, which may end too
        ([], 4, [lease(2, 8)], 2, None),
        ([], 4, [lease(2, 8)], 3, 2),
        # it can never start: nothing waits for it
        ([], 10, [lease(2, 11)], 9, None),
        ([], 10, [], 10, None),
        # one that is before others by its priority has not passed them
        ([lease(3, 3, 3, priority=1)], 4, [lease(2, 5)], 1, None),
    ],
)
def test_a_run_passes_those_that_it_fits_beside_until_their_turn(
    leases, free, waiting, asked, first
):
    other = admission.ahead_of(needs(asked), waiting, supply(*leases, free=free))
    assert (other and other.number) == first


def test_a_run_passes_one_that_waits_for_other_cards():
    cards = (gpu(0, uuid="A"), gpu(1, uuid="B"))
    both = Needs(0, num_cards=2, card_bytes=15 * GIB)
    waiting = replace(lease(2, 0), record=Record("boot", "waiting", both))
    now = Supply(machine(cards=cards), [on_card(1, "A", needed=15)])
    asked = needs(1, num_cards=1, card_bytes=3 * GIB)
    assert admission.ahead_of(asked, [waiting], now) is None
    asked = replace(asked, card_bytes=5 * GIB)
    assert admission.ahead_of(asked, [waiting], now) is waiting


sizes = st.integers(1, 10)


@given(st.lists(st.tuples(sizes, st.booleans()), max_size=30), sizes)
def test_no_run_starves_while_smaller_ones_come_for_ever(arrivals, asked):
    """Run 2 waits for run 1, which ends at the 20th arrival. Others hold their memory for ever, or
    for the time of one arrival."""
    first = [lease(1, 6, 6)]
    waiting, granted = lease(2, asked, state="waiting"), list[Lease]()
    for number, (size, stays) in enumerate(arrivals, 3):
        live = [*(first if number < 20 else []), *granted]
        free = 10 - sum(each.record.needs.host_bytes for each in live) // GIB
        now = supply(*live, free=free)
        if admission.shortage(waiting.record.needs, now) is None:
            return  # it starts
        own = needs(size)
        passes = not admission.shortage(own, now) and not admission.ahead_of(own, [waiting], now)
        without_passers = 10 - 6 * (number < 20)
        assert not (passes and without_passers >= asked)
        if passes and stays:
            granted.append(lease(number, size, size))


def test_a_plan_needs_its_prediction_within_its_own_share_and_limits():
    recipe = recipe_of(launch={"vram_limit_gib": 6, "vram_fraction": 0.9})
    on, _ = budgets.limited(machine(2), recipe)
    chosen = plan(recipe, on)
    asked = admission.needs_of(chosen, on, recipe, (7, 42))
    assert asked.num_cards == chosen.strategy.num_processes
    assert asked.card_bytes == chosen.estimate.device_bytes
    assert (asked.vram_fraction, asked.card_limit_bytes) == (0.9, 6 * GIB)
    assert (asked.disk_device, asked.disk_bytes) == (7, 42)
    assert asked.reserve_bytes == 2 * GIB
    # what a plan fits into, its lease fits into
    assert admission.shortage(asked, Supply(machine(2), [])) is None


@pytest.mark.parametrize(("cards", "of_rank"), [(2, 7), (0, 7 + 1 + 2 + 3)])
def test_a_plan_without_a_prediction_of_the_host_needs_the_states_of_its_ranks_there(
    cards, of_rank
):
    recipe, on = recipe_of(launch={"num_processes": 2}), machine(cards)
    chosen = replace(plan(recipe, on), estimate=MemoryEstimate(1, 2, 3, offloaded_bytes=7))
    assert admission.needs_of(chosen, on, recipe, (0, 0)).host_bytes == 2 * of_rank


def test_after_the_second_step_a_lease_is_what_was_measured_or_what_later_phases_need():
    device = DevicePhases(
        step=DeviceMemory(9, 9, 9), evaluation=DeviceMemory(3, 4, 5), save=DeviceMemory(1, 2, 3)
    )
    host = HostPhases(load=HostMemory(90, {}), evaluation=HostMemory(30, {}))
    predicted = plan(recipe_of(), machine(1))
    predicted = replace(
        predicted,
        phases=device,
        host=host,
        estimate=replace(predicted.estimate, host={"imports": 90}),
    )
    asked = Needs(90, num_cards=1, card_bytes=9)
    later = admission.later_needs(asked, predicted, Taken(20, 4))
    assert (later.host_bytes, later.card_bytes) == (30, 5)
    later = admission.later_needs(asked, predicted, Taken(40, 6))
    assert (later.host_bytes, later.card_bytes) == (40, 6)
    # without predicted phases all of the lease stays
    unknown = replace(predicted, phases=DevicePhases(), host=HostPhases())
    unknown = replace(unknown, estimate=replace(unknown.estimate, host={}))
    assert admission.later_needs(asked, unknown, Taken(20, 4)) == asked
