"""A process that maps a file larger than its limit of host RAM: no guard stops it, and neither its
lease nor its report nor the evidence of a shortage counts the pages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from launch.predict.oom_history import OomEvent, OomHistory
from launch.run_folder.layout import RunDir
from launch.supervise import oom_record
from tests import builders
from tests.builders import plan

MIB = 1 << 20
LIMIT_BYTES = 128 * MIB
# Watches a rank that maps a file; prints the most that the lease was told, the peak, and why the
# rank was stopped.
LAUNCHER = """
import json, subprocess, sys
from pathlib import Path
from launch.base import processes
from launch.run_folder.layout import RunDir
from launch.schema.run_sections import LaunchSection
from launch.supervise import stop_signals
from launch.supervise.screen import Screen
from launch.supervise.watch import RankWatcher

folder, limit_bytes, rank, file = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
processes.adopt()
run, screen, held = RunDir(folder), Screen(stream=sys.stderr), []
with stop_signals.signals() as signals:
    watcher = RankWatcher(
        run, run.new_attempt(), screen, signals, LaunchSection(), limit_bytes,
        lambda measured: True, lambda host_bytes: held.append(host_bytes),
    )
    ended = watcher.until_end(subprocess.Popen([sys.executable, "-c", rank, file]))
print(json.dumps([len(held), max(held), ended.host_peak_bytes, ended.pressure]))
"""
MAPS = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file: pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
for start in range(0, len(pages), 4096): pages[start]
"""
IN_STEP = """
from pathlib import Path
from training.control.heartbeat import Heartbeat
beat = Path(sys.argv[1]).parent / "attempts/01/ranks/0/heartbeat.json"
beat.parent.mkdir(parents=True, exist_ok=True)
Heartbeat(beat).beat("step")
time.sleep(0.7)
"""
PEAKS = 'bytearray(b"x") * (64 << 20)\n'
SLEEPS = "time.sleep(1.5)"  # longer than the launcher waits between two reads


def watched(folder: Path, rank: str, file_bytes: int) -> tuple[int, int, str]:
    """The most that the lease of such a rank held, its peak, and why it was stopped."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(file_bytes))
    argv = [folder, LIMIT_BYTES, rank + SLEEPS, folder / "model.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *map(str, argv)],
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    count, most, peak, pressure = json.loads(done.stdout)
    assert count >= 2, done.stderr
    return most, peak, pressure


def test_pages_of_a_mapped_file_stop_no_run_and_are_in_no_figure_of_it(tmp_path):
    most, peak, pressure = watched(tmp_path, MAPS, LIMIT_BYTES + 64 * MIB)
    assert pressure == ""
    assert 16 * MIB < most <= peak < LIMIT_BYTES
    strategy = replace(plan().strategy, device="cpu")
    short = OomEvent("host", "load", strategy, predicted_bytes=LIMIT_BYTES)
    assert oom_record.add(OomHistory(), short, RunDir(tmp_path), peak).host == 0, "no correction"


def test_weights_of_a_file_that_a_step_reads_are_taken_and_its_peaks_are_seen(tmp_path):
    loading, *_ = watched(tmp_path, MAPS, 32 * MIB)
    most, *_ = watched(tmp_path / "in step", MAPS + IN_STEP, 32 * MIB)
    assert abs(most - loading - 32 * MIB) < 16 * MIB
    # another run: on a busy machine a sample meets the peak, too
    _, peak, _ = watched(tmp_path / "peak", MAPS + IN_STEP + PEAKS, 32 * MIB)
    assert abs(peak - most - 64 * MIB) < 16 * MIB
