"""Many command lines in one process, each as `python -m launch` takes it: argv from a JSON file,
what came of them out.

A line that starts with "prepare" is the tokenising child's instead. As real processes they would
take a second each; tests start a few of them so."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.__main__ import VERBS, main

HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets"}


def prepare(argv: list[str]) -> int:
    sys.argv = ["tokenise", "rows", *argv]
    runpy.run_module("training.children.tokenise", run_name="__main__")
    return 0


def one(start: Callable[[list[str]], int], argv: list[str]) -> dict[str, Any]:
    """The exit code (None: a traceback), what was said, the seconds, and the heavy libraries that
    were imported."""
    out, err, began = io.StringIO(), io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: int | str | None = start(argv)
        except SystemExit as ended:
            code = ended.code
        except BaseException:  # noqa: BLE001  that is what is looked for
            code = None
            traceback.print_exc()
    seconds = time.perf_counter() - began
    heavy = sorted(HEAVY & {name for name, module in sys.modules.items() if module is not None})
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": seconds,
        "heavy": heavy,
    }


if __name__ == "__main__":
    for module, _ in VERBS.values():  # else the first line's seconds are those of imports
        importlib.import_module(f"launch.commands.{module}")
    asked, answered = sys.argv[1:]
    lines = json.loads(Path(asked).read_text(encoding="utf-8"))
    found = [
        one(prepare if line[0] == "prepare" else main, line[line[0] == "prepare" :])
        for line in lines
    ]
    Path(answered).write_text(json.dumps(found), encoding="utf-8")
