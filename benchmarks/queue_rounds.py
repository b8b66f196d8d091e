"""Random rounds of starts that wait, end, are stopped and killed, on a described machine.

`python -m benchmarks.queue_rounds [--rounds N] [--seed N]` (make queue-rounds). A start is a
process that takes its lease as a run does and then does nothing, so that a round takes
milliseconds. After each round the leases that are granted must fit side by side; at the end no
lease may be left, and none may have been granted twice."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.base.errors import DoesNotFit
from launch.queue import leases, starts
from launch.queue.admission import Supply
from launch.queue.leases import Lease, Needs, OwnLease
from launch.schema.machine import GIB, Machine

TOTAL_GIB = 10
MOST_CHILDREN = 8
LONGEST_HOLD_S = 0.3
PROBE_S = 0.005  # of a real probe; in this time another start may come
LIMIT_S = 60.0  # for all of them to come to an end


@dataclass
class Seen:
    """Counts of a campaign, and what went wrong."""

    rounds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def machine(free_bytes: int = TOTAL_GIB * GIB) -> Machine:
    """A machine without cards, all of whose memory is free."""
    return Machine(
        *("described", (), "none", TOTAL_GIB * GIB, "described", free_bytes, "described"),
        *(2, "described", GIB, "described", 100 * GIB, "described"),
    )


def start(place: Path, gib: int, hold_s: float, waits: bool, grants: int) -> int:
    """A start in a process of its own; its exit code. `grants`: a pipe that gets its number."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(75)

    signal.signal(signal.SIGTERM, end)
    record = leases.boot_record(state="granted", needs=Needs(gib * GIB))

    def supply(granted: Sequence[Lease]) -> Supply:
        time.sleep(PROBE_S)
        return Supply(machine(), granted)

    lease: OwnLease | str = "none"
    try:
        if waits:
            lease, _ = starts.wait(place, record, supply, lambda own: "", lambda line: None)
        else:
            lease = starts.take(place, record, supply, (), False)
        if not isinstance(lease, OwnLease):
            return 3
        os.write(grants, f"{lease.number}\n".encode())
        time.sleep(hold_s)
    except DoesNotFit:
        return 3
    finally:
        if isinstance(lease, OwnLease):
            lease.release()
    return 0


def campaign(place: Path, rounds: int, seed: int) -> Seen:
    """Start, stop and kill at random; what was seen."""
    starts.POLL_S = 0.02
    rng, seen, children = random.Random(seed), Seen(), set[int]()
    grants_file, grants = os.pipe()
    os.set_blocking(grants_file, False)
    for _ in range(rounds):
        seen.rounds += 1
        if len(children) < MOST_CHILDREN:
            gib, hold_s = rng.randint(1, TOTAL_GIB), rng.uniform(0, LONGEST_HOLD_S)
            children.add(_forked(place, gib, hold_s, rng.random() < 0.8, grants))
        if rng.random() < 0.4 and children:
            number = rng.choice((signal.SIGKILL, signal.SIGTERM))
            os.kill(rng.choice(sorted(children)), number)
        time.sleep(rng.uniform(0, 0.05))
        _reap(children, seen)
        _check(place, seen)
    until_s = time.monotonic() + LIMIT_S
    while children and time.monotonic() < until_s:
        time.sleep(0.02)
        _reap(children, seen)
        _check(place, seen)
    for pid in children:
        seen.problems.append(f"process {pid} waits though nothing is leased")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    numbers = os.read(grants_file, 1 << 20).split() if not seen.problems else []
    for number, count in Counter(numbers).items():
        if count > 1:
            seen.problems.append(f"run {number.decode()} was granted {count} times")
    _check_nothing_is_left(place, seen)
    for file in (grants_file, grants):
        os.close(file)
    return seen


def _forked(place: Path, gib: int, hold_s: float, waits: bool, grants: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = start(place, gib, hold_s, waits, grants)
    except SystemExit as ending:
        code = int(str(ending.code))
    finally:
        if sys.exc_info()[1] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int], seen: Seen) -> None:
    for pid in sorted(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        children.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        seen.ends[str(code)] += 1
        if code not in (0, 3, 75, -signal.SIGKILL, -signal.SIGTERM):
            seen.problems.append(f"a start ended with {code}")


def _check(place: Path, seen: Seen) -> None:
    """Check that granted leases fit side by side."""
    with leases.admission(place):  # nothing is granted meanwhile
        granted, _ = starts.split(leases.live(place))
    leased = sum(lease.record.needs.host_bytes for lease in granted)
    if leased > TOTAL_GIB * GIB:
        seen.problems.append(f"{leased / GIB:g} GiB are leased of {TOTAL_GIB}")


def _check_nothing_is_left(place: Path, seen: Seen) -> None:
    """No lease is alive, and the next start removes the files of those that were killed."""
    if live := leases.live(place):
        seen.problems.append(f"{len(live)} leases are alive after the last process")
    with leases.admission(place) as begin:
        begin(leases.boot_record(state="granted", needs=Needs(0))).release()
    if files := list(place.glob("*.lease")):
        seen.problems.append(f"{len(files)} files are left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        seen = campaign(Path(place), arguments.rounds, arguments.seed)
    print(f"{seen.rounds} rounds, ended with: {dict(seen.ends)}")
    for problem in seen.problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if seen.problems else 0


if __name__ == "__main__":
    sys.exit(main())
