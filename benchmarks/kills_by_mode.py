"""Real launches of every mode that runs on CPUs, killed and signalled at random moments until they
end: each has the weights of one that was left alone, each start its exit code, and nothing is left.

A run is started, disturbed, and started again by the same line, EVENTS_OF_A_RUN times at most; then
it is left to end. An event is a kill -9 (of every process, of the launcher, of accelerate, of one
rank) or a storm of signals to any of them. Its moment is drawn from the seed, the mode and the
number of the run: while it plans, tokenises and loads, behind the first step, behind a checkpoint,
or in a save. TMPDIR is a folder of the run's own. Before its last start what lies there is dated
back by two hours, because a start removes only what nobody has touched for one; when that start has
ended, only the folder of compiled code may be there.

Each finished run is a row of results/kills_by_mode.json; a campaign that was cut off goes on there.
On another processor it first trains undisturbed runs again, because another adds in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks import kills, recording
from launch.base import processes
from launch.run_folder import sample_audit
from launch.run_folder.layout import RunDir
from launch.schema.modes import LAUNCH_MODES
from tests import builders, stopping
from tests.stopping import Child

NAME, SEED = "kills_by_mode", 1  # results of another seed have a file of their own
MODES = tuple(mode for mode, row in LAUNCH_MODES.items() if row.device != "cuda")
EVENTS_OF_A_RUN = 5
TRAINING = {"max_steps": 90, "save_steps": 8, "eval_steps": 40, "logging_steps": 1}
LIMIT_S = 300.0  # of one start, on a busy machine
LEFT_S = 20.0  # in which what a run was made of has to go
STACKS_S = 1.0  # for stacks to be written
LONG_AGO_S = 7200.0
VICTIMS = ("everything", "the launcher", "accelerate", "one rank")
# the longest wait in seconds behind each
MOMENTS = {"the start": 6.0, "the first step": 2.0, "a checkpoint": 2.0, "a save": 0.05}
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
Row = dict[str, Any]


# ---- a run
# ---------------------------------------------------------------------------


class Start(Child):
    """A start of a run, which has folders of earlier starts."""

    def __init__(self, folder: Path, argv: tuple[str, ...], out: Path, **extra: str) -> None:
        self.earlier = {run.root: len(run.attempts()) for run in stopping.runs_of(folder / "h")}
        self.began = time.time()
        super().__init__(recording.CODE, argv, folder / "h", out, **extra)

    @property
    def run(self) -> RunDir:
        """The newest; a kill while rows are tokenised leaves a folder in which nothing trained."""
        return max(stopping.runs_of(self.workspace), key=lambda run: run.root.name)

    def trains(self) -> bool:
        """True once rank 0 of this start's own attempt has made a step."""
        is_own = len(self.run.attempts()) > self.earlier.get(self.run.root, 0)
        return is_own and self.section() in ("step", "evaluation", "save", "export")

    def saves(self) -> bool:
        staged = self.run.checkpoints.glob("tmp-checkpoint-*")
        return self.trains() and any(path.stat().st_mtime >= self.began for path in staged)


def started(folder: Path, mode: str, number: int) -> Start:
    """Another start of the run in `folder`, by the same line; FSDP2 through its shim."""
    argv = (*stopping.RUN, str(folder / "tiny.yaml"), f"--launch.mode={mode}")
    if mode == "fsdp2":
        argv = (sys.executable, "-m", "tests.modes.launch_one", mode, str(folder / "tiny.yaml"))
    (folder / "t").mkdir(exist_ok=True)
    return Start(folder, argv, folder / f"{number}.out", TMPDIR=str(folder / "t"))


def write_recipe(folder: Path, mode: str, workers: int) -> None:
    training = {
        **TRAINING,
        "per_device_train_batch_size": 8 // num_ranks(mode),
        "dataloader_num_workers": workers,
    }
    builders.recipe(folder, training=training, launch={"num_processes": num_ranks(mode)})


