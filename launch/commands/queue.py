"""`python -m launch queue`: the runs of this machine that have or wait for a lease, and what their
user may change: cancel, hold, release, move, yield."""

import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError, ResourceError
from launch.base.files import to_json
from launch.base.text import shown, size
from launch.base.workspace import Workspace
from launch.commands.recipe_arguments import refuse
from launch.commands.submit import crontab, job
from launch.queue import admission, leases, starts
from launch.queue.leases import Asked, Lease

STATES = {"granted": "runs", "waiting": "waits", "blocked": "blocked"}
ROW = "{:>4}  {:<10} {:>8}  {:<8} {:>8}  {:>11}  {:<16} {:<12} {}"
HEAD = ("run", "user", "process", "state", "priority", "host RAM", "VRAM", "since", "recipe")


def main(arguments: Namespace) -> None:
    place, action = leases.folder(), arguments.action
    if action is None:
        return _list(place, arguments.json)
    num_expected = 2 if action == "move" else 1
    refuse(
        (arguments.json, f"queue {action}: --json is for the list alone; leave it out"),
        (
            len(arguments.numbers) != num_expected,
            f"queue {action}: found {len(arguments.numbers)} runs, expected {num_expected}, such as"
            f" queue {action} {' '.join('78'[:num_expected])}",
        ),
    )
    runs = [_own_run(place, action, text) for text in arguments.numbers]
    _ACTIONS[action](place, *runs)


def _list(place: Path, as_json: bool) -> None:
    """Print every lease: those that are granted by number, and those that wait in their order."""
    live = leases.live(place)
    granted, waiting = starts.split(live)
    ordered = [*granted, *waiting, *(lease for lease in live if lease.record.state == "blocked")]
    if as_json:
        print(to_json([_facts(lease) for lease in ordered], indent=1))
    elif not ordered:
        print(shown(f"no run has or waits for a lease of this machine's memory ({place})"))
    else:
        print(ROW.format(*HEAD).rstrip())
        for lease in ordered:
            print(shown(_row(lease)))
            if lease.is_own and lease.record.waits_for:
                print(shown(f"      waits for {lease.record.waits_for}"))
    if not as_json:
        for script in job.killed(Workspace.here()):
            print(shown(f"a job was killed: {script} starts it again"))


def _facts(lease: Lease) -> dict[str, Any]:
    """A lease for scripts; of another user without its texts."""
    record = asdict(lease.record)
    del record["boot"]
    if not lease.is_own:
        record["recipe"] = record["run"] = record["waits_for"] = ""
    return {
        "number": lease.number,
        "user": leases.user_name(lease.uid),
        "process": lease.pid,
        **record,
    }


def _row(lease: Lease) -> str:
    record, needs = lease.record, lease.record.needs
    vram = f"{needs.num_cards} x {size(needs.card_bytes)}" if needs.num_cards else "-"
    since = time.strftime("%m-%d %H:%M", time.localtime(record.since_s))
    recipe = record.recipe if lease.is_own else ""
    return ROW.format(
        *(lease.number, leases.user_name(lease.uid), lease.pid or "-"),
        *(STATES[record.state], record.priority, size(admission.total(lease).host_bytes)),
        *(vram, since, recipe),
    ).rstrip()


def _own_run(place: Path, action: str, text: str) -> Lease:
    """The run of this user with that number. Raises ConfigError."""
    live = leases.live(place)
    lease = next((lease for lease in live if str(lease.number) == text), None)
    if lease is None:
        there = ", ".join(str(lease.number) for lease in live) or "none"
        raise ConfigError(
            f"queue {action} {text}: no such run has or waits for a lease; there are: {there}"
        )
    runs = lease.record.state == "granted"
    refuse(
        (
            not lease.is_own and os.geteuid() != 0,
            f"queue {action} {text}: it is a run of {leases.user_name(lease.uid)}; only that user"
            " and root may change it",
        ),
        (
            runs and action not in ("cancel", "yield"),
            f"queue {action} {text}: it runs already; queue yield {text} lets it wait again, queue"
            f" cancel {text} stops it",
        ),
        (
            not runs and action == "yield",
            f"queue yield {text}: it waits already; queue move changes its place",
        ),
    )
    return lease


def _cancel(place: Path, lease: Lease) -> None:
    """Send SIGTERM to the process that holds a lease, and to no other that may have its pid."""
    if not lease.pid:
        raise ResourceError(f"{lease.name}: end it where it was started")
    try:
        process = os.pidfd_open(lease.pid)
    except ProcessLookupError:
        print(f"run {lease.number} has just ended")
        return
    try:
        pids = {each.number: each.pid for each in leases.live(place)}
        if pids.get(lease.number) == lease.pid:
            # a job that starts again after a reboot is over too
            if lease.record.run and (job_dir := job.of_process(Path(lease.record.run), lease.pid)):
                crontab.remove(job_dir.root.parents[1], job_dir.root.name)
            signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)
    stops = "stops, and saves a checkpoint if it trains; sent again, it ends at once"
    print(f"run {lease.number} {stops if lease.record.state == 'granted' else 'stops waiting'}")


def _ask(place: Path, lease: Lease, is_held: bool) -> None:
    path = leases.lease_path(place, lease.number)
    if leases.read_asked(path).is_held == is_held:
        print(f"run {lease.number} is {'held already' if is_held else 'not held'}")
        return
    leases.write_asked(place, lease, Asked(is_held, lease.record.place))
    print(f"run {lease.number} {'is held until queue release' if is_held else 'is released'}")


def _yield(place: Path, lease: Lease) -> None:
    """Ask a run to save a checkpoint and to wait behind all runs that wait now."""
    leases.write_asked(place, lease, Asked(place=leases.last_number(place) + 1, is_yielded=True))
    waiting = starts.split(leases.live(place))[1]
    behind = "" if waiting else "; no run waits, so that it goes on at once"
    print(f"run {lease.number} saves a checkpoint and waits for memory again{behind}")


def _move(place: Path, moved: Lease, before: Lease) -> None:
    """Let a run come before another: both are of one user and one priority, and so are those whose
    places change between them."""
    refuse(
        (
            moved.number == before.number,
            f"queue move {moved.number} {before.number}: expected two runs",
        ),
        (
            moved.uid != before.uid or moved.record.priority != before.record.priority,
            f"queue move {moved.number} {before.number}: they differ in user or"
            " launch.priority, and places change among runs of one user and priority alone",
        ),
    )
    alike = [
        lease
        for lease in leases.live(place)
        if lease.uid == moved.uid
        and lease.record.priority == moved.record.priority
        and lease.record.state != "granted"
    ]
    alike.sort(key=lambda lease: lease.turn)
    places = [lease.record.place or lease.number for lease in alike]
    order = [lease for lease in alike if lease.number != moved.number]
    order.insert([lease.number for lease in order].index(before.number), moved)
    for lease, slot in zip(order, places, strict=True):
        request = leases.read_asked(leases.lease_path(place, lease.number))
        leases.write_asked(place, lease, replace(request, place=slot))
    print(f"run {moved.number} comes before run {before.number}")


_ACTIONS: dict[str, Callable[..., None]] = {
    "cancel": _cancel,
    "hold": partial(_ask, is_held=True),
    "release": partial(_ask, is_held=False),
    "move": _move,
    "yield": _yield,
}
FLAGS = {
    "action": {"nargs": "?", "choices": tuple(_ACTIONS), "help": "none: list them"},
    "numbers": {
        "nargs": "*",
        "metavar": "RUN",
        "help": "its number; move A B: run A comes before run B",
    },
    "--json": {"action": "store_true", "help": "list them for scripts"},
}
