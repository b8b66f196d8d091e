"""Starts beside leases: which wait, which are refused, and when a wait ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from launch.queue import admission, leases, starts
from launch.queue.leases import Lease, Needs, OwnLease, Record
from launch.schema.machine import GIB
from tests.builders import machine
from tests.process.queue.holders import held_unseen

pytestmark = pytest.mark.unit


def test_leases_are_granted_or_wait_in_their_order_or_are_blocked():
    granted, blocked, second, first = (
        Lease(number, 0, 100, Record("boot", state, Needs(1), place=place))
        for number, state, place in [
            *((1, "granted", 0), (2, "blocked", 0), (3, "waiting", 0), (4, "waiting", 1)),
        ]
    )
    assert starts.split([granted, blocked, second, first]) == ([granted], [first, second])


def test_a_start_fits_beside_a_lease_that_its_plan_does_not_know(tmp_path):
    record = leases.boot_record(state="granted", needs=Needs(4 * GIB))
    with held_unseen(tmp_path, 1, record):
        own = starts.take(tmp_path, record, beside, (), assume_fits=False)
        assert isinstance(own, OwnLease) and own.number == 2
        own.release()
        large = replace(record, needs=Needs(64 * GIB))
        reason = starts.take(tmp_path, large, beside, (), assume_fits=False)
    assert isinstance(reason, str)
    assert reason.startswith("the plan needs 64.00 GiB of host RAM")
    assert "; leased meanwhile by run 1 of " in reason


def test_a_wait_ends_with_the_first_look_that_finds_no_obstacle(tmp_path):
    looks = iter([""])
    record = leases.boot_record(state="granted", needs=Needs(1))
    own, is_granted = starts.wait(tmp_path, record, beside, lambda _: next(looks), print)
    assert is_granted and own.record.state == "granted"
    own.release()


def beside(granted: Sequence[Lease]) -> admission.Supply:
    return admission.Supply(machine(), granted)
