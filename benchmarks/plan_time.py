"""Seconds of `python -m launch plan` on one core: with its steps traced before (warm), and with
nothing known (cold).

One recipe per model family on described machines, then models for which a plan considers every way
to save memory, each plan a process of its own, from start to end. The first of each fills the
traces and the page cache and is left out. A plan that finds nothing that fits counts: it answers
too. Where other processes share the core, processor seconds are what the plan itself takes; wall
seconds are shown beside them.
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

from benchmarks import recording

LORA_7B = (
    "--model.shape=llama-7b",
    "--lora.r=16",
    "--model.dtype=bfloat16",
    "--training.activation_checkpointing=true",
)
RECIPES = {  # -> words laid over configs/recipes/sft_fast.yaml, whose own model is the T5
    "GPT-2 124M": ("--model.shape=gpt2-small",),
    "Qwen2 0.5B": ("--model.shape=qwen2-0.5b",),
    "T5 0.2B, encoder frozen": (),
    "Llama 7B, LoRA": LORA_7B,
    "Llama 7B, QLoRA": (*LORA_7B, "--quantization.load_in_4bit=true"),
}
GUIDES = ("a6000-48g", "a5000-16g")
MACHINES = {
    name: ("--machine", str(recording.CODE / "configs" / "machines" / f"{name}.yaml"))
    for name in GUIDES
}
WEIGHTS_7B = ("--model.shape=qwen2.5-7b", "--model.dtype=bfloat16")
# where nothing that saves memory is typed, so that the plan considers all of it
OPEN_RECIPES = {
    "0.5B, 2,048 tokens": ("--model.shape=qwen2.5-0.5b", "--data.max_length=2048"),
    **{
        f"7B, {way}, {length:,} tokens": (*WEIGHTS_7B, *words, f"--data.max_length={length}")
        for length in (2048, 8192)
        for way, words in (
            ("LoRA", ("--lora.r=16",)),
            ("QLoRA", ("--lora.r=16", "--quantization.load_in_4bit=true")),
        )
    },
}
RTX_4090 = ("--gpu", "RTX 4090", "--ram", "64")
OPEN_CASES = [
    *((name, "RTX 4090") for name in OPEN_RECIPES),
    ("7B, LoRA, 2,048 tokens", "2 x RTX 4090"),
]
RECIPES |= OPEN_RECIPES
MACHINES |= {"RTX 4090": RTX_4090, "2 x RTX 4090": (*RTX_4090, "--gpus", "2")}
CASES = [
    *((name, machine) for name in RECIPES if name not in OPEN_RECIPES for machine in GUIDES),
    *OPEN_CASES,
]
WARM_GOAL_S, COLD_GOAL_S = 0.5, 10.0
PLAN_TIMEOUT_S = 300
DOES_NOT_FIT = 3  # the exit code


def children_s() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plan(words: Sequence[str], machine: str, workspace: Path, traces: Path) -> dict[str, Any]:
    """One plan: seconds of the process and its children, and what it said."""
    argv = [sys.executable, "-m", "launch", "plan", "sft_fast", *words, *MACHINES[machine]]
    env = {**recording.environment(workspace), "LOWMEM_TRACES": str(traces)}
    load, used_s, began = os.getloadavg()[0], children_s(), time.monotonic()
    done = subprocess.run(
        argv, env=env, cwd=recording.CODE, capture_output=True, text=True, timeout=PLAN_TIMEOUT_S
    )
    wall_s, cpu_s = time.monotonic() - began, children_s() - used_s
    seconds = {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3), "load_before": round(load, 2)}
    if done.returncode not in (0, DOES_NOT_FIT):
        return {**seconds, "error": done.stderr.strip().splitlines()[-1]}
    return {**seconds, "says": said(done.stdout) if done.returncode == 0 else "does not fit"}


def said(output: str) -> str:
    """Batch and mode of a printed plan."""
    lines = {
        line[:11].strip(): line[11:].strip()
        for line in output.splitlines()
        if line.startswith("  ")
    }
    return f"{lines['mode'].split(',')[0]}, {lines['batch'].split(' per device')[0]} per device"


def case(name: str, machine: str, place: Path, rounds: tuple[int, int]) -> dict[str, Any]:
    """Every repetition of one recipe on one machine: (warm, cold) rounds."""
    words, workspace, known = RECIPES[name], place / "workspace", place / "traces"
    first = plan(words, machine, workspace, known)
    found = {"recipe": name, "machine": machine, "first": first, "warm": [], "cold": []}
    if "error" in first:
        return found
    if not rounds[1]:
        found["cold"] = [first]
    found["warm"] = [plan(words, machine, workspace, known) for _ in range(rounds[0])]
    for _ in range(rounds[1]):
        with tempfile.TemporaryDirectory() as empty:
            found["cold"].append(plan(words, machine, workspace, Path(empty)))
    return found


def imports_s() -> float:
    """Processor seconds of a process that only imports transformers' Trainer: those of this
    machine, beside which a plan's can be read on another one."""
    used = []
    for _ in range(3):  # the first fills the page cache
        before_s = children_s()
        subprocess.run(
            [sys.executable, "-c", "from transformers import Trainer"],
            check=True,
            capture_output=True,
            timeout=PLAN_TIMEOUT_S,
        )
        used.append(children_s() - before_s)
    return min(used)


