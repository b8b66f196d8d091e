"""Rows of measured rates: a line of JSON for each as it comes, groups that fail or take too long
leave a row that says so. No torch."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
REHEARSAL = "NVIDIA_FAKE_CUDA"  # set where a driver without a card stands in (tests/fake_cuda)
# A case that hangs in Python is interrupted this long after the time of its group is over.
GRACE_S = 4.0
SIGNIFICANT_DIGITS = 6
LONGEST_ERROR = 300


class TimeIsOver(BaseException):
    """Raised in the midst of a case; no case catches it."""


@dataclass(frozen=True)
class Group:
    """Cases that are measured in a row, within `limit_s` of the whole."""

    name: str
    limit_s: float
    measure: Callable[[], Iterator[Row]]
    watches_clocks: bool = False


@dataclass
class Rows:
    """The file that rows are appended to, and its count of errors."""

    path: Path
    is_rehearsal: bool = field(default_factory=lambda: REHEARSAL in os.environ)
    num_rows: int = 0
    num_errors: int = 0

    def add(self, group: str, row: Mapping[str, Any]) -> None:
        marks = {"rehearsal": True} if self.is_rehearsal else {}
        line = json.dumps({"group": group, **rounded(row), **marks}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.num_rows += 1
        self.num_errors += "error" in row


def rounded(value: Any) -> Any:
    """The value with its floats cut to the digits that a clock can have."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def error_row(error: BaseException, **fields: Any) -> Row:
    """A row in the place of figures: the error and the line of this project that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames][-3:]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {**fields, "error": text[:LONGEST_ERROR], "where": " ".join(where)}


def attempted(fields: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
    """The fields of a case and its figures, or the error that it ended in."""
    try:
        return {**fields, **measure()}
    except Exception as error:  # noqa: BLE001  # whatever fails on a card is a result
        return error_row(error, **fields)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Inside, TimeIsOver is raised when the seconds are over; a call into C is let end."""

    def interrupt(*_: object) -> None:
        raise TimeIsOver(f"over {seconds:.1f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_group(group: Group, limit_s: float, rows: Rows) -> float:
    """Write the rows of a group until its time is over; its seconds."""
    began, last, is_complete = time.perf_counter(), "", False
    try:
        with interrupted_after(limit_s + GRACE_S):
            for row in group.measure():
                rows.add(group.name, row)
                last = str(row.get("case", ""))
                if time.perf_counter() - began > limit_s:
                    break
            else:
                is_complete = True
    except TimeIsOver as error:
        rows.add(group.name, error_row(error, case=f"after {last}" if last else "first"))
    except Exception as error:  # noqa: BLE001  # the other groups go on
        rows.add(group.name, error_row(error, case=f"after {last}" if last else "first"))
    seconds = time.perf_counter() - began
    rows.add(
        group.name, {"case": "group", "complete": is_complete, "last": last, "group_s": seconds}
    )
    return seconds


def read(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
