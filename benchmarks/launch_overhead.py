"""Wall time of `python -m launch run` over the bare `accelerate launch` of the same training.

A is the whole launcher: plan, start, training, report. B is the line that --dry-run prints for an
identical run: the same ranks, model, rows, checkpoints and environment, nobody watching. One run
before fills the token cache, so neither tokenises. A and B alternate, each in a run folder of its
own. Training is about 30 s, so that fixed costs are seen.

The machine may be shared: each repetition waits up to a minute for a load of at most 1, and records
the cores that other processes used meanwhile. A pair in which they used more than --disturbed in A
or in B is kept in the file and left out of the medians; pairs go on until --pairs are undisturbed,
or --max-pairs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording

GOAL = 1.10


def recipe(folder: Path, steps: int) -> Path:
    """mini-chat on the sample data, 2 ranks over gloo, evaluation and checkpoints as the sample
    recipes have them."""
    script = recording.CODE / "scripts" / "make_sample_data.py"
    subprocess.run(
        [sys.executable, str(script), "--out-dir", str(folder / "data")],
        check=True,
        capture_output=True,
    )
    content = {
        "name": "overhead",
        "task": "sft",
        "output_dir": str(folder / "model"),
        "model": {"shape": "mini-chat"},
        "tokenizer": {"split": "character", "vocab_size": 512},
        "data": {
            "train_file": str(folder / "data/sft_train_small_train.parquet"),
            "validation_file": str(folder / "data/sft_train_small_valid.parquet"),
            "max_length": 128,
        },
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 2e-3,
            "logging_steps": 50,
            "save_steps": 400,
        },
        "launch": {"mode": "multi_cpu", "num_processes": 2},
    }
    path = folder / "overhead.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def repetition(way: str, folder: Path, path: Path) -> dict[str, Any]:
    """One whole training; way A or B."""
    env, log = recording.environment(folder / "workspace"), folder / "log.txt"
    argv = [sys.executable, "-m", "launch", "run", str(path), "--resume", "never"]
    plan_s = None
    if way == "B":
        dry = recording.timed([*argv, "--dry-run"], env, log, wait=False)
        plan_s = dry.wall_s
        argv = shlex.split(log.read_text(encoding="utf-8").strip().splitlines()[-1])
    timing = recording.timed(argv, env, log)
    newest = max(
        (folder / "workspace/runs/overhead").glob("*/plan.json"),
        key=lambda plan: plan.stat().st_mtime,
    ).parent
    outcome = json.loads((newest / "attempts/01/outcome.json").read_text(encoding="utf-8"))
    assert outcome["complete"], outcome
    print(
        f"{way}  {timing.wall_s:7.2f} s  load before {timing.load_before}, others"
        f" {timing.others_cores} cores"
    )
    return {
        "way": way,
        **asdict(timing),
        "train_s": round(outcome["train_seconds"], 3),
        "dry_run_s": plan_s,
    }


def pairs_of(
    folder: Path, path: Path, wanted: int, most: int, disturbed: float
) -> list[dict[str, Any]]:
    """A, B, A, B, ... until `wanted` pairs are undisturbed, at most `most` pairs."""
    found: list[dict[str, Any]] = []
    while len(found) < most and sum(pair["undisturbed"] for pair in found) < wanted:
        a, b = repetition("A", folder, path), repetition("B", folder, path)
        calm = max(a["others_cores"], b["others_cores"]) <= disturbed
        found.append(
            {"undisturbed": calm, "ratio": round(a["wall_s"] / b["wall_s"], 4), "A": a, "B": b}
        )
    return found


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over pairs, and the ratios that the goal is about."""

    def median(way: str, key: str) -> float:
        return statistics.median(pair[way][key] for pair in pairs)

    return {
        "pairs": len(pairs),
        "A_wall_s": round(median("A", "wall_s"), 3),
        "B_wall_s": round(median("B", "wall_s"), 3),
        "ratio_of_medians": round(median("A", "wall_s") / median("B", "wall_s"), 4),
        "median_of_pairwise_ratios": round(statistics.median(pair["ratio"] for pair in pairs), 4),
        "overhead_s": round(
            statistics.median(pair["A"]["wall_s"] - pair["B"]["wall_s"] for pair in pairs), 3
        ),
        "dry_run_s": round(median("B", "dry_run_s"), 3),
        "train_s": {way: round(median(way, "train_s"), 3) for way in "AB"},
        "besides_training_s": {
            way: round(
                statistics.median(pair[way]["wall_s"] - pair[way]["train_s"] for pair in pairs), 3
            )
            for way in "AB"
        },
        "ratio_of_train_s": round(median("A", "train_s") / median("B", "train_s"), 4),
        "cpu_s": {way: round(median(way, "cpu_s"), 2) for way in "AB"},
    }


