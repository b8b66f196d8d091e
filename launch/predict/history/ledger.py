"""Predicted and measured figures of past runs, and the results of tuning.

One SQLite file that launchers write, never ranks. Its errors are printed and stop no run.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import TypeAdapter

from launch.base import locks
from launch.base.errors import ResourceError
from launch.predict.history import calibration
from launch.predict.history.calibration import Margin, Measurement, Quantity
from launch.schema.machine import Device
from launch.schema.plan import Strategy

LEVEL = 0.95  # of a margin: the share of runs that stay below it
NEWEST = 500  # residuals that a margin looks at: predictions get better, old errors say less
BUSY_S = 5.0  # waits for another launcher; a write takes milliseconds

# The journal is SQLite's default, the rollback journal: WAL needs memory that processes share,
# which a workspace on a network file system does not have. Source: https://sqlite.org/wal.html
APPLICATION_ID = 0x6C6F776D  # "lowm": no other program's database is taken for a ledger
SCHEMA_VERSION = 1  # raise when a table changes
STRICT = " STRICT" if sqlite3.sqlite_version_info >= (3, 37) else ""
KEYS = (
    "time REAL NOT NULL, machine_key TEXT NOT NULL, model_key TEXT NOT NULL, recipe_key TEXT NOT"
    " NULL"
)
FIGURES = ", ".join(
    f"{side}_{quantity} {'REAL' if quantity.endswith('_s') else 'INTEGER'}"
    for quantity in get_args(Quantity)
    for side in ("predicted", "measured")
)
SCHEMA = (
    f"""CREATE TABLE measurements ({KEYS}, run_id TEXT NOT NULL, device TEXT NOT NULL,
    device_name TEXT NOT NULL, mode TEXT NOT NULL, num_processes INTEGER NOT NULL,
    per_device_train_batch_size INTEGER NOT NULL, gradient_accumulation_steps INTEGER NOT NULL,
    max_length INTEGER NOT NULL, mixed_precision TEXT NOT NULL,
    gradient_checkpointing INTEGER NOT NULL, versions TEXT NOT NULL, {FIGURES}){STRICT}""",
    f"""CREATE TABLE tuned ({KEYS}, strategy TEXT NOT NULL, why TEXT NOT NULL, step_s REAL NOT NULL,
    PRIMARY KEY (machine_key, model_key, recipe_key)){STRICT}""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
OF_KEYS = "WHERE machine_key = ? AND model_key = ? AND recipe_key = ?"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The strategy that tuning chose."""

    time: float  # unix time
    machine_key: str
    model_key: str
    recipe_key: str
    strategy: Strategy
    why: str
    step_s: float


TUNED = TypeAdapter(Tuned)
Answer = TypeVar("Answer")
Work = Callable[[sqlite3.Connection], Answer]  # within one transaction


class _Unfit(Exception):
    """The file holds no ledger, or an older one; it is set aside."""


class _Newer(Exception):
    """A newer version's file; it is left alone."""


