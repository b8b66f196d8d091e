"""Private memory of each rank (RssAnon of /proc/<pid>/status) while training on more and more rows,
ours and a peer's.

Ours is the product: `python -m launch run` on a CPU with 2 real ranks over gloo, rows tokenised
once and mapped; with the fewest and the most rows also ordered by length, for which each rank reads
all lengths, and packed into sequences. The other, benchmarks/list_in_ram.py, keeps every row in
each rank as a Python dict and tokenises in the collator; same launcher and environment, model,
tokenizer, batch and number of steps. All are read from outside every 20 ms; a rank's figure is its
largest over the last half of the steps. Growth is that of the larger rank from the fewest rows to
the most. Rows are random Chinese-like text with the mean lengths of real chat data (40 and 166
characters); repetitions differ in the seed, which sets weights and order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import chat_rows, rank_memory, recording
from benchmarks.rank_memory import Samples

GOAL_MB = 20.0  # of growth per rank, ours
SHAPE, MAX_LENGTH, BATCH = "llama-tiny", 512, 2


def recipe(folder: Path, rows: Path, steps: int) -> Path:
    content = {
        "name": f"rows-{rows.stem}",
        "task": "sft",
        "output_dir": str(folder / "model"),
        "model": {"shape": SHAPE},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {"train_file": str(rows), "max_length": MAX_LENGTH},
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 10 * steps,
        },
        "launch": {"mode": "multi_cpu", "num_processes": 2},
    }
    path = folder / f"{rows.stem}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def run_folder(folder: Path, path: Path) -> Path:
    return max(
        (folder / f"workspace/runs/rows-{path.stem}").glob("*/plan.json"), key=os.path.getmtime
    ).parent


def rendered(folder: Path, path: Path, *words: str) -> Path:
    """A run folder as --dry-run leaves it."""
    argv = [
        sys.executable,
        "-m",
        "launch",
        "run",
        str(path),
        "--resume",
        "never",
        "--dry-run",
        *words,
    ]
    subprocess.run(
        argv, env=recording.environment(folder / "workspace"), check=True, capture_output=True
    )
    return run_folder(folder, path)


def tokenised(folder: Path, path: Path, count: int, *words: str) -> dict[str, Any]:
    """Fill the token cache with the launcher's own child; its speed and peak memory."""
    run = rendered(folder, path, *words)
    argv = [sys.executable, "-m", "training.children.tokenise", "rows"]
    argv += ["--run-dir", str(run), "--attempt", "1"]
    began = time.monotonic()
    child = subprocess.Popen(
        [*argv, "--cache", str(folder / "workspace/.cache")],
        env=recording.environment(folder / "workspace"),
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, status
    seconds = time.monotonic() - began
    peak_mb = round(usage.ru_maxrss / 1000, 1)
    return {
        "rows": count,
        "seconds": round(seconds, 1),
        "rows_per_s": round(count / seconds),
        "peak_rss_mb": peak_mb,
    }


def ours(
    folder: Path, path: Path, steps: int, seed: int, *words: str
) -> tuple[list[Samples], list[float]]:
    """Samples of each rank, and the times of the steps."""
    argv = [
        sys.executable,
        "-m",
        "launch",
        "run",
        str(path),
        "--resume",
        "never",
        f"--training.seed={seed}",
        *words,
    ]
    ranks = rank_memory.watched(
        argv, recording.environment(folder / "workspace"), folder / "log.txt"
    )
    events = (
        (run_folder(folder, path) / "attempts/01/events.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return ranks, [json.loads(line)["time"] for line in events]


def in_ram(folder: Path, path: Path, steps: int, seed: int) -> tuple[list[Samples], list[float]]:
    """The same of the list in RAM, under the Accelerate configuration and environment of a rendered
    run of ours."""
    times = folder / "times.jsonl"
    times.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    argv += [
        "--config_file",
        str(rendered(folder, path) / "accelerate.yaml"),
        "-m",
        "benchmarks.list_in_ram",
    ]
    argv += [
        "--rows",
        str(path.with_suffix(".parquet")),
        "--tokenizer",
        str(folder / "tokenizer"),
        "--shape",
        SHAPE,
    ]
    argv += [
        "--max-length",
        str(MAX_LENGTH),
        "--batch",
        str(BATCH),
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    ranks = rank_memory.watched(
        [*argv, "--steps-file", str(times)],
        {**recording.environment(folder / "workspace"), **env},
        folder / "log.txt",
    )
    return ranks, [
        json.loads(line)["time"] for line in times.read_text(encoding="utf-8").splitlines()
    ]


BY_LENGTH, PACKED = "ours, data.group_by_length", "ours, data.packing"
WORDS = {BY_LENGTH: "--data.group_by_length=true", PACKED: "--data.packing=true"}
LOADERS = {
    "ours": ours,
    BY_LENGTH: lambda *about: ours(*about, WORDS[BY_LENGTH]),
    PACKED: lambda *about: ours(*about, WORDS[PACKED]),
    "list_in_ram": in_ram,
}


def sizes_of(loader: str, sizes: list[int]) -> list[int]:
    """Numbers of rows that a loader is measured with."""
    return [sizes[0], sizes[-1]] if loader in WORDS else sizes


def measured(ranks: list[Samples], steps: list[float]) -> dict[str, Any]:
    """MB of each rank: the largest over the last half of the steps, and the largest of its life."""
    begin, end = steps[len(steps) // 2 - 1], steps[-1]
    steady = [max(mb for at, mb in samples if begin <= at <= end) for samples in ranks]
    return {
        "mb": [round(value, 1) for value in steady],
        "peak_mb": [round(max(mb for _, mb in samples), 1) for samples in ranks],
        "step_s": round((end - begin) / (len(steps) - len(steps) // 2), 3),
    }


def growth(repetitions: list[dict[str, Any]], loader: str, sizes: list[int]) -> dict[str, Any]:
    """Medians over the repetitions of the larger rank, and what a row costs."""
    sizes = sizes_of(loader, sizes)

    def median(rows: int, key: str) -> float:
        found = [
            max(one[key]) for one in repetitions if one["loader"] == loader and one["rows"] == rows
        ]
        return round(statistics.median(found), 1)

    more = {key: median(sizes[-1], key) - median(sizes[0], key) for key in ("mb", "peak_mb")}
    return {
        "median_mb": {str(rows): median(rows, "mb") for rows in sizes},
        "median_peak_mb": {str(rows): median(rows, "peak_mb") for rows in sizes},
        "growth_mb": round(more["mb"], 1),
        "growth_of_peak_mb": round(more["peak_mb"], 1),
        "kb_per_row": round(more["mb"] * 1000 / (sizes[-1] - sizes[0]), 4),
    }


def text_of(found: dict[str, Any], sizes: list[int]) -> str:
    head = [
        "loader",
        "rows",
        "median, MB",
        "every repetition: rank 0 / rank 1, MB",
        "peak with loading, MB",
    ]
    rows = []
    for loader in LOADERS:
        for size in sizes_of(loader, sizes):
            runs = [
                one
                for one in found["repetitions"]
                if (one["loader"], one["rows"]) == (loader, size)
            ]
            every = ", ".join(" / ".join(map(str, one["mb"])) for one in runs)
            medians = found[loader]
            peak = medians["median_peak_mb"][str(size)]
            rows.append([loader, f"{size:,}", medians["median_mb"][str(size)], every, peak])
    speeds = [
        f"{one['rows']:,} rows at {one['rows_per_s']:,} rows/s" for one in found["tokenising"]
    ]
    peaks = ", ".join(f"{one['peak_rss_mb']} MB" for one in found["tokenising"])
    a, b = found["ours"], found["list_in_ram"]
    others = ", ".join(
        f"{found[loader]['growth_mb']} MB with {words[2:]}" for loader, words in WORDS.items()
    )
    return (
        f"Private memory per rank grows by **{a['growth_mb']} MB** with ours ({a['kb_per_row']} kB"
        f" a row; goal below {GOAL_MB:g} MB), {others}, and by {b['growth_mb']} MB with the list in"
        f" RAM ({b['kb_per_row']} kB a row) from {sizes[0]:,} to {sizes[-1]:,} rows. RssAnon of the"
        " larger rank, its largest over the last half of the steps; MB are 10^6.\n\n"
        + recording.table(head, rows)
        + f"\nTokenising, once before the ranks: {'; '.join(speeds)}. Peak resident memory of that"
        f" child: {peaks}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[5_000, 50_000, 500_000], help="from few to many"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each training")
    arguments = parser.parse_args()
    sizes, steps = sorted(arguments.rows), arguments.steps
    repetitions: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipes = {size: recipe(folder, folder / f"{size}.parquet", steps) for size in sizes}
        for size in sizes:
            chat_rows.write_rows(folder / f"{size}.parquet", size)
        chat_rows.make_tokenizer(folder / f"{sizes[0]}.parquet", folder / "tokenizer")
        tokenising = [tokenised(folder, recipes[size], size) for size in sizes]
        for size in sizes_of(PACKED, sizes):
            tokenised(folder, recipes[size], size, WORDS[PACKED])
        for seed in range(1, arguments.repetitions + 1):
            for size in sizes:
                for loader, start in LOADERS.items():
                    if size not in sizes_of(loader, sizes):
                        continue
                    load = round(os.getloadavg()[0], 2)
                    one = measured(*start(folder, recipes[size], steps, seed))
                    repetitions.append(
                        {"loader": loader, "rows": size, "seed": seed, "load_before": load, **one}
                    )
                    print(loader, size, one, flush=True)
    found: dict[str, Any] = {
        "goal_mb": GOAL_MB,
        "unit": "MB = 10^6 bytes",
        "tokenising": tokenising,
    }
    found |= {loader: growth(repetitions, loader, sizes) for loader in LOADERS}
    ratio = (
        found["list_in_ram"]["growth_mb"] / found["ours"]["growth_mb"]
        if found["ours"]["growth_mb"] > 0
        else None
    )
    found |= {"list_in_ram_over_ours": ratio, "repetitions": repetitions}
    recording.write("host_ram_vs_rows", found, text_of(found, sizes))


if __name__ == "__main__":
    main()
