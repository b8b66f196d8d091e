"""What a test that injects a fault has seen, one JSON line a test, for the table of docs/faults.md.

@pytest.mark.shows("F4", "kill -9 of a rank; the mark that it left is counted")  # the numbers, how
it is known to fire

The verdict, the exit code and the steps that were lost are read from the runs that the test has
left in its folder. `code` and `kind` stand beside the numbers where a test asserts them of
something that is no run; `injected()` notes when the fault is done, where no mark of
tests/faults/inject does.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.run_folder import manifest
from launch.run_folder.layout import AttemptDir, RunDir
from tests import builders

FILE = "LOWMEM_FAULT_LOG"  # the variable that names the file


def write(file: Path, item: pytest.Item, mark: pytest.Mark, report: pytest.TestReport) -> None:
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    runs = [RunDir(path.parent) for path in sorted(folder.rglob("attempts"))] if folder else []
    ends = [end for run in runs for attempt in run.attempts() if (end := _end(attempt))]
    *numbers, proof = mark.args
    line = {
        "faults": numbers,
        "proof": proof,
        "test": item.nodeid,
        "outcome": report.outcome,
        "kinds": sorted(
            {end["failure"]["kind"] for end in ends if end["failure"]} | _given(mark, "kind")
        ),
        "codes": sorted({*_codes(runs), *builders.exit_codes, *_given(mark, "code")}),
        "lost_steps": max((_lost(run) for run in runs), default=None),
        "detect_s": _detect_s(folder, item, runs),
        "took_s": round(report.duration, 1),
    }
    with file.open("a", encoding="utf-8") as log:
        log.write(json.dumps(line, ensure_ascii=False) + "\n")


def _given(mark: pytest.Mark, name: str) -> set[Any]:
    return {mark.kwargs[name]} if name in mark.kwargs else set()


def _end(attempt: AttemptDir) -> dict[str, Any] | None:
    file = attempt.supervisor_file
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _codes(runs: list[RunDir]) -> list[int]:
    last = [run.attempts()[-1] for run in runs if run.attempts()]
    return [end["exit_code"] for attempt in last if (end := _end(attempt))]


def _steps(attempt: AttemptDir) -> list[int]:
    if not attempt.events_file.exists():
        return []
    lines = attempt.events_file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def _lost(run: RunDir) -> int:
    """Steps that were trained, and again by a later attempt, or will have to be."""
    trained = [steps for attempt in run.attempts() if (steps := _steps(attempt))]
    again = sum(max(0, first[-1] - second[0] + 1) for first, second in pairwise(trained))
    kept = [
        manifest.step_of(path)
        for path in manifest.committed(run.checkpoints)
        if manifest.fault(path) is None
    ]
    return again + (max(0, trained[-1][-1] - max(kept, default=0)) if trained else 0)


def _detect_s(folder: Path | None, item: pytest.Item, runs: list[RunDir]) -> float | None:
    """From the first fault to the end of the attempt that it hit."""
    noted = [when for name, when in item.user_properties if name == "injected"]
    done = noted or [path.stat().st_mtime for path in folder.rglob("marks/*.*")] if folder else []
    files = [attempt.supervisor_file for run in runs for attempt in run.attempts()]
    ended = [file.stat().st_mtime for file in files if file.exists()]
    later = [when for when in ended if done and when >= min(done)]
    return round(min(later) - min(done), 1) if later else None
