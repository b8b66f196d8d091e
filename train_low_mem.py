#!/usr/bin/env python3
"""What every rank runs: --run-dir under our launcher, `train` and the guides' flags under accelerate or torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from launch import direct, packages
from launch.errors import LaunchError, shown
from launch.rundir import AttemptDir, RunDir, die_with_launcher, settle_process


def main(argv: list[str]) -> int:
    rank = int(os.environ.get("RANK", "0"))
    settle_process()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    # Threads that spin lose their core to a busy neighbour: 600 ms a step, asleep 86; alone 26.8 and 27.5 (2 cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "WORLD_SIZE" in os.environ or "LOWMEM_SUPERVISED" in os.environ:
        die_with_launcher()
    opened: list[AttemptDir] = []  # filled as soon as there is an attempt to leave word in
    try:
        if argv[:1] == ["train"]:
            start = direct.from_flags(argv[1:])
        else:
            parser = argparse.ArgumentParser(description=__doc__)
            parser.add_argument("--run-dir", type=Path, required=True)
            parser.add_argument("--attempt", type=int, required=True)
            arguments = parser.parse_args(argv)
            start = direct.from_run_dir(RunDir(arguments.run_dir), arguments.attempt)
            opened.append(start.attempt)
        for package in packages.unused(start.recipe, start.plan.strategy):
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]  to Python: not installed
        from training import run  # torch comes in here: a wrong flag has been answered by now

        run.train(start, direct.open_run, opened)
    except LaunchError as error:
        if rank == 0:
            print(f"error: {shown(str(error))}", file=sys.stderr)
        for attempt in opened:
            attempt.leave_word(rank, error)
        return error.exit_code
    except BaseException as error:
        for attempt in opened:
            attempt.leave_word(rank, error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
