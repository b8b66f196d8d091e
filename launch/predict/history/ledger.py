"""Predicted and measured figures of past runs, and the results of tuning.

One file of JSON lines, to which launchers append, never ranks. Its errors are printed and stop no
run. It is never cut: a run adds a line of 0.7 kB, and 10,000 lines are read in 0.14 s.
"""

import errno
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from launch.base import files, locks
from launch.base.errors import ResourceError
from launch.predict.history import calibration
from launch.predict.history.calibration import Keyed, Measurement
from launch.schema.machine import Device
from launch.schema.plan import Strategy

_BUSY_S = 30.0  # waits for other launchers; a write takes milliseconds
# A pipe or a link in the place of the file ends in an OSError
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW


@dataclass(frozen=True, kw_only=True)
class Tuned(Keyed):
    """The strategy that tuning chose."""

    time: float  # unix time
    strategy: Strategy
    why: str
    step_s: float
    kind: Literal["tuned"] = "tuned"


@dataclass(frozen=True, kw_only=True)
class _Forgotten(Keyed):
    """A mark that drops earlier results of tuning with these keys."""

    kind: Literal["forgotten"] = "forgotten"


Line = Measurement | Tuned | _Forgotten
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


@dataclass(frozen=True)
class Ledger:
    """The file, and `say`, which prints its errors. Each call opens the file anew: nothing is held
    while a run lasts."""

    path: Path
    say: Callable[[str], None]
    busy_s: float = _BUSY_S

    def recall(self, machine_key: str, model_key: str, recipe_key: str) -> Tuned | None:
        """The last result of these keys, unless it was forgotten."""
        results = [
            line
            for line in self._lines()
            if not isinstance(line, Measurement)
            and (line.machine_key, line.model_key, line.recipe_key)
            == (machine_key, model_key, recipe_key)
        ]
        return results[-1] if results and isinstance(results[-1], Tuned) else None

    def forget(self, machine_key: str, model_key: str, recipe_key: str) -> bool:
        """Drop the remembered result; False: there was none, or it cannot be dropped."""
        return self.recall(machine_key, model_key, recipe_key) is not None and self.record(
            _Forgotten(machine_key=machine_key, model_key=model_key, recipe_key=recipe_key)
        )

    def calibration_lines(self) -> list[str]:
        """The errors of predictions in all runs so far, for people."""
        lines, measurements = [], self.measurements()
        for quantity, device in product(calibration.WORDS, get_args(Device)):
            runs = [
                (run.run_id, residual)
                for run, residual in calibration.residuals(measurements, quantity, device)
            ]
            lines += calibration.lines(quantity, device, runs) if runs else ()
        return lines or ["calibration: nothing to compare yet; each run that ends adds its figures"]

    def measurements(self) -> list[Measurement]:
        """The figures of every run, oldest first."""
        return [line for line in self._lines() if isinstance(line, Measurement)]

    def record(self, *lines: Line) -> bool:
        """Add lines, behind those of an earlier version; False, with a printed reason, if they
        cannot be kept. Of results of tuning with the same keys the last counts."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self.path, FLAGS, 0o644), "r+b", buffering=0) as file:
                self._lock(file.fileno())
                if self._sqlite_file.exists():
                    self._carry_over(file)
                _write(file, map(_text, lines))
            return True
        except (OSError, ResourceError) as error:
            _say_once(
                self.say,
                f"ledger: {self.path} cannot be written to: {error}; nothing new is kept, the run"
                " goes on",
            )
            return False

    # ---- the file
    # ---------------------------------------------------------------------------

    def _lines(self) -> list[Line]:
        """The lines that this version knows, oldest first; others, and one that a kill has cut, are
        counted aloud."""
        try:
            if self._sqlite_file.exists():
                self.record()
            if self.path.exists():
                return self._valid(files.complete_lines(self.path), self.path)
        except OSError as error:
            _say_once(
                self.say,
                f"ledger: {self.path} cannot be read: {error}; nothing is recalled, the run goes"
                " on",
            )
        return []

    def _valid(self, texts: Iterable[bytes], source: Path) -> list[Line]:
        lines, faults = [], []
        for number, text in enumerate(texts, 1):
            try:
                lines.append(LINE.validate_json(text))
            except ValidationError as error:
                faults.append(f"line {number}: {files.first_fault(error)[:200]!r}")
        if faults:
            _say_once(
                self.say,
                f"ledger: {source}: {len(faults)} line(s) not of this version are passed over, the"
                f" first is {faults[0]}",
            )
        return lines

    def _lock(self, file: int) -> None:
        until = time.monotonic() + self.busy_s
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                return locks.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path)
            time.sleep(0.01)
        raise BlockingIOError(errno.EAGAIN, f"another process has locked it for {self.busy_s:g} s")

    # ---- the file of earlier versions
    # ---------------------------------------------------------------------------

    @property
    def _sqlite_file(self) -> Path:
        return self.path.with_suffix(".sqlite")

    def _carry_over(self, file: FileIO) -> None:
        """Append the rows of the SQLite file that are not there yet, and rename it."""
        old = self._sqlite_file
        aside = old.with_name(f"{old.name}.aside-{old.stat().st_ino}")
        try:
            lines = self._valid(_rows(old), old)
            outcome = f"its {len(lines)} row(s) are in {self.path.name} now"
        except (sqlite3.Error, ValueError) as error:
            lines, outcome = [], f"it cannot be read ({error})"
        # a start may have appended some before it was killed
        present = set(files.complete_lines(self.path))
        _write(file, [text for text in map(_text, lines) if text not in present])
        old.rename(aside)
        self.say(f"ledger: {old}: {outcome}; it is kept as {aside.name}")


def _text(line: Line) -> bytes:
    return LINE.dump_json(line) + b"\n"


def _write(file: FileIO, texts: Iterable[bytes]) -> None:
    """Append to a locked file: everything or nothing, behind a line that a kill has cut."""
    size = os.fstat(file.fileno()).st_size
    is_cut = os.pread(file.fileno(), 1, max(size - 1, 0)) not in (b"", b"\n")
    content = b"\n" * is_cut + b"".join(texts)
    if file.write(content) < len(content):
        file.truncate(size)
        raise OSError(errno.ENOSPC, "no room for the whole line")
    os.fsync(file.fileno())


def _rows(path: Path) -> list[bytes]:
    """The rows of an SQLite file, as lines."""
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        lines: list[dict[str, Any]] = [
            {
                **row,
                "kind": "measurement",
                "versions": json.loads(row["versions"]),
                **{
                    side: {quantity: row[f"{side}_{quantity}"] for quantity in calibration.WORDS}
                    for side in ("predicted", "measured")
                },
            }
            for row in db.execute("SELECT * FROM measurements")
        ]
        lines += [
            {**row, "kind": "tuned", "strategy": json.loads(row["strategy"])}
            for row in db.execute("SELECT * FROM tuned")
        ]
    return [json.dumps(line).encode() for line in lines]


@cache
def _say_once(say: Callable[[str], None], text: str) -> None:
    """Say a line that each call of a start would repeat."""
    say(text)
