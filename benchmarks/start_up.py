"""What a rank's imports cost, without the packages that a run does not use over with all that are
installed.

A child imports training.run and says how long that took and what it then holds (PSS). A leaves out
the optional packages and has no collections of all objects, as train_low_mem.py does for a run
without LoRA on one process or DDP; B imports whatever is installed. They alternate; the figures are
ratios of medians. The first child of each, which fills the page cache, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import recording
from launch.base import modules

CHILD = """
import json, sys, time
from contextlib import nullcontext
from launch.base import modules
modules.leave_out(sys.argv[1:])
began = time.perf_counter()
with modules.uncollected() if sys.argv[1:] else nullcontext():
    import training.run
seconds = time.perf_counter() - began
import psutil
print(json.dumps({"seconds": seconds, "pss_bytes": psutil.Process().memory_full_info().pss}))
"""


def child(packages: tuple[str, ...], folder: Path) -> dict[str, float]:
    argv = [sys.executable, "-c", CHILD, *packages]
    env = recording.environment(folder)
    done = subprocess.run(
        argv, env=env, cwd=recording.CODE, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(arguments.rounds + 1):
            load = recording.quiet()
            pair = {
                "load_before": load,
                "A": child(modules.OPTIONAL, Path(place)),
                "B": child((), Path(place)),
            }
            if number:
                rounds.append(pair)
    medians = {
        way: {
            key: statistics.median(one[way][key] for one in rounds)
            for key in ("seconds", "pss_bytes")
        }
        for way in "AB"
    }
    ratios = {key: medians["A"][key] / medians["B"][key] for key in ("seconds", "pss_bytes")}
    rows = [
        [
            at,
            *(f"{one[way]['seconds']:.2f}" for way in "AB"),
            *(f"{one[way]['pss_bytes'] / (1 << 20):.0f}" for way in "AB"),
            one["load_before"],
        ]
        for at, one in enumerate(rounds, start=1)
    ]
    text = (
        f"A / B = **{ratios['seconds']:.3f}** in seconds ({medians['A']['seconds']:.2f} over"
        f" {medians['B']['seconds']:.2f}) and **{ratios['pss_bytes']:.3f}** in bytes of a rank"
        f" ({medians['A']['pss_bytes'] / (1 << 20):.0f} MiB over"
        f" {medians['B']['pss_bytes'] / (1 << 20):.0f}), medians of {len(rounds)} rounds.\n\n"
        + recording.table(["round", "A, s", "B, s", "A, MiB", "B, MiB", "load before"], rows)
    )
    recording.write(
        "start_up",
        {"left_out": modules.OPTIONAL, "ratios": ratios, "medians": medians, "rounds": rounds},
        text,
    )


if __name__ == "__main__":
    main()
