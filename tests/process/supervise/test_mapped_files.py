"""A process that maps a file larger than its limit of host RAM: no guard stops it, and neither its
lease nor its report nor the evidence of a shortage counts the pages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from launch.predict.oom_history import OomEvent, OomHistory
from launch.run_folder.layout import RunDir
from launch.supervise import oom_record
from tests import builders
from tests.builders import plan

MIB = 1 << 20
LIMIT_BYTES, FILE_BYTES = 128 * MIB, 192 * MIB
# A launcher whose rank maps a file; prints the most that its lease held, its peak, and why it
# stopped the rank.
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
RANK = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file: pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
for start in range(0, len(pages), 4096): pages[start]
time.sleep(2)
"""


def test_pages_of_a_mapped_file_stop_no_run_and_are_in_no_figure_of_it(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(bytes(FILE_BYTES))
    argv = [tmp_path, LIMIT_BYTES, RANK, tmp_path / "model.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *map(str, argv)],
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    count, held, peak, pressure = json.loads(done.stdout)
    assert (count >= 2, pressure) == (True, ""), done.stderr
    assert 16 * MIB < held <= peak < LIMIT_BYTES
    strategy = replace(plan().strategy, device="cpu")
    short = OomEvent("host", "load", strategy, predicted_bytes=LIMIT_BYTES)
    assert oom_record.add(OomHistory(), short, RunDir(tmp_path), peak).host == 0, "no correction"
