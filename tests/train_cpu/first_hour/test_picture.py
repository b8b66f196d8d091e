"""The picture of the READMEs shows the lines that the quick start prints, apart from figures."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.commands.ending import sample_lines
from scripts import make_sample_data, render_picture
from tests import builders


def without_figures(lines: list[str]) -> list[str]:
    """The lines with each number as 0 and each duration in seconds, and without the name of the
    host and what other programs have of its cores."""
    plain = [re.sub(r"\d[\d.,:-]*", "0", line) for line in lines]
    plain = [re.sub(r", 0 taken by others: .*", "", line) for line in plain]
    plain = [re.sub(r"= 0 (min|h|days):", "= 0 s:", line) for line in plain]
    return [re.sub(r"^(plan for \S+ on ).*", r"\1HOST", line) for line in plain]


def first_screen(workspace: Path) -> list[str]:
    """The lines of a start on the CPU, which is stopped when it has shown its plan."""
    workspace.mkdir()
    environment = builders.environment(workspace, CUDA_VISIBLE_DEVICES="")
    argv = [sys.executable, "-P", "-m", "launch", "run", "sft_fast"]
    printed: list[str] = []
    with subprocess.Popen(
        argv, cwd=workspace, env=environment, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        for line in started.stdout:
            printed.append(line.rstrip("\n"))
            if line.startswith("  log "):
                started.send_signal(signal.SIGTERM)
        started.wait(timeout=120)
    return render_picture.plan(printed)


@pytest.mark.modes
def test_the_picture_shows_the_plan_and_the_last_lines_of_today(tmp_path):
    lines = render_picture.texts(render_picture.PICTURE.read_text(encoding="utf-8"))
    plan = first_screen(tmp_path / "workspace")
    assert len(plan) >= 12
    data = make_sample_data.write(tmp_path, 5000, 500, 23333)[0]
    python, script = (f"{render_picture.FOLDER}/{name}" for name in (".venv/bin/python", "scripts"))
    command = f"{python} {script}/chat.py {render_picture.FOLDER}/model_save/sft_fast"
    asked = [
        f"  chat       {command}",
        *(f"{'':13}{line}" for line in sample_lines(str(data), 1.0)),
    ]
    expected = [
        f"$ {render_picture.COMMAND}",
        render_picture.LEFT_OUT,
        *plan,
        render_picture.LEFT_OUT,
        "done: 0 steps in 0 s (0 s in all)",
        render_picture.LEFT_OUT,
        *asked,
    ]
    assert without_figures(lines) == without_figures(expected)


def test_the_drawn_lines_are_those_that_were_printed():
    printed = ["tracing", "plan for a on b", "  model  x", "  log    y", "step 2: 1 < 2 & 3"]
    printed += ["done: 3 steps", "  loss   0", "  chat   it", f"{'':13}a <b> & c", "  run    z"]
    lines = render_picture.shown(printed)
    end = [printed[5], "...", *printed[7:9]]
    assert lines == ["$ ./quick_start_sft_fast.sh", "...", *printed[1:4], "...", *end]
    assert render_picture.texts(render_picture.picture(lines)) == lines
