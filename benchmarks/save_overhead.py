"""What checkpoints cost of a run's wall time, at the default interval between two.

A run saves oftener than the default, so that there are several saves to time; its own steps and its
own saves, in the same run, give the share at the default: seconds of a save / seconds of save_steps
steps and a save. A save is all of it: room, writing, hashing, fsync, manifest, rename, rotation.
Beside it what writing the same bytes costs without any of that: one file of the checkpoint's size,
not synced, in the same folder, after the run."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import launch_overhead, recording
from launch.run_folder import manifest
from launch.schema.training_section import TrainingSection

GOAL = 0.035
SAVES = 4
# (shape, mode, ranks, batch, steps between two saves); the last has 1.4 GiB of states for steps of
# two rows
CASES = (
    ("mini-chat", "multi_cpu", 2, 16, 20),
    ("mini-chat", "deepspeed_zero2", 2, 16, 20),
    ("gpt2-small", "cpu", 1, 2, 2),
)


def measure(
    folder: Path, shape: str, mode: str, ranks: int, batch: int, every: int
) -> dict[str, Any]:
    """One run: seconds of a step and of a save, and what a checkpoint weighs."""
    path = launch_overhead.recipe(folder, SAVES * every)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["model"]["shape"] = shape
    content["training"] |= {
        "save_steps": every,
        "logging_steps": 1,
        "per_device_train_batch_size": batch // ranks,
    }
    content["launch"] = {"mode": mode, "num_processes": ranks}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    argv = [sys.executable, "-m", "launch", "run", str(path), "--data.validation_file=null"]
    env = recording.environment(folder / "workspace")
    load = recording.quiet()
    done = subprocess.run(argv, env=env, cwd=recording.CODE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (attempt,) = (folder / "workspace/runs/overhead").glob("*/attempts/01")
    outcome = json.loads((attempt / "outcome.json").read_text(encoding="utf-8"))
    events = [
        json.loads(line)
        for line in (attempt / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    step_s = statistics.median(event["seconds"] for event in events[2:])
    newest = manifest.committed(attempt.parent.parent / "checkpoints")[-1]
    size = sum(entry["bytes"] for entry in manifest.read(newest)["files"].values())
    save_s, steps = outcome["save_seconds"] / SAVES, TrainingSection().save_steps
    return {
        "shape": shape,
        "mode": mode,
        "ranks": ranks,
        "load_before": load,
        "checkpoint_bytes": size,
        "step_s": round(step_s, 4),
        "save_s": round(save_s, 3),
        "bare_write_s": round(_bare_write_s(newest.parent / "bare", size), 3),
        "save_steps": steps,
        "share": round(save_s / (steps * step_s + save_s), 5),
    }


def _bare_write_s(file: Path, size: int) -> float:
    """Seconds to hand so many bytes to the kernel."""
    block = bytes(16 << 20)
    began = time.monotonic()
    with file.open("wb") as target:
        for _ in range(-(-size // len(block))):
            target.write(block)
    seconds = time.monotonic() - began
    file.unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    found = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder), *case))
            print(found[-1], flush=True)
    head = (
        "model",
        "mode",
        "ranks",
        "checkpoint",
        "save",
        "bare write",
        "step",
        "share at save_steps 500",
    )
    rows = [
        (
            one["shape"],
            one["mode"],
            one["ranks"],
            f"{one['checkpoint_bytes'] / (1 << 20):,.0f} MiB",
            f"{one['save_s']:.2f} s",
            f"{one['bare_write_s']:.2f} s",
            f"{1000 * one['step_s']:.0f} ms",
            f"{100 * one['share']:.2f} %",
        )
        for one in found
    ]
    recording.write("save_overhead", {"goal": GOAL, "cases": found}, recording.table(head, rows))
    return 0 if all(one["share"] <= GOAL for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
