"""Processor time and memory of `python -m launch watch` over eight runs of two steps a second.

The runs are files, as a launcher and its ranks write them; this process holds their locks. The
screen is a terminal of 100 columns. Goals: 2 % of one core, 80 MB."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import recording
from launch.base import locks, processes
from launch.run_folder.layout import RunDir
from launch.schema.result import StepEvent

RUNS, STEP_S, EARLIER_STEPS = 8, 0.5, 20_000
FIRST_S = 5.0  # for the start, which is not counted
COLUMNS = 100
SHOWN_STEP = re.compile(rb"step ([\d,]+) of")


def event(step: int) -> str:
    fields: dict[str, Any] = {
        "step": step,
        "max_steps": 10 * EARLIER_STEPS,
        "epoch": step / 1000,
        "samples_seen": 8 * step,
        "tokens": 4096.0,
        "samples": 8.0,
        "loss": 10.0 / (1 + step) ** 0.2,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "seconds": STEP_S,
        "vram_allocated_bytes": 9 << 30,
        "vram_reserved_bytes": 10 << 30,
        "vram_total_bytes": 20 << 30,
        "host_pss_bytes": 2 << 30,
        "time": time.time(),
    }
    return json.dumps(asdict(StepEvent(**fields))) + "\n"


def beat(run: RunDir, step: int) -> None:
    fields = {"rank": 0, "section": "step", "step": step, "max_steps": 10 * EARLIER_STEPS}
    fields |= {"monotonic_s": time.monotonic(), "p99_s": 1.0, "pid": os.getpid()}
    fields["boot"] = processes.boot_id()
    run.attempts()[-1].heartbeat_file(0).write_text(json.dumps(fields), encoding="utf-8")


def write(runs: list[RunDir], is_over: threading.Event) -> None:
    """Write a step of each run every STEP_S seconds."""
    step = EARLIER_STEPS
    while not is_over.wait(STEP_S):
        step += 1
        for run in runs:
            with run.attempts()[-1].events_file.open("a", encoding="utf-8") as file:
                file.write(event(step))
            beat(run, step)


def measured(workspace: Path, seconds: float) -> dict[str, float]:
    """Share of a core and peak memory of the screen, once it is drawn."""
    pid, screen = pty.fork()
    if pid == 0:
        os.environ.update(recording.environment(workspace), TERM="xterm", COLUMNS=str(COLUMNS))
        os.chdir(recording.CODE)
        os.execv(sys.executable, [sys.executable, "-m", "launch", "watch"])
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(screen, 1 << 16):
                shown.extend(part)
        except OSError:  # the screen is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(FIRST_S)
    process, drawn = psutil.Process(pid), len(shown)
    before = process.cpu_times()
    peak_bytes, until_s = 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.5)
        peak_bytes = max(peak_bytes, process.memory_info().rss)
    after = process.cpu_times()
    os.kill(pid, signal.SIGINT)
    os.waitpid(pid, 0)
    reader.join()
    os.close(screen)
    steps = {int(step.replace(b",", b"")) for step in SHOWN_STEP.findall(shown[drawn:])}
    assert max(steps) - min(steps) > 0.8 * seconds / STEP_S - 8, f"the screen stood still: {steps}"
    spent_s = after.user + after.system - before.user - before.system
    return {"core_percent": 100 * spent_s / seconds, "peak_mb": peak_bytes / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        runs = []
        for number in range(RUNS):
            run = RunDir(Path(folder) / f"runs/recipe{number}/20260101-000000")
            run.root.mkdir(parents=True)
            run.plan_file.write_text("{}", encoding="utf-8")
            attempt = run.new_attempt()
            lines = [event(step) for step in range(EARLIER_STEPS)]
            attempt.events_file.write_text("".join(lines), encoding="utf-8")
            held.enter_context(locks.lock(run.lock_file, run.run_id))
            beat(run, EARLIER_STEPS)
            runs.append(run)
        is_over = threading.Event()
        writer = threading.Thread(target=write, args=(runs, is_over))
        writer.start()
        figures = measured(Path(folder), arguments.seconds)
        is_over.set()
        writer.join()
    rows = [
        ("runs, with two steps a second each", RUNS),
        ("of one core", f"{figures['core_percent']:.1f} %"),
        ("peak memory (RSS)", f"{figures['peak_mb']:.0f} MB"),
    ]
    recording.write("watch", figures, recording.table(("", ""), rows))


if __name__ == "__main__":
    main()