def text_of(
    pairs: list[dict[str, Any]], every: dict[str, Any], chosen: dict[str, Any], disturbed: float
) -> str:
    rows = []
    for number, pair in enumerate(pairs, start=1):
        loads = " / ".join(
            f"{pair[way]['load_before']:.2f}, {pair[way]['others_cores']:.2f}" for way in "AB"
        )
        walls = [f"{pair[way]['wall_s']:.2f}" for way in "AB"]
        rows.append([number, *walls, pair["ratio"], loads, "yes" if pair["undisturbed"] else "no"])
    head = [
        "pair",
        "A: launch run, s",
        "B: accelerate launch, s",
        "A / B",
        "load before, others' cores: A / B",
        "counts",
    ]
    return (
        f"A / B = **{chosen['ratio_of_medians']:.3f}** (medians of {chosen['pairs']} pairs:"
        f" {chosen['A_wall_s']:.2f} s over {chosen['B_wall_s']:.2f} s; median of the pairwise"
        f" ratios {chosen['median_of_pairwise_ratios']:.3f}; goal at most {GOAL:.2f}). Median of A"
        f" - B: {chosen['overhead_s']:.2f} s; a whole --dry-run takes {chosen['dry_run_s']:.2f} s."
        f" The training loop alone, by the ranks' own clock: {chosen['train_s']['A']:.2f} s"
        f" watched, {chosen['train_s']['B']:.2f} s bare; the rest, imports and report:"
        f" {chosen['besides_training_s']['A']:.2f} s and {chosen['besides_training_s']['B']:.2f}"
        f" s.\n\nA pair counts when other processes used at most {disturbed} cores. Over all"
        f" {every['pairs']} pairs the ratio of the medians is {every['ratio_of_medians']:.3f}, the"
        f" median of the pairwise ratios {every['median_of_pairwise_ratios']:.3f}.\n\n"
        + recording.table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="undisturbed pairs to measure")
    parser.add_argument(
        "--max-pairs", type=int, default=15, help="stop after as many, disturbed ones included"
    )
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps of the training")
    parser.add_argument(
        "--disturbed", type=float, default=0.15, help="cores of others that spoil a pair"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = recipe(folder, arguments.steps)
        warm = [sys.executable, "-m", "launch", "run", str(path), "--training.max_steps=2"]
        recording.timed(
            warm, recording.environment(folder / "workspace"), folder / "log.txt", wait=False
        )  # fills the token cache
        pairs = pairs_of(folder, path, arguments.pairs, arguments.max_pairs, arguments.disturbed)
    calm = [pair for pair in pairs if pair["undisturbed"]]
    every, chosen = summary(pairs), summary(calm or pairs)
    ways = {
        "A": "python -m launch run overhead.yaml --resume never",
        "B": (
            "the line that `python -m launch run overhead.yaml --resume never --dry-run` prints"
            " last"
        ),
    }
    measured = {
        "ways": ways,
        "goal": GOAL,
        "undisturbed": chosen,
        "all": every,
        "repetitions": pairs,
    }
    recording.write("launch_overhead", measured, text_of(pairs, every, chosen, arguments.disturbed))


if __name__ == "__main__":
    main()
