"""One writer: on a real terminal the bar stands below whole lines, elsewhere lines stand alone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import builders

pytestmark = pytest.mark.process

PROGRAM = """
import json, sys, time
from pathlib import Path
from launch.base import processes
from launch.run_folder.layout import AttemptDir
from launch.supervise.screen import Screen

folder = Path(sys.argv[1])
screen, attempt = Screen(folder / "run.log"), AttemptDir(folder / "attempt")
screen.say("training a tokenizer")
for rows in (1000, 3000, 5000):
    screen.say(f"tokenising rows.parquet: {rows:,} of 5,000 rows, ETA 0:00:09")
    time.sleep(0.3)
screen.say("rows.parquet: 5,000 rows, 28 tokens on average")
screen.start(attempt)
with attempt.train_log.open("a") as log:
    for step in range(1, 5):
        beat = {"section": "step", "step": step, "max_steps": 4, "monotonic_s": 1.0, "p99_s": 0.1}
        beat |= {"rank": 0, "pid": 1, "boot": processes.boot_id()}
        attempt.heartbeat_file(0).write_text(json.dumps(beat))
        log.write(f"now  step {step}/4  epoch 0.10  ETA 0:00:0{4 - step}  loss 1.0  figures\\n")
        log.write(f"a line of rank 0 after step {step}\\n")
        log.flush()
        time.sleep(0.3)
        screen.update()
screen.stop()
screen.say("done: 4 steps")
"""
CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r\n?|\n|[^\x1b\r\n]+")


def terminal(text: str) -> list[str]:
    """The rows of a terminal that was sent this text."""
    rows, row, column = [""], 0, 0
    for match in CONTROL.finditer(text):
        if match[2] == "A":
            row -= int(match[1] or 1)
        elif match[2] == "K":
            assert match[1] == "2", match[0]
            rows[row] = ""
        elif match[2]:
            assert match[2] in "mlh", match[0]
        elif match[0].startswith(("\r", "\n")):
            column = 0
            row += match[0].endswith("\n")
            rows += [""] * (row + 1 - len(rows))
        else:
            rows[row] = (
                rows[row][:column].ljust(column) + match[0] + rows[row][column + len(match[0]) :]
            )
            column += len(match[0])
    return [row.rstrip() for row in rows]


def test_on_a_terminal_bars_never_run_into_lines_and_show_the_time_left(tmp_path):
    (tmp_path / "attempt").mkdir()
    sent = builders.on_terminal([sys.executable, "-c", PROGRAM, str(tmp_path)], tmp_path)
    assert "tokenising rows.parquet" in sent  # the bar of the rows, which is gone in the end
    assert "3000/5000" in sent
    rows = [row for row in terminal(sent) if row]
    assert rows[:6] == [
        "training a tokenizer",
        "rows.parquet: 5,000 rows, 28 tokens on average",
        *(f"a line of rank 0 after step {step}" for step in range(1, 5)),
    ]
    assert re.fullmatch(r"training \S+ 4/4 0:00:0\d ETA 0:00:00", rows[6])
    assert rows[7:] == ["loss 1.0  figures", "done: 4 steps"]


def test_without_a_terminal_each_line_stands_alone_with_the_time_left(tmp_path):
    (tmp_path / "attempt").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=builders.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert "tokenising rows.parquet: 3,000 of 5,000 rows, ETA 0:00:09" in lines
    assert "now  step 2/4  epoch 0.10  ETA 0:00:02  loss 1.0  figures" in lines
    assert (tmp_path / "run.log").read_text().splitlines() == lines
