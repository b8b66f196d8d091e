"""Predicted beside measured host RAM under bf16 on CPUs, over 300 micro-batches of 300 lengths, and
the CPU seconds that smaller caches of oneDNN's kernels cost.

Each configuration is trained by the launcher with the caches that lowmem sets
(launch/predict/memory/onednn.py); some are trained a second time with oneDNN's own, set by the
user, to show what the first saves. Their plan does not count these kernels.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording
from benchmarks.cpu_memory import AUTOCAST, CHECKPOINTING, GPT2, HALF, LLAMA, QWEN, T5, Case
from launch.predict.memory import onednn
from launch.run_folder.layout import RunDir
from tests.builders import write_parquet

SHAPES = 300
LENGTHS = range(8, 308)
UNBOUNDED = {onednn.ONEDNN: "1024", onednn.IDEEP: "1024"}  # the libraries' own
CASES = (
    Case("qwen2, autocast", QWEN, training=AUTOCAST),
    Case("llama, LoRA, bf16 weights", LLAMA, lora={"r": 16}, model=HALF),
    Case("t5, autocast", T5, training=AUTOCAST),
    Case("gpt2, bf16 weights", GPT2, model=HALF),
    Case("gpt2, autocast, DDP", GPT2, training=AUTOCAST, mode="multi_cpu", ranks=2),
    Case("qwen2, autocast, checkpointing", QWEN, training={**AUTOCAST, **CHECKPOINTING}),
)
COMPARED = ("qwen2, autocast",)  # with oneDNN's own caches


def write_data(folder: Path, case: Case) -> Path:
    """The recipe of a case whose rows have one length each: a new shape in every micro-batch."""
    recipe = cpu_memory.write_data(folder, case)
    rng = random.Random(0)
    rows = []
    for number in rng.sample(LENGTHS, SHAPES) * case.ranks:
        text = " ".join(rng.choices(cpu_memory.WORDS, k=number))
        prompt = text if case.is_encoder_decoder else "red"
        rows.append({"prompt": prompt, "response": text})
    write_parquet(folder / "train.parquet", rows)
    return recipe


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """Train a case with either caches; host RAM, predicted and measured, and CPU seconds."""
    case = replace(case, batch=1, length=384)
    recipe = write_data(folder, case)
    line = [sys.executable, "-m", "launch", "run", str(recipe)]
    env = recording.environment(folder) | {"LOWMEM_TRACES": os.environ["LOWMEM_TRACES"]}
    recording.timed([*line, "--dry-run"], env, folder / "dry.log", wait=False)
    row: dict[str, Any] = {"case": case.name}
    runs = {"bounded": {}, **({"unbounded": UNBOUNDED} if case.name in COMPARED else {})}
    for name, added in runs.items():
        words = [f"--name={name}", f"--output_dir={folder / name}"]
        took = recording.timed([*line, *words], env | added, folder / f"{name}.log", wait=False)
        (run,) = RunDir.all(folder / "runs", name)
        end = run.attempts()[-1].read_end()
        assert end is not None
        row[name] = {
            "predicted_bytes": run.attempts()[-1].read_plan().estimate.host_bytes,
            "measured_bytes": end.host_peak_bytes,
            **asdict(took),
        }
    return row


def error(row: Mapping[str, Any], name: str) -> float:
    return row[name]["predicted_bytes"] / row[name]["measured_bytes"] - 1


def seconds_ratio(row: Mapping[str, Any]) -> float | None:
    """CPU seconds of the run beside those with oneDNN's own caches; None: not compared."""
    return row["bounded"]["cpu_s"] / row["unbounded"]["cpu_s"] if "unbounded" in row else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sizes = [abs(error(row, "bounded")) for row in rows]
    seconds = [ratio for row in rows if (ratio := seconds_ratio(row)) is not None]
    return {
        "median_error": statistics.median(sizes),
        "largest_error": max(sizes),
        "largest_seconds_ratio": max(seconds, default=1.0),
    }


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    def mib(row: Mapping[str, Any], name: str, side: str) -> str:
        return f"{row[name][f'{side}_bytes'] / (1 << 20):.0f}"

    lines = [
        [
            row["case"],
            mib(row, "bounded", "predicted"),
            mib(row, "bounded", "measured"),
            f"{error(row, 'bounded'):+.1%}",
            mib(row, "unbounded", "measured") if "unbounded" in row else "",
            f"{ratio:.2f}" if (ratio := seconds_ratio(row)) else "",
        ]
        for row in rows
    ]
    head = ["case", "host RAM, predicted MiB", "measured", "error", "with oneDNN's own caches"]
    figures = summary(rows)
    return (
        f"{SHAPES} micro-batches of as many lengths. Host RAM of the job: median |error|"
        f" {figures['median_error']:.1%}, max {figures['largest_error']:.1%}. CPU seconds of the"
        f" whole run, beside the run with oneDNN's own caches (1,024 kernels): at most"
        f" {figures['largest_seconds_ratio']:.2f} times.\n\n"
        + recording.table([*head, "CPU seconds beside those"], lines)
    )


def main() -> None:
    only = sys.argv[1] if len(sys.argv) > 1 else ""  # cases whose name has it; nothing is recorded
    rows = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for number, case in enumerate(case for case in CASES if only in case.name):
            folder = Path(place) / str(number)
            folder.mkdir()
            rows.append(measured(case, folder))
            print(json.dumps(rows[-1]), flush=True)
    if only:
        print(text(rows))
    else:
        recording.write("bf16_shapes", {**summary(rows), "rows": rows}, text(rows))


if __name__ == "__main__":
    main()