@dataclass(frozen=True)
class Ledger:
    """The file, and `say`, which prints its errors. Each call opens the file anew: nothing is held
    while a run lasts."""

    path: Path
    say: Callable[[str], None]
    busy_s: float = BUSY_S

    def record(self, measurement: Measurement) -> None:
        self._write("measurements", measurement)

    def remember(self, tuned: Tuned) -> None:
        """Keep this result, instead of an earlier one of the same keys."""
        self._write("tuned", tuned)

    def recall(self, machine_key: str, model_key: str, recipe_key: str) -> Tuned | None:
        row_keys = (machine_key, model_key, recipe_key)
        row = self._use(
            lambda db: db.execute(f"SELECT * FROM tuned {OF_KEYS}", row_keys).fetchone()
        )
        if row is None:
            return None
        try:
            return TUNED.validate_python({**row, "strategy": json.loads(row["strategy"])})
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            self.say(f"ledger: {self.path}: 1 row(s) not of this version are passed over: {reason}")
            return None

    def forget(self, machine_key: str, model_key: str, recipe_key: str) -> bool:
        """Drop the remembered result; False: there was none."""
        row_keys = (machine_key, model_key, recipe_key)
        query = f"DELETE FROM tuned {OF_KEYS}"
        return bool(self._use(lambda db: db.execute(query, row_keys).rowcount, writes=True))

    def residuals(
        self, quantity: Quantity, device: Device, machine_key: str | None = None
    ) -> list[float]:
        """measured / predicted - 1 of the runs that have both, newest first; without a key, of
        every machine."""
        only = (
            "device = ? AND machine_key = coalesce(?, machine_key) ORDER BY time DESC, rowid DESC"
            " LIMIT ?"
        )
        query, values = f"{_residuals(quantity)} AND {only}", (device, machine_key, NEWEST)
        rows = self._use(lambda db: db.execute(query, values).fetchall()) or ()
        return [row["residual"] for row in rows]

    def margin(
        self,
        quantity: Quantity,
        device: Device,
        machine_key: str,
        prior: float,
        level: float = LEVEL,
    ) -> Margin:
        """The allowance above a prediction (calibration.margin); `prior` while there are too few
        runs."""
        here, everywhere = (
            self.residuals(quantity, device, machine_key),
            self.residuals(quantity, device),
        )
        return calibration.margin(here, everywhere, device, prior, level)

    def calibration_lines(self) -> list[str]:
        """The errors of predictions in all runs so far, for people."""
        rows = (
            self._use(
                lambda db: {q: db.execute(_residuals(q)).fetchall() for q in calibration.WORDS}
            )
            or {}
        )
        lines = []
        for quantity, device in product(calibration.WORDS, get_args(Device)):
            runs = [
                (row["run_id"], row["residual"])
                for row in rows.get(quantity, ())
                if row["device"] == device
            ]
            lines += calibration.lines(quantity, device, runs) if runs else ()
        return lines or ["calibration: nothing to compare yet; each run that ends adds its figures"]

    # ---- the file
    # ---------------------------------------------------------------------------

    def _write(self, table: str, noun: Measurement | Tuned) -> None:
        row = asdict(noun)
        for side in ("predicted", "measured"):
            row |= {f"{side}_{quantity}": value for quantity, value in row.pop(side, {}).items()}
        row = {
            key: json.dumps(value) if isinstance(value, dict) else value
            for key, value in row.items()
        }
        statement = f"REPLACE INTO {table} ({', '.join(row)}) VALUES (:{', :'.join(row)})"
        self._use(lambda db: db.execute(statement, row).rowcount, writes=True)

    def _use(self, work: Work[Answer], writes: bool = False) -> Answer | None:
        """The result of the work; None, with a printed reason, if the file cannot be used."""
        try:
            if writes:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            elif not self.path.exists():
                return None
            with self._lock(fcntl.LOCK_SH):
                inode = self.path.stat().st_ino if self.path.exists() else 0
                try:
                    return self._transaction(work, writes)
                except (_Unfit, sqlite3.DatabaseError) as error:
                    if not _is_damage(error):
                        raise
                    damage = str(error)
            self._set_aside(inode, damage)
            with self._lock(fcntl.LOCK_SH):
                return self._transaction(work, writes) if writes or self.path.exists() else None
        except (_Unfit, _Newer, sqlite3.Error, OSError) as error:
            lost = "nothing new is kept" if writes else "nothing is recalled"
            self.say(f"ledger: {self.path} cannot be used: {error}; {lost}, the run goes on")
            return None

    @property
    def lock_file(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        """Keep the file under its name while it is open, or alone while it is renamed: SQLite would
        roll the journal of the new file back into the old one."""
        with ExitStack() as opened:
            # a folder where no file can be made: none is renamed there
            with suppress(OSError, ResourceError):
                file = locks.opened(self.lock_file)
                opened.callback(os.close, file)
                locks.flock(file, kind, self.lock_file)
            yield

    def _transaction(self, work: Work[Answer], writes: bool) -> Answer | None:
        # rw for readers too: what a killed launcher left half-written is rolled back before anybody
        # reads it
        uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if writes else 'rw'}"
        with closing(sqlite3.connect(uri, self.busy_s, isolation_level=None, uri=True)) as db:
            db.row_factory = sqlite3.Row
            # of two that read before they write, one would fail
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if not _is_ledger(db):
                if not writes:
                    return None
                for statement in SCHEMA:
                    db.execute(statement)
            result = work(db)
            db.execute("COMMIT")
            return result

    def _set_aside(self, inode: int, why: str) -> None:
        """Rename the file that has this inode, unless another launcher did: the fresh one in its
        place must stay."""
        with self._lock(fcntl.LOCK_EX):
            if not self.path.exists() or self.path.stat().st_ino != inode:
                return  # the other launcher says it
            aside = self.path.with_name(
                f"{self.path.name}.aside-{time.strftime('%Y%m%d-%H%M%S')}-{inode}"
            )
            self.path.rename(aside)
        self.say(f"ledger: {self.path}: {why}; it is kept as {aside.name}, a new one begins")


def _is_ledger(db: sqlite3.Connection) -> bool:
    """False for an empty file. Raises _Unfit and _Newer."""
    owner, version = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if (owner, version) == (APPLICATION_ID, SCHEMA_VERSION):
        return True
    if owner == APPLICATION_ID and version > SCHEMA_VERSION:
        raise _Newer(
            f"a newer version wrote it (schema {version}, here {SCHEMA_VERSION}) and it is left as"
            " it is"
        )
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise _Unfit(
            f"no ledger of schema {SCHEMA_VERSION}, but application_id {owner:#x}, schema {version}"
        )
    return False


def _is_damage(error: Exception) -> bool:
    # an SQLite older than 3.37 says so of a newer one's sound tables
    if 'near "STRICT"' in str(error):
        return False
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _Unfit) or primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _residuals(quantity: Quantity) -> str:
    """The query; a prediction of 0 has no residual."""
    return (
        f"SELECT measured_{quantity} * 1.0 / predicted_{quantity} - 1 AS residual, run_id, device"
        f" FROM measurements WHERE predicted_{quantity} > 0 AND measured_{quantity} IS NOT NULL"
    )
