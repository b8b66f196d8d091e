"""Processes that write to a ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.builders import CODE
from tests.unit.predict.history.entries import measurement

IMPORTS = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from pydantic import TypeAdapter
from launch.predict.history.calibration import Measurement
from launch.predict.history.ledger import Ledger

first = TypeAdapter(Measurement).validate_json(sys.argv[1])
"""
LAUNCHER = f"""{IMPORTS}
for line in sys.stdin:
    path, run_ids = json.loads(line)
    said, counts = [], []
    for run_id in run_ids:
        ledger = Ledger(Path(path), said.append)
        ledger.record(replace(first, run_id=run_id))
        counts.append(len(ledger.measurements()))
    print(json.dumps([said, counts]), flush=True)
"""


def started(code: str, *before: str, **env: str) -> subprocess.Popen[str]:
    """A process that runs the code with a measurement as its first argument."""
    argv = [*before, sys.executable, "-P", "-c", code, json.dumps(asdict(measurement()))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, env={"PYTHONPATH": str(CODE), **env}, **pipes)


class Launcher:
    """A process that records what it is told to."""

    def __init__(self, *before: str, **env: str) -> None:
        self.child = started(LAUNCHER, *before, **env)

    def begin(self, path: Path, run_ids: list[str]) -> None:
        self.child.stdin.write(json.dumps([str(path), run_ids]) + "\n")
        self.child.stdin.flush()

    def end(self) -> tuple[list[str], list[int]]:
        """Lines that were said, and the number of measurements read after each of its writes."""
        said, counts = json.loads(self.child.stdout.readline())
        return said, counts

    def close(self) -> None:
        self.child.stdin.close()
        assert self.child.wait(timeout=60) == 0
        self.child.stdout.close()
