"""Seconds of a step on a CPU by the rounds that threads of OpenMP spin before they sleep, alone and
beside a process that keeps a core busy.

A thread that has done its share of a kernel waits for the next. A thread that spins begins at once,
but takes time from others that need a core, also from the thread that it waits for; one that sleeps
has to be woken for each kernel. A child trains a stack of layers with each number of rounds that
libgomp spins (GOMP_SPINCOUNT): 0, the number that ranks get (launch.base.processes.SPINS), and its
own. Children take turns; figures are medians, as ratios to those of ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Any

from benchmarks import recording
from benchmarks.seconds import busy_process
from launch.base import processes

CHILD = """
import statistics, sys, time
import torch
width, rows, length = map(int, sys.argv[1:])
layers = [
    torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    for _ in range(4)
]
model, batch = torch.nn.Sequential(*layers), torch.randn(rows, length, width)
optimizer, seconds = torch.optim.AdamW(model.parameters(), fused=True), []
while len(seconds) < 5 or sum(seconds) < 1.5:
    began = time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - began)
print(statistics.median(seconds[3:]))
"""
MODELS = {"width 128, 256 tokens": (128, 8, 32), "width 256, 512 tokens": (256, 2, 256)}
SPINS = {"sleeps at once": "0", "as ranks do": processes.SPINS, "libgomp's own": "300000"}


def step_s(sides: tuple[int, ...], spins: str) -> float:
    env = {**recording.environment(recording.CODE), "GOMP_SPINCOUNT": spins}
    env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    env.pop("OMP_WAIT_POLICY", None)
    argv = [sys.executable, "-c", CHILD, *map(str, sides)]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    measured: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for beside in ("alone", "beside a busy process"):
        with busy_process(beside != "alone"):
            for _ in range(arguments.rounds):
                for model, sides in MODELS.items():
                    for name, spins in SPINS.items():
                        measured[beside, model, name].append(step_s(sides, spins))
    rows: list[dict[str, Any]] = []
    for (beside, model, name), seconds in measured.items():
        ours = statistics.median(measured[beside, model, "as ranks do"])
        median = statistics.median(seconds)
        rows.append(
            {"case": f"{model}, {beside}", "way": name, "step_s": median, "ratio": median / ours}
        )
    lines = [
        [row["case"], row["way"], f"{1e3 * row['step_s']:.1f}", f"{row['ratio']:.2f}"]
        for row in rows
    ]
    head = ["step", "threads", "ms", "over that of ranks"]
    recording.write("thread_waits", {"rows": rows}, recording.table(head, lines))


if __name__ == "__main__":
    main()
