"""The comparison on a card (benchmarks/gpu_speed.py), rehearsed: two ways of a case take turns on
the driver without a card. Kernels do nothing, so no figure means anything."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import gpu_speed_bundle, gpu_speed_venv
from launch.schema.model_sections import TokenizerSection
from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card
from training.data import tokenizer as tokenizers

NUM_STEPS = 14


def write_rows(folder: Path) -> None:
    """Rows of the case as gpu_speed_bundle lays them out, of a few words."""
    folder.mkdir(parents=True)
    rows = [
        {
            "prompt": f"question {n}",
            "response": " ".join(f"word{m % 90}" for m in range(n, n + 700)),
        }
        for n in range(3 * NUM_STEPS)
    ]
    texts = map(gpu_speed_bundle.text_of, rows)
    tokenizer = tokenizers.train(texts, TokenizerSection(), 512)
    tokenizer.save_pretrained(folder / "tokenizer")
    pq.write_table(pa.Table.from_pylist(rows), folder / "long.parquet")
    gpu_speed_bundle.blocks(rows, tokenizer, folder / "long.arrow")


def measured(place: Workplace, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The lines of results of a comparison."""
    write_rows(folder / "work/data")
    (folder / "out").mkdir()
    python = gpu_speed_venv.make(folder / "venv", [])
    argv = [str(python), "-P", "-m", "benchmarks.gpu_speed", "--small", *words]
    argv += ["--work", str(folder / "work"), "--out", str(folder / "out"), "--seconds", "200"]
    done = subprocess.run(
        argv,
        env=place.environment(PYTHONPATH=str(builders.CODE)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (folder / "out/results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_two_ways_take_turns_and_nothing_is_left(tmp_path: Path):
    place = Workplace(tmp_path, Card("NVIDIA H200", 140, "9.0", 132))
    about, *lines = measured(place, tmp_path, "--only", "^c3-(ours|plain)$", "--rounds", "2")
    assert about["is_rehearsal"]
    turns = [line["name"] for line in lines if line["stage"] == "segment"]
    assert turns == ["c3-ours", "c3-plain"] * 2
    ours, plain = (line for line in lines if line["stage"] == "training")
    for row in (ours, plain):
        assert "failed" not in row, row["log"]
        assert len(row["segments"]) == 2
        assert row["ms_a_step"] > 0
        assert row["profile"]["aten_ops_a_step"] > 100, row["profile"]
        assert row["peak_reserved"] >= row["peak_allocated"] > 0
    assert 0 < ours["tokens_a_step"] <= ours["computed_tokens_a_step"]
    assert ours["predicted_seconds_per_step"] > 0
    assert ours["phases"]["step"]["allocated"] == ours["peak_allocated"]
    assert ours["strategy"]["mode"] == "single_gpu"
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info)]
    assert not left
