"""Tokenise the units of a part of the data (training/data/units.py) in several processes.

Each unit has its own file, so the files are the same for any number of processes."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launch.base import files, processes, workspace
from launch.base.errors import DataError, ResourceError
from launch.base.text import size
from launch.data.rows import BadRows
from training.data.encode import CacheCounts
from training.data.tokenise import TokeniseJob

_SPACE_CHECKS = 64  # times that the disk space is checked while a part is tokenised
# each process uses one CPU
_LONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def part(
    job: TokeniseJob,
    limit: int | None,
    num_processes: int,
    progress: Callable[[int], Any],
    say: Callable[[str], None],
) -> tuple[CacheCounts, BadRows]:
    """Tokenise the units that are missing; return the counts of all units and the bad rows.

    If several units have an error, the error of the first unit is raised. With a limit, the units
    are tokenised one after another, because the units before decide how many rows are left."""
    name, count = job.name, len(job.units)
    missing = [unit for unit in range(count) if job.done(unit) is None]
    if len(missing) < count:
        say(f"{name}: {count - len(missing):,} of {count:,} parts were tokenised earlier")
    several = min(num_processes, len(missing), job.full_units) if limit is None else 1
    if several > 1:
        say(f"tokenising {name} in {len(missing):,} parts with {several} processes")
        job.write()
        _run(job, missing, several, progress)
    bad, total = BadRows(job.max_bad_rows), CacheCounts()
    for unit in range(count):
        unit_limit = None if limit is None else limit - total.samples
        tokenised = job.done(unit) or job.failed(unit) or job.tokenise(unit, unit_limit, progress)
        for error in tokenised.bad:
            bad.add(DataError(error))
        if tokenised.error:
            raise DataError(tokenised.error)
        _check_disk_space(job, unit)
        total = total.join([tokenised.counts])
        if total.samples == limit:
            break
    total.bad = bad.count
    return total, bad


def _check_disk_space(job: TokeniseJob, unit: int) -> None:
    """Raise ResourceError if the disk has no space for the units that are still missing."""
    count = len(job.units)
    if unit % max(count // _SPACE_CHECKS, 1):
        return
    done = [file.stat().st_size for file in job.folder.glob(f"{job.part}-*.arrow")]
    more = sum(done) * (count - len(done)) // max(len(done), 1)
    free = files.free_bytes(job.folder)
    if more > free:
        raise ResourceError(
            f"{job.folder.parent}: the tokens of {job.name} take about {size(more)}"
            f" more, {size(free)} are free. Put LOWMEM_ROOT on a larger disk, free some"
            " space, or (pretraining, packed) keep only a few of them: --data.streaming=true"
            " --training.max_steps=N"
        )


class Child:
    """A process that tokenises at most one unit at a time."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.children.tokenise_units", str(folder)],
            env={**os.environ, "PYTHONPATH": str(workspace.CODE), **_LONE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to this process, which ends the child
            preexec_fn=processes.die_with_launcher,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout
        self._unread = b""

    def give(self, unit: int) -> None:
        with suppress(BrokenPipeError):  # the child has ended: messages() raises
            self._stdin.write(f"{unit}\n".encode())

    def messages(self) -> list[dict[str, Any]]:
        """Read its new messages. If it was killed, this process is killed too, as if it had done
        the work itself."""
        content = os.read(self.stdout.fileno(), 1 << 16)
        if not content:
            code = self._process.wait()
            if code < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"a process that tokenises ended with {code}; its output is above")
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self.stdout.close()


def _run(
    job: TokeniseJob, units: Sequence[int], num_processes: int, progress: Callable[[int], Any]
) -> None:
    """Give the units in their order to processes that are free; after an error, start no other
    unit."""
    waiting = iter(units)
    with selectors.DefaultSelector() as selector, ExitStack() as children:
        for _ in range(num_processes):
            child = Child(job.folder)
            children.callback(child.end)
            selector.register(child.stdout, selectors.EVENT_READ, child)
            child.give(next(waiting))
        while selector.get_map():
            for key, _ in selector.select():
                child = key.data
                for message in child.messages():
                    progress(message.get("rows", 0))
                    if "unit" not in message:
                        continue
                    _check_disk_space(job, message["unit"])
                    if job.failed(message["unit"]):
                        waiting = iter(())
                    following = next(waiting, None)
                    if following is None:
                        selector.unregister(child.stdout)
                    else:
                        child.give(following)
