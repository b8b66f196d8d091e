"""Estimators of a training step's memory side by side, each beside what the step really held.

A case is trained as in cpu_memory.py, and the most that torch's CPU allocator held in a step from
the second on is what every estimator (peer_estimates.py) is compared with. Each answers in a child
of its own, imports included. Ours is asked twice: with nothing known, and again. One that raises
has its error in the table instead of a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording

CASES = (
    "gpt2",
    "gpt2, autocast",
    "gpt2, bf16 weights",
    "qwen2",
    "qwen2, checkpointing",
    "llama, LoRA",
    "llama, LoRA, checkpointing",
    "t5",
)
COLUMNS = {  # -> the estimator that is asked; "ours, known": the second time
    "ours": "ours",
    "ours, known": "ours",
    "MemTracker": "mem_tracker",
    "states + activations": "formula",
    "accelerate": "accelerate",
    "DeepSpeed ZeRO-2": "zero2",
    "DeepSpeed ZeRO-3": "zero3",
}
CHILD_TIMEOUT_S = 300
NOTES = """
Seconds in the second table are the processor's, of the whole child. MemTracker:
torch.distributed._tools, two bare steps of the same model on fake tensors. States + activations:
exact states and the formula of Korthikanti et al. 2022 (arXiv:2205.05198), by which attention keeps
its scores; the fused attention of these runs does not. accelerate: `estimate-memory`, training with
Adam. DeepSpeed: estimate_zero{2,3}_model_states_mem_needs on one GPU without offload.
The last three count model states only and know neither batch nor LoRA.
"""


def asked(estimator: str, folder: Path) -> dict[str, Any]:
    """What an estimator says of the case in `folder`, or its error; and the seconds it took."""
    argv = [sys.executable, "-m", "benchmarks.peer_estimates", estimator, str(folder)]
    env = {**recording.environment(folder), "LOWMEM_TRACES": str(folder / "traces_of_peers")}
    load, used, began = (
        os.getloadavg()[0],
        resource.getrusage(resource.RUSAGE_CHILDREN),
        time.monotonic(),
    )
    done = subprocess.run(
        argv, env=env, cwd=recording.CODE, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
    )
    wall_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    seconds = {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2), "load_before": round(load, 2)}
    if done.returncode == 0:
        return {**json.loads(done.stdout.splitlines()[-1]), **seconds}
    said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return {"error": said[-1], **seconds}


def row(case: cpu_memory.Case, folder: Path, counter: Path) -> dict[str, Any]:
    """The measured peak of a case and every estimator's answer."""
    folder.mkdir()
    measured_bytes = cpu_memory.measured(case, folder, counter)["measured_bytes"]
    answers = {column: asked(estimator, folder) for column, estimator in COLUMNS.items()}
    for answer in answers.values():
        if "bytes" in answer:
            answer["error_share"] = answer["bytes"] / measured_bytes - 1
    return {"case": case.name, "measured_bytes": measured_bytes, "answers": answers}


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Errors and seconds of every case, then of every estimator."""

    def cell(answer: Mapping[str, Any]) -> str:
        said = f"{answer['error_share']:+.2%}" if "bytes" in answer else "raises"
        return f"{said}, {answer['cpu_s']:.1f} s"

    lines = [
        [
            one["case"],
            f"{one['measured_bytes'] / (1 << 20):.1f}",
            *(cell(one["answers"][name]) for name in COLUMNS),
        ]
        for one in rows
    ]
    summary = []
    for name in COLUMNS:
        answers = [one["answers"][name] for one in rows]
        sizes = [abs(one["error_share"]) for one in answers if "bytes" in one]
        seconds = [
            statistics.median(one[clock] for one in answers) for clock in ("wall_s", "cpu_s")
        ]
        shares = [f"{statistics.median(sizes):.2%}", f"{max(sizes):.2%}"] if sizes else ["-", "-"]
        summary.append(
            [name, *shares, *(f"{one:.1f}" for one in seconds), f"{len(sizes)} of {len(answers)}"]
        )
    errors = dict.fromkeys(
        f"{name} raises on {one['case']}: `{one['answers'][name]['error']}`"
        for one in rows
        for name in COLUMNS
        if "error" in one["answers"][name]
    )
    busiest = max(answer["load_before"] for one in rows for answer in one["answers"].values())
    shared = (
        f"\nThe machine was shared: load up to {busiest} before a child, wall seconds are too"
        " long.\n"
    )
    return (
        recording.table(
            ["estimator", "median abs. error", "max", "wall s, median", "processor s", "answers"],
            summary,
        )
        + "\n"
        + recording.table(["case", "measured MiB", *COLUMNS], lines)
        + "".join(f"\n{one}\n" for one in errors)
        + (shared if busiest > recording.QUIET_LOAD else "")
        + NOTES
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="the case of this name; nothing is recorded")
    arguments = parser.parse_args()
    wanted = [arguments.only] if arguments.only else CASES
    rows = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        counter = cpu_memory.build_counter(Path(place))
        for number, name in enumerate(wanted):
            case = next(one for one in cpu_memory.CASES if one.name == name)
            rows.append(row(case, Path(place) / str(number), counter))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.only:
        print(text(rows))
    else:
        recording.write("memory_peers", {"rows": rows}, text(rows))


if __name__ == "__main__":
    main()
