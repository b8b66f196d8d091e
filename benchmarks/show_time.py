"""Seconds of `python -m launch show` on the quick start's rows, from start to end: before its rows
are tokenised (a tokenizer is trained then) and afterwards."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.recording import timed

GOAL_S = 5.0
SHOW = [sys.executable, "-m", "launch", "show", "sft_fast"]
TRAIN = ["-m", "launch", "run", "sft_fast", "--training.max_steps=1"]


def repetitions(workspace: Path, count: int) -> list[dict[str, Any]]:
    """Wall and processor seconds of each."""
    env = recording.environment(workspace)
    timings = [timed(SHOW, env, workspace.parent / "log.txt", wait=False) for _ in range(count)]
    return [{"wall_s": one.wall_s, "cpu_s": one.cpu_s} for one in timings]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as place:
        workspace = Path(place) / "workspace"
        measured = {"not tokenised": repetitions(workspace, count)}
        train = [sys.executable, *TRAIN, f"--output_dir={place}/model"]
        timed(train, recording.environment(workspace), Path(place) / "log.txt", wait=False)
        measured["tokenised"] = repetitions(workspace, count)
    lines = [
        [name, *(f"{statistics.median(one[key] for one in rows):.1f}" for key in rows[0])]
        for name, rows in measured.items()
    ]
    text = f"Goal: {GOAL_S:.0f} s.\n\n"
    text += recording.table(["rows of the quick start", "median wall s", "processor s"], lines)
    recording.write("show_time", measured, text)
    print(text)


if __name__ == "__main__":
    main()
