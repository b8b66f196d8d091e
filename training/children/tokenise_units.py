"""Tokenise units of a corpus: `python -m training.children.tokenise_units FOLDER`, a child of
training.data.prepare.

It reads the number of a unit from each line of its input. It prints lines of JSON: the number of
rows that it has read, and each finished unit.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from launch.base import files, modules, processes
from training.compat import without_torch


def main(folder: Path) -> None:
    processes.settle_process()
    without_torch.hide()
    with modules.uncollected():
        from training.data import tokenise
    job = files.read(folder / tokenise.JOB, tokenise.TokeniseJob)
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
    main(Path(sys.argv[1]))
