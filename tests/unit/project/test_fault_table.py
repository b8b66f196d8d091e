"""The table of faults leaves none out, and hides no failure."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import faults

TESTS = Path(__file__).resolve().parents[2]
SHOWN = re.compile(r'mark\.shows\(\s*((?:"F\d+",\s*)+)')
LINE = {
    "test": "t",
    "proof": "a | b",
    "kinds": ["hang"],
    "codes": [7],
    "lost_steps": 2,
    "detect_s": 6.5,
}


def test_every_fault_has_a_test():
    marks = [
        mark
        for path in TESTS.rglob("test_*.py")
        for mark in SHOWN.findall(path.read_text(encoding="utf-8"))
    ]
    shown = {number for mark in marks for number in re.findall(r"F\d+", mark)}
    assert shown == set(faults.FAULTS) == {f"F{number}" for number in range(1, 56)}


def test_one_failure_among_many_is_what_its_row_says():
    lines = [
        {**LINE, "faults": ["F27"], "outcome": outcome}
        for outcome in ("passed", "failed", "skipped")
    ]
    row = next(row for row in faults.table(lines).splitlines() if row.startswith("| F27 "))
    assert (
        row
        == "| F27 | a rank hangs | a \\| b | hang | 7 | at most 2 | 6.5, 6.5 | **failed**: 1 of 3"
        " passed |"
    )


def test_a_fault_whose_tests_did_not_run_says_so():
    rows = faults.table([]).splitlines()
    assert sum("not tested here: " in row for row in rows) == len(faults.FAULTS)
    assert {row.count("|") for row in rows if row.startswith("| F")} == {9}
