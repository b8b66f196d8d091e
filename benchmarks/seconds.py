"""Predicted beside measured seconds of a step on CPUs: starts of the quick start, and of
configurations of cpu_memory, each beside its own plan.

A start is `launch run` in a folder of its own, so that no earlier run corrects its plan; traces and
the measured rates of the cores are kept between them, as on a machine that has planned before. The
figures are those of its ledger: the step that the plan predicted, the median step, and the share of
the cores that the ranks had. `--beside` runs a process beside all, which keeps a core busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording

QUICK_START = "quick start"
CASES = (
    "gpt2",
    "gpt2, autocast",
    "gpt2, bf16 weights, accumulation 2",
    "qwen2",
    "qwen2, checkpointing",
    "llama, LoRA",
    "llama, LoRA, autocast, accumulation 2",
    "t5",
    "t5, LoRA",
    "qwen2, DDP",
)
STEPS, QUICK_STEPS = 25, 300
ALONE, BESIDE = 0.2, 0.35  # most that predictions are off, alone and beside a busy process
QUIET = 0.9  # share of the cores of a start that was alone; its launcher takes a part


def start(case: str, folder: Path) -> dict[str, Any]:
    """Start a configuration in a folder, and read what it has left in its ledger."""
    env = recording.environment(folder)
    env["LOWMEM_TRACES"] = str(folder.parent / "traces")
    if case == QUICK_START:
        words = ["sft_fast", f"--training.max_steps={QUICK_STEPS}"]
    else:
        named = next(each for each in cpu_memory.CASES if each.name == case)
        words = [str(cpu_memory.write_data(folder, replace(named, steps=STEPS)))]
    argv = [sys.executable, "-m", "launch", "run", *words]
    done = subprocess.run(argv, env=env, cwd=recording.CODE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = (folder / ".cache" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in map(json.loads, ledger) if line["kind"] == "measurement")
    return {
        "predicted_s": line["predicted"]["step_s"],
        "measured_s": line["measured"]["step_s"],
        "core_share": line["core_share"],
    }


def median(case: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The medians of the starts of a case."""
    keys = "predicted_s", "measured_s", "core_share"
    return {
        "case": case,
        **{key: statistics.median(each[key] for each in starts) for key in keys},
        "ratio": statistics.median(each["predicted_s"] / each["measured_s"] for each in starts),
        "starts": list(starts),
    }


@contextmanager
def busy_process(is_wanted: bool) -> Iterator[None]:
    """A process that never waits, meanwhile."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()


def text(rows: Sequence[Mapping[str, Any]], most: float) -> str:
    ratios = [row["ratio"] for row in rows]
    within = sum(abs(ratio - 1) <= most for ratio in ratios)
    typical = statistics.median(abs(ratio - 1) for ratio in ratios)
    lines = [
        [
            row["case"],
            f"{row['predicted_s']:.4f}",
            f"{row['measured_s']:.4f}",
            f"{row['ratio']:.2f}",
            f"{row['core_share']:.0%}",
        ]
        for row in rows
    ]
    head = ["case", "predicted s", "measured s", "predicted / measured", "share of the cores"]
    return (
        f"{within} of {len(rows)} configurations within {most:.0%}, median |error| {typical:.0%};"
        f" medians of {len(rows[0]['starts'])} starts.\n\n{recording.table(head, lines)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="with a busy process beside all")
    parser.add_argument("--cases", nargs="*", default=[QUICK_START, *CASES])
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place, busy_process(arguments.beside):
        for number, case in enumerate(arguments.cases):
            starts = [
                start(case, Path(place) / f"{number}-{each}") for each in range(arguments.starts)
            ]
            rows.append(median(case, starts))
            print(json.dumps(rows[-1]), flush=True)
    name, most = ("seconds_beside", BESIDE) if arguments.beside else ("seconds", ALONE)
    recording.write(name, {"rows": rows}, text(rows, most), "seconds")
    disturbed = [row["case"] for row in rows if row["core_share"] < QUIET]
    if disturbed and not arguments.beside:
        raise SystemExit(f"other programs had the cores beside: {', '.join(disturbed)}")


if __name__ == "__main__":
    main()
