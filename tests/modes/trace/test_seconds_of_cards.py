"""Predicted beside measured seconds: one published or measured training of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import seconds_of_cards
from launch.data.worker import WORKER


@pytest.mark.parametrize(
    "name",
    [
        "fsdpqlora-4090x2-lora7b-ddp",  # GeForce, two cards
        "qwen-7b-lora-2048",  # A100
        "qwen-1.8b-lora-512",  # A100, waits for its host
        "h200-c3-ours",  # QLoRA, computes all the time
        "h200-c1-lowmem-grouped",  # all weights, waits for its host
        "h200-c2-lowmem-grouped-bf16",  # LoRA, waits for its host
        "nanogpt-gpt2-a100",
    ],
)
def test_seconds_are_within_a_quarter_of_what_was_measured(name: str, tmp_path: Path):
    about = seconds_of_cards.evidence()
    rows = [row for row in about["rows"] if row["id"] == name]
    with WORKER:
        (row,) = seconds_of_cards.measured_rows({**about, "rows": rows}, name, tmp_path)
    assert 0.8 < row["ratio"] < 1.25
