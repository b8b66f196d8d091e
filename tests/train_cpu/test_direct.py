"""The guides' own lines: the ranks that were asked for, on the backend that was asked for, or an
error."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import builders

SCRIPT = str(builders.CODE / "train_low_mem.py")


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """The guide's flags, on a tiny model and a few rows."""
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(24))
    return [
        SCRIPT,
        "train",
        "--is_finetune=True",
        "--use_fast_config=True",
        "--batch_size_per_gpu=3",
        "--model.shape=llama-tiny",
        "--training.max_steps=2",
        "--training.bf16=false",
        f"--train_file={train}",
        "--data.validation_file=null",
    ]


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.modes
def test_accelerate_multi_gpu_trains_two_ranks_on_a_machine_without_gpus(tmp_path, flags):
    said = outcome(
        builders.accelerate(
            tmp_path / "h", "--multi_gpu", "--num_processes", "2", *flags, ACCELERATE_USE_GLOO="1"
        )
    )
    assert len(re.findall(r"rank [01] of 2 on .*backend gloo \(torch.distributed\)", said)) == 2
    assert "3 per device x 2 accumulation x 2 processes = 12 effective" in said
    (log,) = (tmp_path / "h/logs").glob("chat_trainer_sft_fast-*.log")
    assert "ACCELERATE_USE_GLOO=1" in log.read_text(encoding="utf-8")
    run = builders.only_run(tmp_path / "h", "sft_fast")
    assert [event["samples_seen"] for event in builders.events(run)] == [12, 24]
    assert (tmp_path / "h/model_save/sft_fast/config.json").exists()


@pytest.mark.modes
def test_accelerate_cpu_gives_the_ranks_that_were_asked_for_not_one(tmp_path, flags):
    """By starting torchrun, which is a third way to start the entrypoint."""
    said = outcome(builders.accelerate(tmp_path / "h", "--cpu", "--num_processes", "2", *flags))
    assert "starting 2 with torchrun" in said
    assert len(re.findall(r"rank [01] of 2 on .*backend gloo \(torch.distributed\)", said)) == 2


def test_an_unknown_flag_is_one_line_before_torch_is_loaded(tmp_path):
    argv = [sys.executable, "-X", "importtime", SCRIPT, "train", "--batch_sze_per_gpu=20"]
    done = subprocess.run(
        argv, env=builders.environment(tmp_path / "h"), capture_output=True, text=True, timeout=60
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert len(lines) == 1
    assert "did you mean --batch_size_per_gpu" in lines[0]
    assert " torch\n" not in done.stderr
