"""Leases of a start: taken before its ranks, at once or after a wait."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.base.errors import DoesNotFit, ResourceError
from launch.queue import admission, leases
from launch.queue.leases import Lease, Needs, OwnLease, Record

# leases -> the memory of now beside them
_GetSupply = Callable[[Sequence[Lease]], admission.Supply]
HELD = "python -m launch queue release {}: its user holds it"
MUTEX_S = 5.0  # wait for the decision of another start, before the run says what it waits for
POLL_S = 1.0  # pause between two looks at the memory and the leases
_PLAN_AGAIN_S = 30.0  # pause between two plans for what is free, where no lease is waited for


def split(live: Sequence[Lease]) -> tuple[list[Lease], list[Lease]]:
    """The leases that are granted, and the runs that wait, in their order."""
    granted = [lease for lease in live if lease.record.state == "granted"]
    waiting = [lease for lease in live if lease.record.state == "waiting"]
    return granted, sorted(waiting, key=lambda lease: lease.turn)


def take(
    place: Path,
    record: Record,
    get_supply: _GetSupply,
    planned_beside: Collection[int],
    assume_fits: bool,
    own_lease: OwnLease | None = None,
) -> OwnLease | str:
    """Take a lease, or change the start's own; or say why it cannot be had beside leases that were
    taken after the plan was made, whose numbers are not in `planned_beside`.

    Raises DoesNotFit if a run that waits is before the start."""
    with leases.admission(place) as begin:
        granted, waiting = split(leases.live(place))
        newer = [lease for lease in granted if lease.number not in planned_beside]
        if (newer or waiting) and not assume_fits:
            supply = get_supply(granted)
            if newer and (shortage := admission.shortage(record.needs, supply)):
                names = ", ".join(lease.name for lease in newer)
                return f"the plan needs {shortage}; leased meanwhile by {names}"
            ahead = [lease for lease in waiting if lease.record.priority >= record.priority]
            if own_lease is None and (lease := admission.ahead_of(record.needs, ahead, supply)):
                raise DoesNotFit(
                    f"{lease.name} is before this start, and waits for"
                    f" {admission.sizes(lease.record.needs)}; wait behind it with --launch.wait"
                )
        if own_lease is None:
            return begin(record)
        own_lease.write(
            state=record.state, needs=record.needs, taken=record.taken, cards=record.cards
        )
        return own_lease


@dataclass(frozen=True)
class _Obstacle:
    """The reason why a run that waits does not start now."""

    text: str
    what: str  # the same without figures that change at each look
    is_own: bool = False  # it waits for a time or for another run, and so holds nobody up
    is_memory: bool = False  # other programs have the memory, no lease does


def obstacle(
    lease: OwnLease, live: Sequence[Lease], get_supply: _GetSupply, blocked: str
) -> _Obstacle | None:
    """The obstacle to a run that waits; None: it may start."""
    if blocked:
        return _Obstacle(blocked, blocked, is_own=True)
    granted, waiting = split(live)
    needs, turn = lease.record.needs, leases.turn(lease.record, lease.number)
    ahead = [other for other in waiting if other.turn < turn]
    supply = get_supply(granted)
    behind = f"; behind {', '.join(other.name for other in ahead)}" if ahead else ""
    if shortage := admission.shortage(needs, supply):
        holders = ", ".join(other.name for other in granted)
        beside = f"; leased: {holders}" if holders else "; other programs hold the rest"
        return _Obstacle(
            f"{shortage}{beside}{behind}",
            f"{shortage.of}{beside}{behind}",
            is_memory=not granted and not ahead,
        )
    if other := admission.ahead_of(needs, ahead, supply):
        text = f"{other.name} is before it, and waits for {admission.sizes(other.record.needs)}"
        return _Obstacle(text, text)
    return None


def wait(
    place: Path,
    record: Record,
    get_supply: _GetSupply,
    blocked: Callable[[OwnLease], str],
    say: Callable[[str], None],
    own_lease: OwnLease | None = None,
    longest_s: float = math.inf,
    waited_before_s: float = 0.0,
    plan_again_s: float = _PLAN_AGAIN_S,
) -> tuple[OwnLease, bool]:
    """Wait in the order of all waiting runs until a start has its memory; its lease. False beside
    it: other programs hold memory, and no lease does, so a plan for what is free may start sooner.

    `blocked` says why the run may not start yet, whatever is free. Raises ResourceError when
    `longest_s` are over, with the wait of earlier calls. What keeps a run from looking, such as
    another start that is stopped while it decides, is waited for too. A run that stops to wait,
    however, leaves no lease."""
    began, lease, is_in_line, no_look = time.monotonic(), own_lease, False, ""
    try:
        while True:
            try:
                with leases.admission(place, MUTEX_S) as begin:
                    lease = lease or begin(replace(record, state="waiting", cards=()))
                    if not is_in_line:
                        lease.settle_yield()
                        lease.write(
                            state="waiting", needs=record.needs, taken=record.taken, cards=()
                        )
                        is_in_line = True
                    reason = _look(place, lease, record.needs, get_supply, blocked)
                if reason is None:
                    break
                if reason.what != lease.waits_for:
                    lease.waits_for, no_look = reason.what, ""
                    say(f"waiting as run {lease.number} for {reason.text}")
            except (OSError, ResourceError) as error:
                reason = _Obstacle(str(error), "a look at the leases")
                if str(error) != no_look:
                    no_look = str(error)
                    say(f"waiting for a look at the leases: {error}")
            waited_s = time.monotonic() - began
            if waited_before_s + waited_s > longest_s:
                raise ResourceError(
                    f"launch.wait: {longest_s / 3600:g} h are over, and this run still waits for"
                    f" {reason.text}; give it more hours, or end what it waits for"
                )
            if lease is not None and reason.is_memory and waited_s > plan_again_s:
                return lease, False
            time.sleep(POLL_S)
        if lease.waits_for:
            lease.waits_for = ""
            say(f"run {lease.number} starts: planning with the memory that is free now")
        return lease, True
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def _look(
    place: Path,
    lease: OwnLease,
    needs: Needs,
    get_supply: _GetSupply,
    blocked: Callable[[OwnLease], str],
) -> _Obstacle | None:
    """The obstacle of now, which is written into the lease; None: the lease is granted."""
    lease.check_seen()
    asked, live = leases.read_asked(lease.path), leases.live(place)
    lease.write(place=asked.place)
    why_blocked = HELD.format(lease.number) if asked.is_held else blocked(lease)
    reason = obstacle(lease, live, get_supply, why_blocked)
    if reason is None:
        cards = admission.chosen_cards(needs, get_supply(split(live)[0]))
        lease.write(state="granted", cards=cards, waits_for="")
    else:
        lease.write(state="blocked" if reason.is_own else "waiting")
        if reason.what != lease.waits_for:
            lease.write(waits_for=reason.text[:500])
    return reason
