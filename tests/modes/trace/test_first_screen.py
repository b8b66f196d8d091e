"""What a user sees first of the quick start, and of a 7B model on a laptop's card."""

from __future__ import annotations

import re
import sys

import pytest

from tests import builders

LAPTOP = str(builders.CODE / "configs/machines/a5000-16g.yaml")
LABELS = ["model", "data", "tokens", "batch", "mode", "memory", "host RAM", "time"]


@pytest.mark.parametrize(
    "words", [["sft_fast", "--launch.mode=cpu"], ["lora_sft", "--machine", LAPTOP]], ids=" ".join
)
def test_the_first_screen_is_at_most_14_lines_of_100_columns_and_says_when_training_ends(
    words, tmp_path
):
    done = builders.launch(tmp_path, "plan", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 14
    labels = [line[2:12].rstrip() for line in lines if line[2] != " "]
    assert labels[1 : 1 + len(LABELS)] == LABELS
    assert "changed" in labels
    each = r"[\d.]+ s (a step predicted|\(no evidence for this card\))"
    end = rf"time  +{each} x [\d,]+ steps = [\d.]+ (s|min|h): ends about .*\d:\d\d$"
    assert re.search(end, done.stdout, re.MULTILINE)
    program = [sys.executable, "-m", "launch", "plan", *words]
    screen = builders.on_terminal(program, tmp_path)
    shown = screen[screen.index("plan for ") :].splitlines()
    assert len(shown) <= 14
    assert max(map(len, shown)) <= 100
    explained = builders.launch(tmp_path, "plan", *words, "--explain", COLUMNS="100")
    assert "  kernels " in explained.stdout
    assert "  schedule " in explained.stdout
