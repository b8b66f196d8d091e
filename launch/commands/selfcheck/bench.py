"""The place of a self-check: a workspace of its own in which real runs train a small model."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from launch.base.errors import ResourceError
from launch.base.files import write_atomic
from launch.base.processes import die_with_launcher
from launch.base.workspace import CODE
from launch.run_folder import steps
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import Gpu
from launch.schema.plan import PAGED
from launch.schema.result import SecondStep

SHAPE = "gpt2-small"
LENGTH = 512  # tokens of a row
ROWS = 320
BATCH = 8
_HELD_OUT = 64  # rows: more than a batch of an evaluation
WORDS = ("red", "blue", "green", "stone", "river")
FIGURES = ("allocated_bytes", "reserved_bytes")
STOP_S = 20.0  # time in which a child that is over its limit ends by itself
_LOG_CHARACTERS = 600
# the first steps of a run are slower than the others
WARM_UP_STEPS = 4

Changes = Mapping[str, Any]


class CheckFailed(Exception):
    """A check found that something does not work."""


class NotAvailable(Exception):
    """A check cannot run on this machine, for a reason that is no fault of lowmem."""


class Bench:
    """The folder of the runs, and the time until which they may take."""

    def __init__(self, folder: Path, cache: Path, deadline: float) -> None:
        self.folder, self.models, self.rows = folder, folder / "models", folder / "rows.jsonl"
        self.cache = cache  # the user's own: its calibration learns from these runs
        self.deadline = deadline  # on the monotonic clock

    def prepare(self) -> None:
        """Make the folder, its rows, and the link to the user's cache, which marks it as ours.

        Raises ResourceError."""
        link = self.folder / ".cache"
        is_theirs = self.folder.is_dir() and any(self.folder.iterdir()) and not link.is_symlink()
        if is_theirs or self.folder.is_symlink():
            raise ResourceError(
                f"{self.folder}: holds files that no selfcheck wrote; move it away, or set"
                " LOWMEM_ROOT to another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_checkpoints("*")  # a check that was killed may have some
        self.cache.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(self.cache)
        rng = random.Random(0)
        rows = (
            {"prompt": f"{number}", "response": " ".join(rng.choices(WORDS, k=LENGTH))}
            for number in range(ROWS)
        )
        write_atomic(self.rows, "".join(json.dumps(row) + "\n" for row in rows))

    def recipe(self, name: str, changes: Changes) -> Path:
        """A recipe of the small model; sections of `changes` lie over its own."""
        content: dict[str, Any] = {
            "name": name,
            "task": "sft",
            "model": {"shape": SHAPE},
            "tokenizer": {"vocab_size": 512},
            "data": {
                "train_file": str(self.rows),
                "validation_size": _HELD_OUT,
                "max_length": LENGTH,
            },
            "training": {
                "per_device_train_batch_size": BATCH,
                "max_steps": 10,
                "logging_steps": 1,
                "save_steps": 1000,
                "bf16": False,
            },
            "launch": {"mode": "single_gpu", "max_restarts": 0},
            "output_dir": str(self.models / name),
        }
        for section, values in changes.items():
            under = {} if section == "model" else content.get(section, {})
            content[section] = {**under, **values}
        file = self.folder / f"{name}.yaml"
        write_atomic(file, yaml.safe_dump(content))
        return file

    def run(self, name: str, changes: Changes) -> dict[str, Any]:
        """Train a recipe to its end: predicted beside measured memory of each part, and seconds of
        a step. Neither checkpoints nor the model stay."""
        try:
            return measured(self.train(name, changes))
        finally:
            shutil.rmtree(self.models / name, ignore_errors=True)

    def remove_checkpoints(self, name: str) -> None:
        """Make room on the disk: no check goes on from one."""
        for folder in self.folder.glob(f"runs/{name}/*/checkpoints"):
            shutil.rmtree(folder, ignore_errors=True)

    def train(self, name: str, changes: Changes) -> RunDir:
        """Train a recipe to its end. Raises CheckFailed and TimeoutError."""
        with self.begin(name, changes) as child:
            child.wait()
        return child.newest()

    def begin(self, name: str, changes: Changes, *flags: str) -> "Child":
        """Start a new run of a recipe."""
        recipe = str(self.recipe(name, changes))
        return Child(self, name, ["launch", "run", recipe, "--resume=never", *flags], {})

    def figures(
        self, name: str, argv: Sequence[str], variables: Mapping[str, str]
    ) -> dict[str, Any]:
        """Run a child to its end and read the figures in its last line. Raises CheckFailed and
        TimeoutError."""
        with Child(self, name, argv, variables) as child:
            child.wait()
        return json.loads(child.log.read_text(encoding="utf-8").splitlines()[-1])


class Child:
    """A process of the check, with its output in a file; at its end nothing of it is left."""

    def __init__(
        self, bench: Bench, name: str, argv: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._bench, self._name = bench, name
        self.log = bench.folder / f"{name}.log"
        with self.log.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                cwd=CODE,
                env={**os.environ, **variables, "LOWMEM_ROOT": str(bench.folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_launcher,
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        self._bench.remove_checkpoints(self._name)

    def wait(self) -> None:
        """Wait for its end. Raises CheckFailed with its last lines, and TimeoutError."""
        try:
            code = self.process.wait(max(self._bench.deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        if code:
            raise CheckFailed(f"exit code {code}: {self.said()}")

    def said(self) -> str:
        """The line of its error, or its last words."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        return (errors or [text])[-1][-_LOG_CHARACTERS:]

    def attempts(self) -> list[AttemptDir]:
        """The attempts of its run so far."""
        runs = sorted((self._bench.folder / "runs" / self._name).glob("2*"))
        return RunDir(runs[-1]).attempts() if runs else []

    def newest(self) -> RunDir:
        """The folder of the newest run of its name. Raises CheckFailed if there is none."""
        runs = sorted((self._bench.folder / "runs" / self._name).glob("2*"))
        if not runs:
            raise CheckFailed(f"no run: {self.said()}")
        return RunDir(runs[-1])


