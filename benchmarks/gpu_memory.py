"""Predicted beside measured memory of real runs on one GPU.

The configurations of cuda_build_memory that need one card, on a card: what is measured is the same,
and kernels compute. Then larger ones, in each of which one run is alone on the card: seconds of a
step are measured too, and of those with a micro-batch that the plan chose, whether it fits. A
configuration that the installed packages do not have is named with the reason. A campaign that is
cut off goes on with the configurations that have no row yet. The exit code is 1 if a run failed
that was not refused, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import cuda_build_memory, recording
from benchmarks.cpu_memory import AUTOCAST, CHECKPOINTING, HALF, Case
from benchmarks.cuda_build_memory import FOUR_BIT, R16
from launch.probe import machine as probe_machine

RESULT = "gpu_memory"
WARM_UP_STEPS = 2
REFUSED = ("exit code 2", "exit code 3")  # before anything ran
SAVING = {**AUTOCAST, **CHECKPOINTING}


# the widths of Llama 2 7B; to write weights for all its layers takes minutes
WIDE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
}


def alone(name: str, config: Mapping[str, Any] | str, batch: int, **fields: Any) -> Case:
    return Case(name, config, batch, mode="single_gpu", **{"training": AUTOCAST, **fields})


LARGE = (
    alone("qwen2 of 0.5B", "qwen2-0.5b", 4, length=1024, steps=8),
    alone(
        "llama of 7B's width, 6 layers, LoRA",
        WIDE,
        4,
        training=SAVING,
        model=HALF,
        lora=R16,
        length=2048,
    ),
    alone(
        "llama of 7B's width, 6 layers, QLoRA",
        WIDE,
        4,
        training=SAVING,
        model=HALF,
        lora=R16,
        quantization=FOUR_BIT,
        length=2048,
    ),
    alone("gpt2-medium, a batch of 512, cut by the plan", "gpt2-medium", 512, length=512),
    alone("qwen2 of 0.5B, a batch of 256, cut by the plan", "qwen2-0.5b", 256, length=1024),
)
SMALL = tuple(case for case in cuda_build_memory.CASES if case.ranks == 1)


def measured(folder: Path, case: Case) -> dict[str, Any]:
    """Train a case: for each part of the run and each figure, predicted and measured bytes; and
    seconds of a step. With `failed`: what a run said that was refused or failed."""
    row: dict[str, Any] = {"case": case.name}
    try:
        run = cuda_build_memory.launched(folder, case, {})
        phases = cuda_build_memory.phases(run)
    except cuda_build_memory.RunFailed as error:
        first, *lines = str(error).splitlines()
        last = next((line for line in lines if line.startswith("error: ")), "")
        return row | {"failed": f"{first} {last}".strip()}
    plan = cuda_build_memory.read(run / "plan.json")
    events = (run / "attempts/01/events.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(event)["seconds"] for event in events][WARM_UP_STEPS:]
    return row | {
        "strategy": plan["strategy"],
        "phases": phases,
        "seconds_per_step": [plan["seconds_per_step"], statistics.median(seconds)],
    }


def rows_of(
    cases: Sequence[Case], place: Path, workers: int, until: float
) -> Iterator[dict[str, Any]]:
    """The rows of cases, so many at a time, as they come; none is begun after `until`."""

    def row(case: Case) -> dict[str, Any] | None:
        if time.monotonic() > until:
            return None
        with tempfile.TemporaryDirectory(dir=place) as folder:
            return measured(Path(folder), case)

    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(row, case) for case in cases]):
            if (found := future.result()) is not None:
                yield found


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    done = [row for row in rows if "phases" in row]
    head = ["configuration", "micro-batch", "seconds a step, predicted", "measured", "error"]
    lines = [
        [
            row["case"],
            row["strategy"]["per_device_train_batch_size"],
            *(f"{seconds:.3f}" for seconds in row["seconds_per_step"]),
            f"{row['seconds_per_step'][0] / row['seconds_per_step'][1] - 1:+.0%}",
        ]
        for row in done
        if row["alone"]
    ]
    failed = [f"- {row['case']}: {row['failed']}\n" for row in rows if "failed" in row]
    return (
        cuda_build_memory.tables(done)
        + "\nSeconds of a step, of runs that were alone on the card:\n\n"
        + recording.table(head, lines)
        + ("\nRefused or failed:\n\n" + "".join(failed) if failed else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1, help="small runs at a time (default 1)")
    parser.add_argument("--minutes", type=float, default=60, help="begin none after this time")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--small", action="store_true", help="none of the large ones")
    arguments = parser.parse_args()
    if not probe_machine.machine().gpus:
        print(f"needs a GPU: {probe_machine.machine().gpus_reason}", file=sys.stderr)
        return 3
    until = time.monotonic() + 60 * arguments.minutes
    path = recording.RESULTS / f"{RESULT}.json"
    before = cuda_build_memory.read(path).get("rows", []) if path.exists() else []
    rows = {row["case"]: row for row in before if "failed" not in row}
    with tempfile.TemporaryDirectory() as place:
        os.environ.setdefault("LOWMEM_TRACES", str(Path(place) / "traces"))
        for cases, workers in ((SMALL, arguments.workers), (() if arguments.small else LARGE, 1)):
            waiting = [
                case for case in cases if case.name not in rows and arguments.only in case.name
            ]
            for row in rows_of(waiting, Path(place), workers, until):
                rows[row["case"]] = row | {"alone": workers == 1}
                print(row["case"], row.get("failed", row.get("phases")), flush=True)
                kept = [rows[case.name] for case in (*SMALL, *LARGE) if case.name in rows]
                recording.write(RESULT, {"rows": kept}, text(kept))
    failed = [row["failed"] for row in rows.values() if "failed" in row]
    return int(any(not said.startswith(REFUSED) for said in failed))


if __name__ == "__main__":
    sys.exit(main())
