"""Seconds of a step of ours over those of a bare loop of the same step (benchmarks/bare_loop.py).
On CPUs.

A model of 1 M parameters trains on the sample data with the batch of the quick start, and with a
quarter of it: small enough that what a trainer does beside the step is seen. transformers.Trainer
as it is stands between the two (benchmarks/peer_trainer.py). All see the same rows in the same
order, so their losses have to agree; one thread each; turns, round after round; the first steps are
left out. Seconds are those from the end of a step to the end of the last: data, events and logs
count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import padding, recording, trainings
from benchmarks.padding import SEED
from benchmarks.peers import apart
from benchmarks.trainings import ONE_THREAD, OPTIMIZER
from launch.run_folder.steps import events

GOAL = 1.15
AGREES = 1e-4
WARM_UP = 20  # steps
BATCHES, LOGGING_STEPS = (32, 8), 50  # 32 and 50: configs/recipes/sft_fast.yaml without a GPU
MILLION = {
    "model_type": "llama",
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SAMPLE = padding.Case(
    "sample data",
    "sft_train_small_train.parquet",
    ("prompt", "response"),
    MILLION,
    128,
    vocabulary=512,
    split="character",
)


@dataclass(frozen=True)
class Job:
    """One training that all ways do."""

    batch: int
    steps: int
    model: Path
    tokens: Path
    order: list[int]  # of its rows
    content: trainings.Content  # our recipe
    workspace: Path


def other(way: str, job: Job, folder: Path) -> tuple[list[float], list[float]]:
    """(ends of steps as unix times, means of the losses of each stretch) of the bare loop or of
    plain Trainer."""
    if way == "bare loop":
        asked = {
            "model": str(job.model),
            "tokens": str(job.tokens),
            "batch": job.batch,
            "steps": job.steps,
        }
        asked |= {"seed": SEED, "times_file": str(folder / "times.json"), **OPTIMIZER}
        (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        argv = [sys.executable, "-m", "benchmarks.bare_loop", str(folder / "asked.json")]
    else:
        arguments = {"per_device_train_batch_size": job.batch, "max_steps": job.steps, "seed": SEED}
        arguments |= {"logging_steps": LOGGING_STEPS, **OPTIMIZER}
        argv = trainings.peer(folder, job.model, job.tokens, arguments, job.order)
    recording.timed(
        argv, {**recording.environment(job.workspace), **ONE_THREAD}, folder / "log.txt", wait=False
    )
    if way == "bare loop":
        found = json.loads((folder / "times.json").read_text(encoding="utf-8"))
        return found["times"], means(found["losses"])
    return [line["time"] for line in trainings.steps_of(folder)], trainings.losses_of(folder)


def means(losses: Sequence[float]) -> list[float]:
    """Of each whole stretch of LOGGING_STEPS, as they are logged."""
    whole = len(losses) // LOGGING_STEPS * LOGGING_STEPS
    return [
        statistics.fmean(losses[at : at + LOGGING_STEPS]) for at in range(0, whole, LOGGING_STEPS)
    ]


def repetition(way: str, job: Job, folder: Path) -> dict[str, Any]:
    """One training: seconds of a step, and the losses."""
    folder.mkdir()
    load = round(os.getloadavg()[0], 2)
    if way == "ours":
        said = events(trainings.run(job.content, folder, job.workspace, ONE_THREAD))
        times, losses = [one.time for one in said], means([one.loss for one in said])
    else:
        times, losses = other(way, job, folder)
    assert len(times) == job.steps, (way, len(times))
    step_s = (times[-1] - times[WARM_UP - 1]) / (job.steps - WARM_UP)
    return {"step_s": round(step_s, 6), "losses": [round(loss, 6) for loss in losses], "load": load}


def job_of(batch: int, steps: int, rows: Path, model: Path, place: Path) -> Job:
    """Its plan and its tokens are made once, so that no repetition makes them."""
    from training.data.batches import TokenRows
    from training.data.sample_order import SampleOrder

    training = {
        **OPTIMIZER,
        "per_device_train_batch_size": batch,
        "logging_steps": LOGGING_STEPS,
        "seed": SEED,
    }
    content = trainings.sft(
        "overhead", model, rows, SAMPLE.max_length, {}, {**training, "max_steps": steps}
    )
    warm = {**content, "training": {**content["training"], "max_steps": 2}}
    tokens = trainings.tokens_of(trainings.run(warm, place, place / "workspace", ONE_THREAD))
    order = SampleOrder(len(TokenRows(tokens)), batch, 1, 1, 0, SEED)
    numbers = [row for step in range(1, steps + 1) for row in order.rows_of(step, [0])]
    assert len(numbers) == steps * batch, (
        f"an epoch of {order.num_samples} rows has no {steps} whole steps"
    )
    return Job(batch, steps, model, tokens, numbers, content, place / "workspace")


def measured(job: Job, rounds: int, place: Path) -> dict[str, Any]:
    """Every repetition of every way, and how far their losses are apart."""
    ways: dict[str, list[dict[str, Any]]] = {"bare loop": [], "plain Trainer": [], "ours": []}
    for turn in range(rounds):
        for way, runs in ways.items():
            runs.append(repetition(way, job, place / f"{way} {job.batch} {turn}"))
            print(f"{job.batch} rows  {way}  {runs[-1]['step_s'] * 1e3:.2f} ms a step", flush=True)
    far = apart({way: runs[0]["losses"] for way, runs in ways.items()})
    assert far < AGREES, f"the losses are {far:.1e} apart: not one computation"
    return {"batch": job.batch, "apart": far, "ways": ways}


def text_of(jobs: Sequence[Mapping[str, Any]], steps: int) -> str:
    rows, bare = [], []
    for job in jobs:
        bare = job["ways"]["bare loop"]
        for way, runs in job["ways"].items():
            pairs = [(one["step_s"], base["step_s"]) for one, base in zip(runs, bare, strict=True)]
            ratios = [one / base for one, base in pairs]
            rows.append(
                [
                    job["batch"],
                    way,
                    f"{statistics.median(one['step_s'] for one in runs) * 1e3:.2f}",
                    f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                    f"{statistics.median(one - base for one, base in pairs) * 1e3:.2f}",
                    " / ".join(f"{one['load']:.1f}" for one in runs),
                ]
            )
    head = [
        "rows a step",
        "way",
        "ms a step, median",
        "over the bare loop",
        "ms over it, median",
        "load before",
    ]
    return (
        f"1.1 M parameters, {steps} steps, the first {WARM_UP} left out, {len(bare)} rounds. Goal:"
        f" at most {GOAL} with the quick start's {BATCHES[0]} rows. Means of {LOGGING_STEPS} losses"
        f" are at most {max(job['apart'] for job in jobs):.1e} apart (relative).\n\n"
        + recording.table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="optimizer steps of each run, 50 or more; an epoch has 156 whole ones",
    )
    arguments = parser.parse_args()
    script = recording.CODE / "scripts" / "make_sample_data.py"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run(
            [sys.executable, str(script), "--out-dir", str(place / "data")],
            check=True,
            capture_output=True,
        )
        rows, model = padding.made(SAMPLE, place / "data", place / "made")
        jobs = [job_of(batch, arguments.steps, rows, model, place) for batch in BATCHES]
        found = [measured(job, arguments.rounds, place) for job in jobs]
    recording.write(
        "trainer_overhead", {"goal": GOAL, "jobs": found}, text_of(found, arguments.steps)
    )


if __name__ == "__main__":
    main()
