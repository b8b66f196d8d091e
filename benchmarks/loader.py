"""Tokens a second of the data loader alone, beside what the fastest recipe consumes. On CPUs.

The recipe is the quick start, sft_fast: it is run, and its steady steps say how many tokens that
are no padding it takes a second and how long a step waited for its data. The loader alone
(training/data/batches.py: mapped rows, order, padding) then gives batches of the same rows and size
to nobody: at random, by length, packed, with 0, 1 and 2 workers.

What an H200 would take is predicted, not measured: the roofline of the plan, every row as long as
max_length. The loader's side of that, rows of 512 and 512 tokens for the T5, is measured on this
machine's cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import recording, trainings
from launch.data.rows import IGNORED
from launch.plan.resolve import resolve
from launch.predict import estimate
from launch.probe import described
from launch.run_folder.layout import AttemptDir
from launch.run_folder.steps import STEADY_FROM, events
from training.compat.python_private import end_what_cannot_send
from training.control.heartbeat import p99
from training.data import stored_rows
from training.data.batches import Collator, EpochLoader, NumberedRows
from training.data.sample_order import SampleOrder

GOAL = 20.0
WORKERS = (0, 1, 2)
H200 = described.from_file(recording.CODE / "configs/machines/h200.yaml")
ORDERS = {"at random": {}, "by length": {"group_by_length": "true"}, "packed": {"packing": "true"}}


def trained(steps: int, workspace: Path, log: Path, **data: str) -> AttemptDir:
    """The quick start, so many steps long, without its questions."""
    argv = [
        sys.executable,
        "-m",
        "launch",
        "run",
        "sft_fast",
        "--resume",
        "never",
        f"--training.max_steps={steps}",
    ]
    argv += [
        "--evaluation.exact_match_rows=0",
        *(f"--data.{key}={value}" for key, value in data.items()),
    ]
    recording.timed(argv, recording.environment(workspace), log, wait=False)
    return trainings.attempt_of("sft_fast", workspace)


def consumption(attempt: AttemptDir) -> dict[str, Any]:
    """What a run's steady steps took, and how long they waited."""
    steady = events(attempt)[STEADY_FROM:]
    waits = [step.data_seconds for step in steady if step.data_seconds is not None]
    assert len(waits) == len(steady) > 0
    return {
        "tokens_per_s": round(
            sum(step.tokens for step in steady) / sum(step.seconds for step in steady), 1
        ),
        "step_s": round(statistics.median(step.seconds for step in steady), 6),
        "wait_p99_s": round(p99(tuple(waits)), 6),
        "wait_max_s": round(max(waits), 6),
        "waited": round(sum(waits) / sum(step.seconds for step in steady), 5),
        "steps": len(steady),
    }


def loader_of(
    tokens: Path, batch: int, workers: int, by_length: bool, collate: Collator
) -> EpochLoader:
    """As LowMemTrainer makes it."""
    rows = NumberedRows(tokens)
    order = SampleOrder(len(rows), batch, 1, 1, 0, 1, lengths=rows.lengths if by_length else None)
    return EpochLoader(
        rows,
        batch_sampler=order,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=end_what_cannot_send,
    )


def alone(loader: EpochLoader, seconds: float) -> float:
    """Tokens a second over at least so long, epoch after epoch; the first epoch is not counted,
    workers start there."""
    tokens = began = epoch = 0
    while not epoch or time.monotonic() - began < seconds:
        loader.set_epoch(epoch)
        for batch in loader:
            tokens += counted(batch)
        epoch += 1
        if epoch == 1:
            tokens, began = 0, time.monotonic()
    return tokens / (time.monotonic() - began)


def counted(batch: Mapping[str, Any]) -> int:
    """Tokens that are no padding; the numbers that Collator keeps of packed ones."""
    if "attention_mask" not in batch:
        return int(batch["num_tokens"])
    targets = int((batch["labels"] != IGNORED).sum()) if "decoder_input_ids" in batch else 0
    return int(batch["attention_mask"].sum()) + targets


