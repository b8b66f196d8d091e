"""A run to be stopped: started with real ranks, watched through its files, and what it left."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from launch.base import processes
from launch.run_folder.layout import RunDir
from tests import builders, orphans

ENDLESS = {"num_train_epochs": 20_000, "save_steps": 5, "per_device_train_batch_size": 4}
RUN = (sys.executable, "-m", "launch", "run")


def is_launcher(words: list[str]) -> bool:
    """True if a command line is accelerate's, started by its name or by a child of ours."""
    ours = ("on_loopback.py", "accelerate_launch.py")
    return "accelerate.commands.launch" in words or any(word.endswith(ours) for word in words)


def runs_of(workspace: Path) -> list[RunDir]:
    """The runs that were begun, also those that tokenise and have no plan yet."""
    return [RunDir(path.parents[1]) for path in workspace.glob("runs/*/[0-9]*/attempts/01")]


class Child:
    """`python -m launch run` of a tiny recipe, or another line that trains it, and its run
    folder."""

    def __init__(
        self, folder: Path, argv: tuple[str, ...], workspace: Path, out: Path, **extra: str
    ) -> None:
        self.workspace, self.out, self.tag = workspace, out, extra.get("LOWMEM_RUN")
        self.before = orphans.snapshot()
        self.shm = set(Path("/dev/shm").iterdir())
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                argv,
                env=builders.environment(workspace, **extra),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,  # without a terminal
            )

    @property
    def run(self) -> RunDir:
        """The one run that there is, whatever its recipe is called."""
        (run,) = runs_of(self.workspace)
        return run

    def said(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")

    def until(self, what: str, found: Callable[[], Any], within_s: float = 120) -> Any:
        """What `found` returns once it is something; the run must be alive meanwhile."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                if value := found():
                    return value
            except (ValueError, FileNotFoundError):
                pass  # there is no run folder yet
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}:\n{self.said()}"
            )
            assert time.monotonic() < deadline, f"never {what}:\n{self.said()}"
            time.sleep(0.02)

    def committed(self) -> list[int]:
        """Steps of the checkpoints that are there."""
        return sorted(
            int(path.parent.name[11:])
            for path in self.run.checkpoints.glob("checkpoint-*/manifest.json")
        )

    def ranks(self, number: int = 2) -> list[psutil.Process]:
        """The processes that train, by rank, of the newest attempt."""

        def found() -> list[psutil.Process] | None:
            attempt = self.run.attempts()[-1]
            files = sorted(attempt.root.glob("ranks/*/heartbeat.json"))
            beats = [json.loads(file.read_text()) for file in files]
            pids = [
                beat["pid"]
                for beat in beats
                if beat["section"] != "tokenise" and processes.is_alive(beat["pid"])
            ]
            return [psutil.Process(pid) for pid in pids] if len(pids) == number else None

        return self.until("ranks", found)

    def launcher(self) -> psutil.Process:
        """accelerate's."""

        def found() -> psutil.Process | None:
            for process in processes.tagged(self.run.tag):
                with suppress(psutil.Error):  # gone meanwhile
                    if is_launcher(process.cmdline()):
                        return process
            return None

        return self.until("accelerate", found)

    def section(self, rank: int = 0) -> str:
        return json.loads(self.run.attempts()[-1].heartbeat_file(rank).read_text())["section"]

    def wait(self, within_s: float = 90) -> int:
        return self.process.wait(timeout=within_s)

    def left(self, within_s: float = 5) -> list[object]:
        """Processes, ports and shared memory of the run that outlived it; ended then, so that one
        failure stays one."""
        found: list[object] = list(orphans.left(self.before, self.tag or self.run.tag, within_s))
        for orphan in found:
            processes.send(orphan.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return found + [
            path
            for path in sorted(set(Path("/dev/shm").iterdir()) - self.shm)
            if not _is_used(path)
        ]

    def outcome(self) -> dict[str, Any]:
        return json.loads(self.run.attempts()[-1].outcome_file.read_text())


def _is_used(path: Path) -> bool:
    """Whether a process that runs has it open: another test's."""
    for process in psutil.process_iter():
        try:
            if any(
                entry.path == str(path)
                for entry in [*process.memory_maps(grouped=True), *process.open_files()]
            ):
                return True
        except psutil.Error:
            continue
    return not path.exists()


def injecting(folder: Path, **faults: dict[str, Any]) -> dict[str, str]:
    """The environment in which ranks do these (tests/faults/inject)."""
    (folder / "marks").mkdir(exist_ok=True)
    path = f"{builders.CODE}:{builders.CODE / 'tests/faults/inject'}"
    return {
        "PYTHONPATH": path,
        "PYTHON_FAULTS": json.dumps(faults),
        "PYTHON_FAULT_MARKS": str(folder / "marks"),
    }


def fired(folder: Path, fault: str) -> int:
    """How often it was done."""
    return len(list((folder / "marks").glob(f"{fault}.*")))


def at_step(step: str, do: str, rank: int | None = 1, **more: Any) -> dict[str, Any]:
    """A fault at the end of an optimizer step; `done` is how often it was done before."""
    when = f"args[2].global_step == ({step})"
    return {
        "module": "training.control.stop_callback",
        "attribute": "StopCallback.on_step_end",
        "when": when,
        "rank": rank,
        "do": do,
        **more,
    }


@contextmanager
def launched(
    folder: Path,
    ranks: int = 2,
    words: tuple[str, ...] = (),
    workspace: str = "workspace",
    faults: dict[str, Any] | None = None,
    extra: dict[str, str] | None = None,
    **sections: Any,
) -> Iterator[Child]:
    """A run under our launcher; killed at the end of the test, whatever the test found."""
    sections["training"] = {**ENDLESS, **sections.get("training", {})}
    sections["launch"] = {"num_processes": ranks, **sections.get("launch", {})}
    recipe = builders.recipe(folder, **sections)
    environment = {**(extra or {}), **(injecting(folder, **faults) if faults else {})}
    with ended(
        Child(
            folder,
            (*RUN, str(recipe), *words),
            folder / workspace,
            folder / f"{workspace}.out",
            **environment,
        )
    ) as child:
        yield child


@contextmanager
def ended(child: Child) -> Iterator[Child]:
    """Nothing of it outlives the test, whatever the test finds."""
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
        for run in runs_of(child.workspace):
            processes.end_tree(run.tag)
        if child.tag:
            processes.end_tree(child.tag)


def stop_at_random(child: Child, rng: random.Random) -> tuple[str, float]:
    """SIGTERM before the first step or, mostly, behind it, to whom chance says, ranks up to 5 s
    apart.

    (what was done, in words; when, on the monotonic clock)"""
    child.until("a run folder", lambda: child.run)
    to = rng.choice(["launcher", "accelerate", "rank 0", "rank 1", "both ranks"])
    delay_s, skew_s = rng.uniform(0, 4), rng.uniform(0, 5)
    since = rng.choice(["start", "first step", "first step", "first checkpoint"])
    if since == "first step":
        child.until("a step", lambda: child.section() not in ("tokenise", "load", "first step"))
    elif since == "first checkpoint":
        child.until("a checkpoint", child.committed)
    if to == "launcher":  # also while it tokenises, and while ranks load
        time.sleep(delay_s)
        began = time.monotonic()
        child.process.send_signal(signal.SIGTERM)
    elif to == "accelerate":
        launcher = child.launcher()
        child.ranks()
        time.sleep(delay_s)
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
    else:
        ranks = child.ranks()
        time.sleep(delay_s)
        began = time.monotonic()
        chosen = {"rank 0": ranks[:1], "rank 1": ranks[1:], "both ranks": ranks}[to]
        for i, rank in enumerate(chosen):
            time.sleep(skew_s if i else 0)
            processes.send(rank.pid, signal.SIGTERM)
    words = f"{to} {delay_s:.1f} s after the {since}" + (
        f", {skew_s:.1f} s apart" if to == "both ranks" else ""
    )
    return words, began
