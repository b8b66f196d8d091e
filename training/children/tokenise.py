"""Tokenise without torch: `python -m training.children.tokenise rows ATTEMPT_FOLDER PROCESSES`, the
rows of a recipe before any rank starts, or `units FOLDER`, which is a child of that.

A child reads the number of a unit from each line of its input. It prints lines of JSON: the number
of rows that it has read, and each finished unit.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from launch.base import files, modules, processes
from launch.base.errors import LaunchError, Stopped
from launch.run_folder.layout import AttemptDir
from training.compat import without_torch
from training.control.heartbeat import Heartbeat
from training.control.stop_word import Control, Halted


def _rows(attempt_folder: str, num_processes: str) -> int:
    """Tokenise the rows that the attempt names. Returns the exit code."""
    attempt = AttemptDir(Path(attempt_folder))
    heartbeat = Heartbeat(attempt.heartbeat_file(0))
    heartbeat.beat("tokenise")
    try:
        processes.check_threads()
        Control().listen()
        with modules.uncollected():
            from training.data import prepare
        tokens, say = attempt.read_tokenising(), partial(print, flush=True)
        prepare.ensure(tokens, say, heartbeat.beat, int(num_processes))
    except Halted as halted:
        attempt.leave_word(0, Stopped(str(halted), halted.word.exit_code))
        return halted.word.exit_code
    except LaunchError as error:
        attempt.leave_word(0, error)
        return error.exit_code
    except BaseException as error:
        attempt.leave_word(0, error)
        raise
    return 0


def _units(folder: str) -> None:
    """Tokenise the units that the input names."""
    with modules.uncollected():
        from training.data import tokenise
    job = files.read(Path(folder) / tokenise.JOB, tokenise.TokeniseJob)
    assert job is not None

    def report(**fields: Any) -> None:
        # shorter than a pipe's buffer, so lines of several processes do not mix
        os.write(1, (json.dumps(fields) + "\n").encode())

    for line in sys.stdin:
        tokenised = job.tokenise(int(line), None, lambda count: report(rows=count))
        if tokenised.error:
            files.write_json(job.counts_file(int(line)).with_suffix(".failed"), tokenised)
        report(unit=int(line))


if __name__ == "__main__":
    processes.settle_process()
    without_torch.hide()
    sys.exit({"rows": _rows, "units": _units}[sys.argv[1]](*sys.argv[2:]))