def long_rows(path: Path, length: int, count: int = 2000) -> Path:
    """A token cache whose rows fill source and target."""
    ids = np.random.default_rng(1).integers(10, 8000, (count, length), dtype=np.int32)
    schema = stored_rows.schema(8000, True, False)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        rows = [{"input_ids": row, "labels": row} for row in ids]
        writer.write_batch(stored_rows.batch(rows, schema))
    return path


def predicted() -> dict[str, Any]:
    """What the roofline says that an H200 takes with the quick start's own model."""
    resolved = resolve("sft_fast", [], H200)
    strategy = resolved.plan.strategy
    time_of = estimate.judge(resolved.facts, strategy).time
    assert time_of is not None, "the step has no trace"
    tokens = strategy.effective_batch_size * 2 * resolved.recipe.data.max_length
    return {
        "step_s": round(time_of.step_s, 6),
        "tokens_per_s": round(tokens / time_of.step_s),
        "micro_batch": strategy.per_device_train_batch_size,
        "length": resolved.recipe.data.max_length,
        "workers": strategy.dataloader_num_workers,
        "reason": time_of.reason,
    }


def table_of(name: str, found: Mapping[int, float], consumed: float) -> list[list[str]]:
    return [
        [name, str(workers), f"{rate:,.0f}", f"{rate / consumed:.1f}"]
        for workers, rate in found.items()
    ]


def text_of(found: Mapping[str, Any]) -> str:
    run, gpu = found["recipe"], found["h200_predicted"]
    rows = [
        row
        for name, rates in found["alone"].items()
        for row in table_of(name, rates, run["tokens_per_s"])
    ]
    head = ["loader alone", "workers", "tokens/s", "times the consumption"]
    return (
        f"The quick start takes {run['tokens_per_s']:,.0f} tokens/s ({run['step_s'] * 1e3:.1f} ms a"
        f" step, median). A step waits for its data {run['wait_p99_s'] * 1e3:.2f} ms at the 99th"
        f" percentile of {run['steps']} steps, {run['wait_max_s'] * 1e3:.2f} ms at the most,"
        f" {run['waited']:.2%} of the time. Goal: at least {GOAL:g} times the"
        f" consumption.\n\n{recording.table(head, rows)}\nPredicted, not measured: an H200 takes"
        f" {gpu['tokens_per_s']:,} tokens/s of the same recipe's own T5 ({gpu['step_s'] * 1e3:.0f}"
        f" ms a step, every row of {gpu['length']} and {gpu['length']} tokens; {gpu['reason']})."
        " Below, the loader alone on this machine with such rows.\n\n"
        + recording.table(
            head, table_of("at random, full rows", found["full_rows"], gpu["tokens_per_s"])
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of the recipe's run")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each loader, at least")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"goal": GOAL, "alone": {}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["LOWMEM_ROOT"] = str(place / "workspace")
        workspace, log = place / "workspace", place / "log.txt"
        caches = {}
        for name, data in ORDERS.items():
            attempt = trained(2 if data else arguments.steps, workspace, log, **data)
            if not data:
                found["recipe"] = consumption(attempt)
            caches[name] = trainings.tokens_of(attempt)
        batch = resolve("sft_fast", []).plan.strategy.per_device_train_batch_size

        def rates(
            tokens: Path, size: int, collate: Collator, by_length: bool = False
        ) -> dict[int, float]:
            loaders = {
                workers: loader_of(tokens, size, workers, by_length, collate) for workers in WORKERS
            }
            return {
                workers: round(alone(loader, arguments.seconds))
                for workers, loader in loaders.items()
            }

        for name, tokens in caches.items():
            found["alone"][name] = rates(
                tokens, batch, Collator(0, is_packed=name == "packed"), name == "by length"
            )
            print(name, found["alone"][name], flush=True)
        found["h200_predicted"] = gpu = predicted()
        tokens = long_rows(place / "long.arrow", gpu["length"])
        found["full_rows"] = rates(
            tokens, gpu["micro_batch"], Collator(0, decoder_start_token_id=0, multiple=8)
        )
    recording.write("loader", found, text_of(found))


if __name__ == "__main__":
    main()
