#!/usr/bin/env python3
"""Train with the commands of a guide, under the lowmem launcher, torchrun or accelerate:

    train.py --mode pretrain|sft --config medium|large
    train.py --config config/training_config.yaml [--resume]

--dry-run says what would run. A run continues by default if it is unfinished; --resume never starts
from the beginning, --resume PATH names a run. Any key of a recipe can be set:
--data.train_file=my.jsonl --training.learning_rate=1e-4
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# instead of scripts/, which holds no modules to import
sys.path[0] = str(Path(__file__).resolve().parent.parent)

# E402: the modules below are in the folder above. `interpreter` needs only the standard library;
# the other modules may need packages that this Python lacks, so another Python may have to go on
# first.
from launch.base import interpreter  # noqa: E402

interpreter.prepare(sys.argv[1:])

from launch import __main__ as launcher  # noqa: E402
from launch.base.errors import LaunchError  # noqa: E402
from launch.base.text import shown  # noqa: E402
from launch.recipe.guides import train_py  # noqa: E402

_UNDER_A_LAUNCHER = {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"}  # torchrun's, accelerate's


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if _UNDER_A_LAUNCHER & os.environ.keys():
        import train_low_mem

        train_low_mem.run_and_leave(argv, lambda: train_py.translate(argv))
    try:
        request = train_py.translate(argv)
    except LaunchError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    for line in request.notes:
        print(shown(line))
    arguments = ["run", request.recipe, *request.overrides, f"--resume={request.resume}"]
    arguments += ["--dry-run"] if request.dry_run else []
    arguments += ["--launch.mode=cpu"] if request.cpu else []
    return launcher.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
