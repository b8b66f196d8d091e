"""The records of a run of 200,000 steps: CPU seconds and memory of what reads them.

Two tiny runs are trained, one is cut off, and their records are made longer: each step was logged,
and every thousandth was evaluated. Then `run` of the same line (--dry-run: it finds the run and its
checkpoint), `compare`, `samples`, and the page that a run writes at its end read them, each in a
process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import recording
from launch.run_folder.layout import RunDir
from tests import builders

STEPS = 200_000
GOAL_S, GOAL_BYTES = 2.0, 200_000_000
GOAL_PAGE_BYTES = 3_000_000
# the report of a run: its steps, as launch/commands/ending.py reads and draws them
PAGE = """
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from launch.base.workspace import Workspace
from launch.commands import ending
from launch.run_folder.layout import RunDir
from launch.schema.result import RunResult
run = RunDir(Path(sys.argv[1]))
attempt = run.attempts()[-1]
choice = SimpleNamespace(
    recipe=run.read_recipe(), machine=attempt.read_machine(), plan=run.read_plan()
)
result = RunResult(str(run.root), 0, None, 1.0, 1, summary=asdict(attempt.read_outcome()))
ending.report(Workspace.here(), choice, result, SimpleNamespace(say=print))
"""


def lengthened(run: RunDir) -> int:
    """Repeat the records of a run's last attempt until there are STEPS; the bytes of all."""
    attempt = run.attempts()[-1]
    steps = [json.loads(line) for line in attempt.events_file.read_text("utf-8").splitlines()]
    scored = [json.loads(line) for line in attempt.held_out_file.read_text("utf-8").splitlines()]
    samples = attempt.samples_file(0).read_bytes()
    with attempt.events_file.open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            old = steps[step % len(steps)]
            time = steps[0]["time"] + step * old["seconds"]
            file.write(json.dumps({**old, "step": step, "max_steps": STEPS, "time": time}) + "\n")
    with attempt.held_out_file.open("w", encoding="utf-8") as file:
        for step in range(1000, STEPS + 1, 1000):
            file.write(json.dumps({**scored[0], "step": step}) + "\n")
    numbers = array("i", samples)
    starts = [0]
    while starts[-1] < len(numbers):  # a record: step, number of rows, rows
        starts.append(starts[-1] + 2 + numbers[starts[-1] + 1])
    rows = [numbers[start + 1 : end] for start, end in pairwise(starts)]
    with attempt.samples_file(0).open("wb") as file:
        for step in range(STEPS):
            file.write(array("i", [step + 1, *rows[step % len(rows)]]).tobytes())
    log = attempt.log_file.read_bytes()
    attempt.log_file.write_bytes(log * (STEPS * 80 // len(log)))
    return sum(path.stat().st_size for path in run.root.rglob("*") if path.is_file())


def measured(argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """CPU seconds and highest resident bytes of a command."""
    child = subprocess.Popen(argv, env=env, cwd=recording.CODE, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0, argv
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "highest_bytes": usage.ru_maxrss * 1024,
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        workspace = folder / "workspace"
        recipe = str(builders.recipe(folder))
        for words in ([], ["--name=other", f"--output_dir={folder / 'other'}"]):
            done = builders.launch(workspace, "run", recipe, *words)
            assert done.returncode == 0, done.stderr
        cut_off, complete = (RunDir.all(workspace / "runs", name)[0] for name in ("tiny", "other"))
        cut_off.attempts()[-1].outcome_file.unlink()
        shutil.rmtree(sorted(cut_off.checkpoints.glob("checkpoint-*"))[-1])
        env = builders.environment(workspace)
        launch = [sys.executable, "-m", "launch"]
        commands = {
            "resume: the same line, --dry-run": [*launch, "run", recipe, "--dry-run"],
            "compare": [*launch, "compare", str(cut_off.root), str(complete.root)],
            "samples": [*launch, "samples", str(complete.root)],
            "report.html": [sys.executable, "-c", PAGE, str(complete.root)],
        }
        short = {name: measured(argv, env) for name, argv in commands.items()}
        size = max(lengthened(run) for run in (cut_off, complete))
        long = {name: measured(argv, env) for name, argv in commands.items()}
        page_bytes = complete.report_file.stat().st_size
    rows = [
        [
            name,
            f"{long[name]['cpu_s']:.2f}",
            f"{short[name]['cpu_s']:.2f}",
            f"{long[name]['highest_bytes'] / 1e6:.0f}",
            f"{short[name]['highest_bytes'] / 1e6:.0f}",
        ]
        for name in commands
    ]
    head = ["command", "CPU seconds", "of 12 steps", "highest MB", "of 12 steps"]
    text = (
        f"A run of {STEPS:,} steps; its folder has {size / 1e6:.0f} MB. Goals: {GOAL_S:g} s and"
        f" {GOAL_BYTES / 1e6:.0f} MB for a run; compare reads two. The page has"
        f" {page_bytes / 1e6:.2f} MB, of at most {GOAL_PAGE_BYTES / 1e6:g}.\n\n"
        + recording.table(head, rows)
    )
    figures = {
        "steps": STEPS,
        "folder_bytes": size,
        "page_bytes": page_bytes,
        "long": long,
        "short": short,
    }
    recording.write("long_log", figures, text)
    of_goals = [row for name, row in long.items() if name != "compare"]  # it reads two such runs
    within = all(row["cpu_s"] <= GOAL_S and row["highest_bytes"] <= GOAL_BYTES for row in of_goals)
    return 0 if within and page_bytes <= GOAL_PAGE_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
