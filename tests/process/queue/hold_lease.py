"""A start without ranks: `hold_lease.py PLACE GIB [fork | as a stranger | PRIORITY]` takes a lease
on a machine with 10 GiB of which all are free, says so, and holds it until it is killed. With a
priority it waits for its lease."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from launch.base.errors import DoesNotFit
from launch.queue import leases, starts
from launch.queue.admission import Supply
from launch.queue.leases import Needs, OwnLease
from launch.schema.machine import GIB
from tests.builders import machine

STRANGER = 65534
FORGOTTEN_S = 600  # a test kills it long before; one whose test died ends by itself

if __name__ == "__main__":
    place, gib, special = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    on = machine(host_available_bytes=10 * GIB, host_limit_bytes=10 * GIB)
    needs = Needs(int(gib * GIB))
    record = leases.boot_record(state="granted", needs=needs, recipe="\x1b[31mtiny")
    if special == ["as a stranger"]:
        os.chdir(place)  # folders above it are closed to strangers
        place = Path()
        os.setresuid(STRANGER, STRANGER, STRANGER)
    if special and special[0].isdigit():
        record = replace(record, priority=int(special[0]))
        waited = starts.wait(
            place,
            record,
            lambda granted: Supply(on, granted),
            lambda own: "",
            lambda line: print(line, flush=True),
        )
        print(f"holds {waited[0].number}", flush=True)
        time.sleep(FORGOTTEN_S)
    try:
        taken = starts.take(place, record, lambda granted: Supply(on, granted), (), False)
    except DoesNotFit as error:
        taken = str(error)
    if not isinstance(taken, OwnLease):
        print(taken, flush=True)
        sys.exit(3)
    if special == ["fork"] and os.fork() == 0:  # it has the lease's file open
        time.sleep(FORGOTTEN_S)
    print(f"holds {taken.number}", flush=True)
    time.sleep(FORGOTTEN_S)