def num_ranks(mode: str) -> int:
    return 1 if LAUNCH_MODES[mode].processes == "one" else 2


def processor() -> str:
    """Identity of all that decides the bits of a sum beside the code: the processor's kind and
    instructions, and torch's version."""
    described = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    names = ("vendor_id", "cpu family", "model", "flags")
    facts = [line for line in described if line.partition(":")[0].strip() in names]
    facts.append(version("torch"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def undisturbed(mode: str) -> dict[str, Any]:
    """The weights and the trained rows of a run that is left alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recipe(folder, mode, workers=0)
        with stopping.ended(started(folder, mode, 0)) as child:
            assert child.wait(LIMIT_S) == 0, child.said()
            return result(child.run, folder)


def result(run: RunDir, folder: Path) -> dict[str, Any]:
    return {"weights": kills.weights(folder), "rows": sample_audit.lines(run)}


def disturbed(mode: str, seed: int, number: int, events: Sequence[str]) -> Row:
    """A run with some of these events, as many as it takes before it ends by itself."""
    draw = random.Random(f"{seed}/{mode}/{number}")
    row: Row = {"mode": mode, "number": number, "seed": seed, "events": [], "faults": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row["workers"] = draw.choice((0, 0, 1))
        write_recipe(folder, mode, row["workers"])
        for start in range(len(events) + 1):
            is_last = start == len(events)
            if is_last:
                date_back(folder / "t")
            with stopping.ended(started(folder, mode, start)) as child:
                event: Row = {"kind": "none", "expected": [0]}
                if not is_last:
                    event = (killed if events[start] == "kill" else stormed)(child, mode, draw)
                event["code"] = ended_with(child)
                row["events"] += [] if event["kind"] == "none" else [event]
                row["faults"] += judged(child, event)
                if event["code"] == 0 or row["faults"]:
                    break
        if event["code"] == 0:
            row |= result(child.run, folder)
        if is_last and event["code"] == 0:
            names = [path.name for path in (folder / "t").iterdir()]
            row["faults"] += [f"left in TMPDIR: {n}" for n in names if not n.startswith("lowmem-")]
    return row


def date_back(folder: Path) -> None:
    """Make what lies in a folder look as if the next start came two hours later."""
    then = time.time() - LONG_AGO_S
    for path in folder.iterdir():
        os.utime(path, (then, then), follow_symlinks=False)


def ended_with(child: Start) -> int | None:
    """The exit code of a start; None if it does not end."""
    try:
        return child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def judged(child: Start, event: Row) -> list[str]:
    """The faults of the end of a start: exit code, leftovers, tracebacks."""
    faults = []
    if event["code"] not in event["expected"]:
        faults.append(f"exit code {event['code']}, not {event['expected']}: {child.said()[-1500:]}")
    if event["code"] is None:
        faults.append(f"does not end: {stacks(child)}")
    if stopping.runs_of(child.workspace):
        faults += [f"left behind: {what}" for what in child.left(LEFT_S)]
    if "Traceback" in child.said():
        faults.append(f"a traceback: {child.said()[-1500:]}")
    return faults


def stacks(child: Start) -> str:
    """Processes of a start that does not end, and the stacks that its ranks write when asked."""
    family = descendants(child)
    named = [str(one) for one in family]  # pid, name, status
    for one in family:
        if catches(one.pid, signal.SIGQUIT):
            processes.send(one.pid, signal.SIGQUIT)
            time.sleep(STACKS_S)  # a data worker writes to its rank's file
    files = sorted(child.run.attempts()[-1].root.glob("ranks/*/stacks.txt"))
    return "\n".join([*named, *(file.read_text("utf-8")[-4000:] for file in files)])


# ---- events
# ---------------------------------------------------------------------------


def killed(child: Start, mode: str, draw: random.Random) -> Row:
    """Kill -9 at a moment; the event, of the kind "none" if the run has ended before."""
    victim = draw.choice(VICTIMS)
    moment, wait_s = drawn_moment(draw)
    event: Row = {"kind": "kill", "of": victim, "behind": moment, "after_s": round(wait_s, 3)}
    # a lost rank is started again at once, but not by the shim of FSDP2
    again = [1] if mode == "fsdp2" else [0]
    event["expected"] = again if victim in ("accelerate", "one rank") else [-signal.SIGKILL]
    targets = at_moment(child, mode, draw, moment, wait_s, victim)
    if not targets:
        return {"kind": "none", "expected": [0]}
    kills.kill(targets)
    return event


def stormed(child: Start, mode: str, draw: random.Random) -> Row:
    """Signals to processes of the run, one after the other; the event, as killed() has it."""
    moment, wait_s = drawn_moment(draw)
    number, pause_s = draw.randint(3, 20), draw.choice((0.0, 0.02, 0.2))
    drawn = [draw.choice((*STOPS, signal.SIGUSR2)) for _ in range(number)]
    drawn[draw.randrange(number)] = draw.choice(STOPS)
    # the first stop is for the launcher, whose code is looked at
    first = next(i for i, name in enumerate(drawn) if name in STOPS)
    event: Row = {"kind": "storm", "behind": moment, "after_s": round(wait_s, 3)}
    event["signals"] = [name.name for name in drawn]
    if not at_moment(child, mode, draw, moment, wait_s, "the launcher"):
        return {"kind": "none", "expected": [0]}
    sent = []
    for i, name in enumerate(drawn):
        family = [child.process.pid, *(one.pid for one in descendants(child))]
        if child.process.poll() is None:
            processes.send(child.process.pid if i == first else draw.choice(family), name)
            sent.append(name)
        time.sleep(pause_s)
    codes = {130 if name == signal.SIGINT else 75 for name in sent if name in STOPS}
    # a run that had written its model is complete
    is_complete = (child.workspace.parent / "model").exists()
    event["expected"] = [*sorted(codes), *([0] if is_complete else [])]
    return event


def drawn_moment(draw: random.Random) -> tuple[str, float]:
    moment = draw.choice(tuple(MOMENTS))
    return moment, draw.uniform(0, MOMENTS[moment])


def descendants(child: Start) -> list[psutil.Process]:
    try:
        return psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def at_moment(
    child: Start, mode: str, draw: random.Random, moment: str, wait_s: float, victim: str
) -> list[int]:
    """The processes to hit, once the moment has come; none if the run has ended before."""
    newest = len(child.committed()) if stopping.runs_of(child.workspace) else 0

    def of_victim() -> list[int]:
        if victim == "accelerate":
            return [child.launcher().pid]
        if victim == "one rank":
            return [draw.choice(child.ranks(num_ranks(mode))).pid]
        below = [one.pid for one in descendants(child)] if victim == "everything" else []
        return [child.process.pid, *below]

    conditions: dict[str, Callable[[], Any]] = {
        "the start": lambda: catches(child.process.pid, signal.SIGTERM),
        "the first step": child.trains,
        "a checkpoint": lambda: len(child.committed()) > newest,
        "a save": child.saves,
    }
    has_come = reached(child, conditions[moment]) and waited(child, wait_s)
    return reached(child, of_victim) or [] if has_come else []


def catches(pid: int, number: int) -> bool:
    """True once a process has a handler for a signal: before that, Python itself starts."""
    try:
        described = Path(f"/proc/{pid}/status").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    for line in described.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def reached(child: Start, condition: Callable[[], Any]) -> Any:
    """The first true value of a condition; None if the run ends before."""
    until_s = time.monotonic() + LIMIT_S
    while child.process.poll() is None and time.monotonic() < until_s:
        try:
            if value := condition():
                return value
        except (ValueError, IndexError, AssertionError, FileNotFoundError, psutil.NoSuchProcess):
            pass  # no run folder, no attempt or no such process yet
        time.sleep(0.002)
    return None


def waited(child: Start, seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while child.process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.002)
    return child.process.poll() is None


# ---- the campaign
# ---------------------------------------------------------------------------


def share(total: int, mode: str) -> int:
    """The number of a mode's events, of so many in all modes."""
    return total // len(MODES) + (MODES.index(mode) < total % len(MODES))


def missing(rows: Sequence[Row], mode: str, kills_in_all: int, storms_in_all: int) -> list[str]:
    """The events that a mode has still to see."""
    seen = Counter(event["kind"] for row in rows if row["mode"] == mode for event in row["events"])
    wanted = {"kill": share(kills_in_all, mode), "storm": share(storms_in_all, mode)}
    return [kind for kind, count in wanted.items() for _ in range(count - seen[kind])]


def compared(row: Row, reference: dict[str, Any]) -> Row:
    """The row, with a fault where it ended with other weights or trained rows; those that are the
    same are written once a mode."""
    for name in ("weights", "rows"):
        if name in row and (value := row.pop(name)) != reference[name]:
            row["faults"].append(f"other {name}: {value}")
    return row


def campaign(kills_in_all: int, storms_in_all: int, seed: int, modes: Sequence[str]) -> list[Row]:
    """Run what is missing, mode by mode in turns, and write each row as it is made."""
    name = NAME if seed == SEED else f"{NAME}_{seed}"
    file = recording.RESULTS / f"{name}.json"
    written = json.loads(file.read_text("utf-8")) if file.exists() else {}
    references: dict[str, Any] = written.get("references", {})  # by processor and mode
    here = references.setdefault(processor(), {})
    rows: list[Row] = written.get("runs", [])
    numbers = (kills_in_all, storms_in_all)
    while unfinished := [mode for mode in modes if missing(rows, mode, *numbers)]:
        for mode in unfinished:
            here[mode] = here.get(mode) or undisturbed(mode)
            number = sum(row["mode"] == mode for row in rows)
            events = missing(rows, mode, *numbers)
            random.Random(f"{seed}/{mode}/{number}/order").shuffle(events)
            row = disturbed(mode, seed, number, events[:EVENTS_OF_A_RUN])
            rows.append(compared(row | {"processor": processor()}, here[mode]))
            print(json.dumps(rows[-1]), flush=True)
            measured = {"seed": seed, "references": references, "runs": rows}
            recording.write(name, measured, table(rows), NAME)
    return rows


def table(rows: Sequence[Row]) -> str:
    head = ("mode", "runs", "kills", "storms", "ended as they must", "left behind", "other weights")
    lines = []
    for mode in MODES:
        runs = [row for row in rows if row["mode"] == mode]
        events = [event for row in runs for event in row["events"]]
        kinds = Counter(event["kind"] for event in events)
        right = sum(event["code"] in event["expected"] for event in events)
        faults = [fault for row in runs for fault in row["faults"]]
        left = sum(fault.startswith("left") for fault in faults)
        other = sum(fault.startswith("other") for fault in faults)
        ended = f"{right} of {len(events)}"
        lines.append((mode, len(runs), kinds["kill"], kinds["storm"], ended, left, other))
    sums = [sum(line[i] for line in lines) for i in (1, 2, 3, 5, 6)]
    right = sum(e["code"] in e["expected"] for row in rows for e in row["events"])
    of_all = f"{right} of {sum(len(row['events']) for row in rows)}"
    return recording.table(head, [*lines, ("all", *sums[:3], of_all, *sums[3:])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100, help="in all modes together")
    parser.add_argument("--storms", type=int, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--mode", choices=MODES, action="append", help="only this one")
    asked = parser.parse_args()
    rows = campaign(asked.kills, asked.storms, asked.seed, asked.mode or MODES)
    return 1 if any(row["faults"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
