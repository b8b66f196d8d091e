"""A part of the data tokenised by as many processes as there is room for: units
(training/data/units.py) side by side.

The files are the same whatever their number: one per unit, each of its rows alone."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launch.base import processes as base_processes
from launch.base import workspace
from launch.base.errors import DataError, ResourceError
from launch.data.rows import BadRows
from launch.schema.machine import GIB
from training.data.encode import CacheCounts
from training.data.tokenise import Job

ROOM_CHECKS = 64  # while a part is tokenised
# a CPU each
LONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def part(
    job: Job,
    limit: int | None,
    processes: int,
    progress: Callable[[int], Any],
    say: Callable[[str], None],
) -> tuple[CacheCounts, BadRows]:
    """Tokenise the units that are not there yet: what all of them hold, and what was left out.

    Rows count in their order: of two faults the first is raised. With a limit it is one unit after
    another: how many rows are left for one, those before it say."""
    name, count = job.source.name, len(job.units)
    missing = [unit for unit in range(count) if job.done(unit) is None]
    if len(missing) < count:
        say(f"{name}: {count - len(missing):,} of {count:,} parts are there from an earlier start")
    several = min(processes, len(missing)) if limit is None else 1
    if several > 1:
        say(f"tokenising {name} in {len(missing):,} parts with {several} processes")
        job.write()
        _run(job, missing, several, progress)
    bad, total = BadRows(job.max_bad_rows), CacheCounts()
    for unit in range(count):
        left = None if limit is None else limit - total.samples
        found = job.done(unit) or job.failed(unit) or job.tokenise(unit, left, progress)
        for error in found["bad"]:
            bad.add(DataError(error))
        if "error" in found:
            raise DataError(found["error"])
        _check_room(job, unit)
        total = total.join([CacheCounts(**found["counts"])])
        if total.samples == limit:
            break
    total.bad = bad.count
    return total, bad


def _check_room(job: Job, unit: int) -> None:
    """Raises ResourceError where the disk has no room for the units that are still missing."""
    count = len(job.units)
    if unit % max(count // ROOM_CHECKS, 1):
        return
    files = list(job.folder.glob(f"{job.part}-*.arrow"))
    more = sum(file.stat().st_size for file in files) * (count - len(files)) // max(len(files), 1)
    free = shutil.disk_usage(job.folder).free
    if more > free:
        raise ResourceError(
            f"{job.folder.parent}: the tokens of {job.source} take about {more / GIB:,.1f} GiB"
            f" more, {free / GIB:,.1f} GiB are free. Put LOWMEM_ROOT on a larger disk, make room,"
            " or (pretraining, packed) keep only a few of them: --data.streaming=true"
            " --training.max_steps=N"
        )


class Child:
    """One process with at most one unit."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.data.tokenise", str(folder)],
            env={**os.environ, "PYTHONPATH": str(workspace.CODE), **LONE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is for us, who end it
            preexec_fn=base_processes.die_with_launcher,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout
        self._unread = b""

    def give(self, unit: int) -> None:
        with suppress(BrokenPipeError):  # it has died: said() will tell
            self._stdin.write(f"{unit}\n".encode())

    def said(self) -> list[dict[str, Any]]:
        """What it has said since. Where it was killed this process ends likewise: it is as if we
        had done the work."""
        content = os.read(self.stdout.fileno(), 1 << 16)
        if not content:
            code = self._process.wait()
            if code < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"a process that tokenises ended with {code}; what it said is above")
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self.stdout.close()


def _run(job: Job, units: Sequence[int], processes: int, progress: Callable[[int], Any]) -> None:
    """Deal these units in their order, each to who is free; after one that fails no other is
    begun."""
    left = iter(units)
    with selectors.DefaultSelector() as selector, ExitStack() as held:
        for _ in range(processes):
            child = Child(job.folder)
            held.callback(child.end)
            selector.register(child.stdout, selectors.EVENT_READ, child)
            child.give(next(left))
        while selector.get_map():
            for key, _ in selector.select():
                child = key.data
                for words in child.said():
                    progress(words.get("rows", 0))
                    if "unit" not in words:
                        continue
                    _check_room(job, words["unit"])
                    if job.failed(words["unit"]):
                        left = iter(())
                    following = next(left, None)
                    if following is None:
                        selector.unregister(child.stdout)
                    else:
                        child.give(following)
