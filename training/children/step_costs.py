"""Measure the steps of a run that was made with --dry-run: python -m training.children.step_costs
RUN_FOLDER. Rank 0 prints a line of JSON: how often a step waits for the device, and the seconds of
a checkpoint."""

import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from launch.base.workspace import Workspace
from launch.run_folder.layout import RankStart, RunDir
from training import run as training_run

_WARNS_FROM, _WARNS_UNTIL = 2, 8  # steps; before and after them torch does not look for waits
_FRAMES = 5  # of the stack of a wait


class _StepCosts(TrainerCallback):
    """Callback that counts waits and measures times."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._step = trainer, 0
        self._waits: dict[int, list[list[str]]] = {}  # places of each wait, the innermost last
        self._begins: dict[int, float] = {}
        self._saved: dict[int, float] = {}  # the seconds of saving so far

    def note(self, message: Warning | str, *others: Any, **more: Any) -> None:
        """Take a warning; torch warns of each operation that waits."""
        if "synchronizing CUDA operation" in str(message):
            frames = traceback.extract_stack(limit=_FRAMES + 1)[:-1]
            self._waits[self._step].append([f"{frame.filename}:{frame.lineno}" for frame in frames])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        self._step = state.global_step
        self._waits[self._step] = []
        self._begins[self._step] = time.monotonic()
        self._saved[self._step] = self._trainer.save_s
        is_counted = _WARNS_FROM <= self._step < _WARNS_UNTIL
        torch.cuda.set_sync_debug_mode("warn" if is_counted else "default")

    def result(self) -> dict[str, Any]:
        # from the middle of a step to the middle of the next
        counted = range(_WARNS_FROM + 1, _WARNS_UNTIL - 1)
        return {
            "waits": [self._waits[step] for step in counted if step in self._waits],
            **self._checkpoint(),
        }

    def _checkpoint(self) -> dict[str, float]:
        """Seconds of the last checkpoint between steps, and of saving in it; {} without one.

        The rest is the check of all numbers before it, and the next step, which finds the
        allocator's cache empty."""
        steps = [step for step in self._begins if step >= _WARNS_UNTIL and step + 1 in self._begins]
        saved = {step for step in steps if self._saved[step + 1] > self._saved[step]}
        after = {step + 1 for step in saved}
        plain = [self._seconds(step, 1) for step in steps if step not in saved | after]
        followed = [step for step in saved if step + 2 in self._begins]
        if not followed or not plain:
            return {}
        last = max(followed)
        return {
            "checkpoint_seconds": self._seconds(last, 2) - 2 * statistics.median(plain),
            "saving_seconds": self._saved[last + 1] - self._saved[last],
        }

    def _seconds(self, step: int, count: int) -> float:
        return self._begins[step + count] - self._begins[step]


def measure(folder: Path, watch: Callable[[Any], None] = lambda trainer: None) -> dict[str, Any]:
    """Train the run to its end on this rank. `watch` gets the trainer before that."""
    costs: list[_StepCosts] = []

    def begin(trainer: Any) -> None:
        costs.append(_StepCosts(trainer))
        trainer.add_callback(costs[0])
        warnings.showwarning = costs[0].note
        warnings.simplefilter("always")
        watch(trainer)

    run = RunDir(folder)
    attempt = run.attempts()[-1]
    recipe, plan = run.read_recipe(), run.read_plan()
    start = RankStart(Workspace.here(), recipe, plan, True, run=run, attempt=attempt)
    training_run.train(start, lambda *_: (str(run.root), str(attempt.root)), [], watch=begin)
    return costs[0].result()


def main() -> None:
    result = measure(Path(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{json.dumps(result)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # a library's destructor may abort, and the work is done


if __name__ == "__main__":
    main()
