"""Leases of a start: taken before its ranks, and changed with what they turn out to need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from launch.base.errors import DoesNotFit
from launch.queue import admission, leases
from launch.queue.admission import Supply
from launch.queue.leases import Lease, OwnLease, Record

GetSupply = Callable[[Sequence[Lease]], Supply]  # of now, beside these leases


def split(live: Sequence[Lease]) -> tuple[list[Lease], list[Lease]]:
    """The leases that are granted, and the runs that wait, in their order."""
    granted = [lease for lease in live if lease.record.state == "granted"]
    waiting = [lease for lease in live if lease.record.state == "waiting"]
    return granted, sorted(waiting, key=_place)


def _place(lease: Lease) -> tuple[int, int]:
    return -lease.record.priority, lease.number


def take(
    place: Path,
    record: Record,
    get_supply: GetSupply,
    planned_beside: Collection[int],
    assume_fits: bool,
) -> OwnLease | str:
    """Take a lease, or say why it cannot be had beside leases that were taken after the plan was
    made, whose numbers are not in `planned_beside`.

    Raises DoesNotFit if the start would delay a run that waits."""
    with leases.admission(place) as begin:
        granted, waiting = split(leases.live(place))
        newer = [lease for lease in granted if lease.number not in planned_beside]
        if (newer or waiting) and not assume_fits:
            supply = get_supply(granted)
            if newer and (shortage := admission.shortage(record.needs, supply)):
                names = ", ".join(lease.name for lease in newer)
                return f"the plan needs {shortage}; leased meanwhile by {names}"
            ahead = [lease for lease in waiting if lease.record.priority >= record.priority]
            if lease := admission.delayed(record.needs, ahead, supply):
                raise DoesNotFit(
                    f"this start would delay {lease.name}, which waits for"
                    f" {admission.sizes(lease.record.needs)}; wait behind it with --launch.wait"
                )
        return begin(record)
