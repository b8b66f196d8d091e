"""Tokenise units of a corpus (training/data/units.py), in several processes. A unit is committed by
a rename, so an unfinished unit does not count, and each has its own file, so the files are the same
for any number of processes."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from launch.base import files, processes, workspace
from launch.base.errors import DataError, ResourceError
from launch.base.text import size
from launch.data import rows
from launch.data import sources as data_sources
from launch.data.files import shards
from launch.data.token_cache import TokenCache
from training.data import encode, tokenizer
from training.data import units as data_units
from training.data.packing import Packer

JOB = "job.json"  # file of a TokeniseJob, which its processes read
TOKENIZER = "tokenizer"
_SPACE_CHECKS = 64  # times that the disk space is checked while a part is tokenised
# each process uses one CPU
_LONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class TokenisedUnit:
    """The result of tokenising a unit, which is written beside its rows."""

    counts: encode.CacheCounts
    bad: list[str]  # rows that were left out
    error: str = ""  # why it failed


@dataclass(frozen=True)
class TokeniseJob:
    """The settings for tokenising a part, "train" or "validation", shared by all its processes."""

    folder: Path
    part: str
    sources: tuple[data_sources.Source, ...]
    settings: encode.EncoderSettings
    packing: bool
    max_bad_rows: int
    unit_bytes: int
    # number of the first row of each slice of each unit, if the part takes some rows only
    row_offsets: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def units(self) -> list[tuple[data_sources.Source, data_units.Unit]]:
        return data_units.of_sources(self.sources, self.unit_bytes)

    @property
    def full_units(self) -> int:
        """The number of units that the bytes of all sources would fill: small ones are not worth a
        process of their own."""
        stored = sum(shards.stored_bytes(source.path) for source in self.sources)
        return -(-stored // self.unit_bytes)

    @property
    def name(self) -> str:
        return data_sources.name(self.sources)

    @cached_property
    def encoder(self) -> encode.Encoder:
        return encode.Encoder(tokenizer.load(self.folder / TOKENIZER), self.settings)

    def rows_file(self, unit: int) -> Path:
        return self.folder / (
            f"{self.part}.arrow" if len(self.units) == 1 else f"{self.part}-{unit:05d}.arrow"
        )

    def counts_file(self, unit: int) -> Path:
        return self.folder / f"{self.part}-{unit:05d}.json"

    def done(self, unit: int) -> TokenisedUnit | None:
        """The result of a unit; None if it has not been tokenised yet, or its file is damaged."""
        return files.read_or_none(self.counts_file(unit), TokenisedUnit)

    def failed(self, unit: int) -> TokenisedUnit | None:
        """The error of another process that could not tokenise a unit; None if there was none."""
        return files.read(self.counts_file(unit).with_suffix(".failed"), TokenisedUnit)

    def tokenise(
        self, unit: int, limit: int | None, progress: Callable[[int], Any]
    ) -> TokenisedUnit:
        """Write the rows of a unit, then its counts and bad rows; return these, or its error.

        An error is not stored: after the data was corrected, the unit is tokenised again."""
        source, slices = self.units[unit]
        bad = rows.BadRows(rows.UNLIMITED if source.is_repeat else self.max_bad_rows)
        row_offsets = self.row_offsets[unit] if self.row_offsets else (0,) * len(slices)
        rows_of_unit = chain.from_iterable(
            data_sources.samples_of(of, first, source, bad)
            for of, first in zip(slices, row_offsets, strict=True)
        )
        packer = (
            Packer(self.settings.max_length, self.settings.whole_texts) if self.packing else None
        )
        aside = self.rows_file(unit).with_suffix(".tmp")
        try:
            counts = encode.write_cache(
                rows_of_unit, self.encoder, aside, limit, progress, packer, bad
            )
        except DataError as error:
            aside.unlink()
            return TokenisedUnit(encode.CacheCounts(), bad.errors, str(error))
        files.sync(aside)
        aside.rename(self.rows_file(unit))
        tokenised = TokenisedUnit(counts, [] if source.is_repeat else bad.errors)
        files.write_json(self.counts_file(unit), tokenised)
        return tokenised


def job(
    tokens: TokenCache,
    sources: tuple[data_sources.Source, ...],
    folder: Path,
    part: data_sources.Part,
) -> TokeniseJob:
    """The job for the rows of a part of a recipe. A streamed corpus has small units."""
    data = tokens.recipe.data
    is_streamed = data.streaming and part == "train"
    unit_bytes = shards.unit_bytes(*(source.path for source in sources))
    return TokeniseJob(
        folder,
        part,
        sources,
        encode.EncoderSettings.of(tokens),
        data.packing,
        data.max_bad_rows,
        data.stream_unit_bytes if is_streamed else unit_bytes,
    )


def job_of_part(
    tokens: TokenCache, folder: Path, part: data_sources.Part, goes_on: Callable[[], None]
) -> TokeniseJob | None:
    """The job for a part of the tokenised rows; None if there are no such rows. `goes_on` is called
    while rows are counted."""
    sources = tokens.of_part(part)
    if not sources:
        return None
    planned = job(tokens, sources, folder, part)
    if sources[0].choice is None:
        return planned
    return replace(planned, row_offsets=data_units.row_offsets(planned.units, goes_on))


# ---- in several processes
# ---------------------------------------------------------------------------


def tokenise_part(
    job: TokeniseJob,
    limit: int | None,
    num_processes: int,
    progress: Callable[[int], Any],
    say: Callable[[str], None],
) -> tuple[encode.CacheCounts, rows.BadRows]:
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
        files.write_json(job.folder / JOB, job)
        _run(job, missing, several, progress)
    bad, total = rows.BadRows(job.max_bad_rows), encode.CacheCounts()
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
            [sys.executable, "-P", "-m", "training.children.tokenise", "units", str(folder)],
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
        with suppress(BrokenPipeError):  # the child has ended: finished() raises
            self._stdin.write(f"{unit}\n".encode())

    def finished(self, progress: Callable[[int], Any]) -> list[int]:
        """Read its new messages: `progress` gets the number of rows, returned are its units. If it
        was killed, this process is killed too, as if it had done the work itself."""
        content = os.read(self.stdout.fileno(), 1 << 16)
        if not content:
            code = self._process.wait()
            if code < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"a process that tokenises ended with {code}; its output is above")
        *lines, self._unread = (self._unread + content).split(b"\n")
        messages = [json.loads(line) for line in lines]
        progress(sum(message.get("rows", 0) for message in messages))
        return [message["unit"] for message in messages if "unit" in message]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def child_processes(folder: Path, count: int) -> Iterator[selectors.BaseSelector]:
    """Processes that tokenise units of the folder's job: a selector of their messages, whose keys
    have each Child as data."""
    with selectors.DefaultSelector() as selector, ExitStack() as children:
        for _ in range(count):
            child = Child(folder)
            children.callback(child.end)
            selector.register(child.stdout, selectors.EVENT_READ, child)
        yield selector


def _run(
    job: TokeniseJob, units: Sequence[int], num_processes: int, progress: Callable[[int], Any]
) -> None:
    """Give the units in their order to processes that are free; after an error, start no other
    unit."""
    waiting = iter(units)
    with child_processes(job.folder, num_processes) as selector:
        for key in selector.get_map().values():
            key.data.give(next(waiting))
        while selector.get_map():
            for key, _ in selector.select():
                child = key.data
                for unit in child.finished(progress):
                    _check_disk_space(job, unit)
                    if job.failed(unit):
                        waiting = iter(())
                    following = next(waiting, None)
                    if following is None:
                        selector.unregister(child.stdout)
                    else:
                        child.give(following)