def median(repetitions: Sequence[Mapping[str, Any]], clock: str) -> float:
    return statistics.median(one[clock] for one in repetitions)


def text(rows: Sequence[Mapping[str, Any]], of_imports_s: float) -> str:
    """A line per recipe and machine; what missed a goal, and how busy the machine was."""
    lines, missed = [], {"warm": 0, "cold": 0}
    for row in rows:
        if "error" in row["first"]:
            lines.append([row["recipe"], row["machine"], row["first"]["error"], *["-"] * 4])
            continue
        cells = []
        for way, goal_s in (("warm", WARM_GOAL_S), ("cold", COLD_GOAL_S)):
            wall_s, cpu_s = (median(row[way], clock) for clock in ("wall_s", "cpu_s"))
            misses = wall_s > goal_s
            missed[way] += misses
            cells += [f"{wall_s:.2f}{' *' if misses else ''}", f"{cpu_s:.2f}"]
        lines.append([row["recipe"], row["machine"], row["warm"][0]["says"], *cells])
    repetitions = [one for row in rows for one in (*row["warm"], *row["cold"])]
    busiest = max(one["load_before"] for one in repetitions)
    goals = f"Goals: warm {WARM_GOAL_S} s, cold {COLD_GOAL_S:.0f} s. "
    goals += f"Missed (*): {missed['warm']} warm, {missed['cold']} cold of {len(rows)}."
    most = {way: max(one["cpu_s"] for row in rows for one in row[way]) for way in ("warm", "cold")}
    goals += (
        f" Beside them a process that only imports transformers' Trainer takes {of_imports_s:.2f} s"
        f" of this machine's processor; the longest cold plan takes"
        f" {most['cold'] / of_imports_s:.1f} times that."
    )
    if busiest > recording.QUIET_LOAD:
        goals += (
            f"\n\nThe machine was shared: load up to {busiest} before a plan, which then has a part"
            " of its core. A"
        )
        goals += (
            f" plan took at most {most['warm']:.2f} s of a processor warm and {most['cold']:.2f} s"
            " cold."
        )
    head = [
        "recipe",
        "machine",
        "says",
        "warm, wall s",
        "processor s",
        "cold, wall s",
        "processor s",
    ]
    return goals + "\n\n" + recording.table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--cold", type=int, default=2, help="0: the first is taken instead")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--only", default="", help="recipes whose name holds this; not recorded")
    arguments = parser.parse_args()
    cores, rows = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {arguments.core})  # the children's too
    of_imports_s = imports_s()
    with tempfile.TemporaryDirectory() as place:
        for name, machine in CASES:
            if arguments.only in name:
                rows.append(case(name, machine, Path(place), (arguments.warm, arguments.cold)))
                print(json.dumps(rows[-1]), flush=True)
    os.sched_setaffinity(0, cores)
    if arguments.only:
        print(text(rows, of_imports_s))
    else:
        goals_s = {"warm": WARM_GOAL_S, "cold": COLD_GOAL_S}
        content = {"goals_s": goals_s, "imports_s": of_imports_s, "rows": rows}
        recording.write("plan_time", content, text(rows, of_imports_s))


if __name__ == "__main__":
    main()
