"""SIGTERM at random moments to the launcher, accelerate, one rank or both: is a checkpoint
committed, does all end?

Each run is a real two-rank launch of a tiny model, stopped between its first second and some
seconds of training, ranks up to 5 s apart (tests/stopping.py draws, from a seed). `--count 100`
repeats; and what it costs the ranks to agree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import recording
from tests import stopping

AGREEMENTS = 2000
FIRST_PORT = 29_871
LIMIT_S = 120.0


def stopped_once(seed: int) -> dict[str, Any]:
    """One run; what was done to it and what it left."""
    with tempfile.TemporaryDirectory() as name, stopping.launched(Path(name)) as child:
        began = time.monotonic()
        words, signalled = stopping.stop_at_random(child, random.Random(seed))
        before = child.committed()
        try:
            code: int | None = child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        ended = time.monotonic()
        outcomes = [attempt.outcome_file for attempt in child.run.attempts()]
        outcome = json.loads(outcomes[-1].read_text()) if outcomes and outcomes[-1].exists() else {}
        after = child.committed()
        step = outcome.get("step")
        return {
            "seed": seed,
            "done": words,
            "lived_s": round(signalled - began, 1),
            "code": code,
            "ended": outcome.get("ended"),
            "step": step,
            "committed": step is not None and after[-1:] == [step],
            "lost": bool(before) and (not after or after[-1] < before[-1]),
            "was_training": bool(step),
            "seconds": round(ended - signalled, 2),
            "orphans": len(child.left()),
        }


def agreement() -> dict[str, float]:
    """Microseconds that two ranks take to agree on a word over Gloo, on this machine."""
    argv = [sys.executable, "-m", "benchmarks.stops", "--agree"]
    port = str(FIRST_PORT + os.getpid() % 1000)
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(argv, env={**env, "RANK": str(i)}, stdout=subprocess.PIPE, text=True)
        for i in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return json.loads(said[0])


def _agree() -> None:
    from torch import distributed

    from training.control.stop_word import Control

    distributed.init_process_group("gloo")
    control = Control()
    control.connect(60)
    taken = []
    for _ in range(AGREEMENTS):
        began = time.perf_counter()
        control.agree()
        taken.append(time.perf_counter() - began)
    taken.sort()
    print(
        json.dumps(
            {
                "median_us": 1e6 * statistics.median(taken),
                "p99_us": 1e6 * taken[AGREEMENTS * 99 // 100],
            }
        )
    )
    distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agree", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agree:
        _agree()
        return 0
    cost = agreement()
    runs = []
    for number in range(arguments.count):
        runs.append(stopped_once(arguments.seed * 1000 + number))
        print(json.dumps(runs[-1]), flush=True)
    training = [run for run in runs if run["was_training"]]
    seconds = sorted(run["seconds"] for run in runs)
    rows = [
        (
            "ended with 75, said to be preempted",
            f"{sum(r['code'] == 75 and r['ended'] == 'preempted' for r in runs)} of {len(runs)}",
        ),
        (
            "stopped while training: last step committed",
            f"{sum(r['committed'] for r in training)} of {len(training)}",
        ),
        ("lost a committed checkpoint", sum(r["lost"] for r in runs)),
        ("hung (more than 120 s)", sum(r["code"] is None for r in runs)),
        ("left a process, a port or shared memory", sum(r["orphans"] > 0 for r in runs)),
        (
            "seconds from the signal to the end: median, worst",
            f"{statistics.median(seconds)}, {seconds[-1]}",
        ),
        (
            "cost of agreeing at a step, two ranks: median, p99",
            f"{cost['median_us']:.0f} us, {cost['p99_us']:.0f} us",
        ),
    ]
    recording.write(
        "stops", {"runs": runs, "agreement": cost}, recording.table(("what", "found"), rows)
    )
    return 0 if all(r["code"] == 75 and not r["lost"] and not r["orphans"] for r in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