def measured(run: RunDir) -> dict[str, Any]:
    """The figures of a run that is complete, predicted beside measured."""
    plan, attempt = run.read_plan(), run.attempts()[-1]
    outcome, end = attempt.read_outcome(), attempt.read_end()
    if outcome is None or not outcome.complete:
        raise CheckFailed(f"{run.root} is not complete")
    events = steps.events(attempt, lambda line: None)[WARM_UP_STEPS:]
    seconds = statistics.median(event.seconds for event in events) if events else None
    memory = {
        phase: {
            figure: [getattr(planned, figure) if planned else None, getattr(peaks, figure)]
            for figure in FIGURES
        }
        for phase, peaks in outcome.phases.items()
        for planned in [getattr(plan.phases, phase, None)]  # not each part is predicted
    }
    second = plan.phases.step
    return {
        "strategy": asdict(plan.strategy),
        "memory": memory,
        "device_bytes": [second.device_bytes if second else None, _taken(run)[1]],
        "host_peak_bytes": [plan.estimate.host_bytes, end.host_peak_bytes if end else None],
        "outside": outside(run),
        "seconds_per_step": [plan.seconds_per_step, seconds],
        "tokens_per_second": events[-1].tokens / seconds if events and seconds else None,
        "save_seconds": outcome.save_seconds,
    }


def outside(run: RunDir) -> dict[str, Any] | None:
    """The card of a run and the bytes that its process took there outside the allocator, at the
    second step; None if not only its context is there: with several processes, whose communicators
    take memory, or paged states."""
    plan = run.read_plan()
    has_pages = plan.estimate.peak is not None and PAGED in plan.estimate.peak.parts
    if plan.strategy.num_processes > 1 or has_pages:
        return None
    gpu, taken, second_step = _taken(run)
    return {"card": gpu.name, "context_bytes": taken - second_step.reserved_bytes}


def _taken(run: RunDir) -> tuple[Gpu, int, SecondStep]:
    """The card of rank 0, its bytes that were taken since the plan, and the second step."""
    attempt = run.attempts()[-1]
    machine, second_step = attempt.read_machine(), attempt.read_second_step()
    assert machine is not None and machine.gpus and second_step is not None, attempt.root
    return machine.gpus[0], machine.gpus[0].free_bytes - second_step.free_bytes, second_step
