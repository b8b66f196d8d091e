"""Starts of another launcher's ranks: the short plan on the screen, the full plan in the log."""

from __future__ import annotations

import subprocess
import sys

from launch.report import first_screen
from tests import builders

CODE = """
import sys
from contextlib import ExitStack
from launch.commands import attach
from launch.recipe.guides import chatlm_flags
start = attach.from_request(chatlm_flags.translate(sys.argv[1:]))
with ExitStack() as locks:
    attach.open_run(start, locks)
"""


def start(tmp_path, *flags: str, **extra: str) -> list[str]:
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(24))
    argv = [f"--train_file={train}", "--data.validation_file=null", "--cpu", *flags]
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--use_fast_config=True", "--model.shape=llama-tiny", *argv],
        env=builders.environment(tmp_path / "workspace", **extra),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_start_without_the_launcher_shows_the_first_screen_and_logs_the_full_plan(tmp_path):
    lines = start(tmp_path)
    (first,) = (i for i, line in enumerate(lines) if line.startswith("plan for sft_fast on "))
    (last,) = (i for i, line in enumerate(lines) if line.startswith("  log "))
    assert lines[last - 1] == "  run        starting a new run"
    screen = lines[first : last + 1]
    assert len(screen) <= first_screen.LINES
    assert not [line for line in screen if "..." in line]  # it goes into a pipe
    assert any(line.startswith("  more       the log has ") for line in screen)
    (log,) = (tmp_path / "workspace/logs").glob("chat_trainer_sft_fast-*.log")
    assert lines[last].endswith(log.name)
    full_plan = log.read_text(encoding="utf-8")
    for detail in ("  schedule   ", "  kernels    ", "  output     ", "starting a new run"):
        assert detail in full_plan
        assert detail == "starting a new run" or detail not in "\n".join(lines)


def test_values_given_to_accelerate_that_do_not_run_are_on_the_screen_and_in_the_log(tmp_path):
    said = "accelerate was given mixed_precision fp8; the recipe says"
    lines = start(tmp_path, ACCELERATE_MIXED_PRECISION="fp8")
    assert sum(line.startswith(said) for line in lines) == 1
    (log,) = (tmp_path / "workspace/logs").glob("chat_trainer_sft_fast-*.log")
    assert log.read_text(encoding="utf-8").count(said) == 1
