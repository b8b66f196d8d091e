"""What faults leave of the time: a fault a minute, ours beside a plain `accelerate launch`, each in
a restart loop.

Both train the same model on the same rows at the same time, two ranks, each pair on its own half of
the CPUs, a save every I seconds. A fault, at the same moment to both, kills one rank or everything
that was started (--kinds; stop: one rank stands still), and the loop of a shell starts what has
ended again. The plain one is benchmarks/list_in_ram.py: transformers.Trainer with its own
checkpoints, gone on from the newest.

Useful are the steps that were kept, at the median pace between two saves, over the wall time from
the first step on. The model is 1 - s/I - (I/2 + d + r)/M: s seconds of a save, I between two saves,
d from a fault to the end of the last rank, r from there to the next new step, M between faults; all
of the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import launch_overhead, recording

GOAL = 0.95  # of the model
BATCH = 16
KINDS = {"rank": "one rank killed", "all": "everything killed", "stop": "one rank stopped"}
POLL_S = 0.02
STALE_S = 60.0  # a start that gives no step in so long is no restart, but one more failure


@dataclass
class Arm:
    """One way to train, started again whenever it ends."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cpus: list[int]
    folder: Path
    starts: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    child: subprocess.Popen[bytes] | None = None

    def loop(self, until: float) -> None:
        """The shell's loop: `until COMMAND; do sleep 1; done`."""
        while time.time() < until:
            self.starts += 1
            with (self.folder / "log.txt").open("ab") as log:
                self.child = subprocess.Popen(
                    self.argv,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: os.sched_setaffinity(0, self.cpus),
                )
            while self.child.poll() is None and time.time() < until:
                time.sleep(POLL_S)
            if time.time() < until:
                time.sleep(1)
        self.end()

    def end(self) -> None:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.child
        self.child.wait()

    def tree(self) -> list[psutil.Process]:
        """All that was started, children first."""
        if self.child is None:
            return []
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.child.pid)
            return [*root.children(recursive=True)[::-1], root]
        return []

    def ranks(self) -> list[psutil.Process]:
        found = {}
        for process in self.tree():
            with suppress(psutil.Error):
                if "RANK" in (words := process.environ()):
                    found.setdefault(words["RANK"], process)
        return [found[rank] for rank in sorted(found)]

    def steps(self) -> list[dict[str, Any]]:
        """{step, time} of every step that rank 0 has told, in time's order; a killed rank may leave
        half a line."""
        found = []
        for file in [
            *self.folder.glob("workspace/runs/overhead/*/attempts/*/events.jsonl"),
            *self.folder.glob("times.jsonl"),
        ]:
            for line in file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    words = json.loads(line)
                    found.append({"step": words["step"], "time": words["time"]})
        return sorted(found, key=lambda step: step["time"])

    def fault(self, kind: str, which: int, deadline: float) -> None:
        """As soon as there is a rank to do it to."""
        while len(ranks := self.ranks()) < 2 and time.time() < deadline:
            time.sleep(POLL_S)
        if len(ranks) < 2:
            return
        done = {"kind": kind, "time": time.time()}
        hit = self.tree()[::-1] if kind == "all" else [ranks[which]]
        for process in hit:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=max(deadline - time.time(), 0))
        self.faults.append({**done, "ended": time.time()})


def recipe(folder: Path, save_steps: int, hang_floor_s: float) -> Path:
    """mini-chat on the sample data, longer than any fault lets it get."""
    path = launch_overhead.recipe(folder, 1_000_000)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["training"] |= {"save_steps": save_steps, "save_total_limit": 2, "logging_steps": 5}
    content["training"] |= {"per_device_train_batch_size": BATCH}
    del content["data"]["validation_file"]
    content["launch"] |= {"max_restarts": 1000, "hang_floor_s": hang_floor_s}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def arms(folder: Path, save_steps: int, hang_floor_s: float) -> list[Arm]:
    """Ours and the plain one; ours has tokenised once, and leaves the other its tokenizer and its
    configuration."""
    for name in ("ours", "plain"):
        (folder / name).mkdir()
    path = recipe(folder / "ours", save_steps, hang_floor_s)
    env = {
        **recording.environment(folder / "ours" / "workspace"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    ours = [sys.executable, "-m", "launch", "run", str(path)]
    subprocess.run(
        [*ours, "--training.max_steps=2", "--name=first"], env=env, check=True, capture_output=True
    )
    (config,) = (folder / "ours/workspace/runs").glob("*/*/accelerate.yaml")
    (tokenizer,) = (folder / "ours/workspace/.cache/tokens").glob("*/tokenizer")
    plain = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    plain += ["-m", "benchmarks.list_in_ram", "--tokenizer", str(tokenizer), "--shape", "mini-chat"]
    plain += [
        "--rows",
        yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["train_file"],
        "--max-length",
        "128",
    ]
    plain += [
        "--batch",
        str(BATCH),
        "--steps",
        "1000000",
        "--seed",
        "1",
        "--save-steps",
        str(save_steps),
    ]
    plain += ["--steps-file", str(folder / "plain" / "times.jsonl")]
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [
        Arm("ours", ours, env, cpus[:half], folder / "ours"),
        Arm(
            "plain",
            plain,
            {**recording.environment(folder / "plain" / "workspace"), **threads},
            cpus[-half:],
            folder / "plain",
        ),
    ]


def torment(found: list[Arm], minutes: float, every_s: float, kinds: list[str], seed: int) -> None:
    """Both trained for so long from now, with a fault to both every `every_s` seconds, give or take
    a third."""
    until = time.time() + 60 * minutes
    loops = [threading.Thread(target=arm.loop, args=(until,)) for arm in found]
    for loop in loops:
        loop.start()
    rng, began = random.Random(seed), time.time()
    for number in range(1, math.ceil(60 * minutes / every_s)):
        kind, which = kinds[number % len(kinds)], rng.randrange(2)
        time.sleep(max(0, began + every_s * (number + rng.uniform(-0.3, 0.3)) - time.time()))
        faults = [threading.Thread(target=arm.fault, args=(kind, which, until)) for arm in found]
        for fault in faults:
            fault.start()
        while any(fault.is_alive() for fault in faults) and time.time() < began + every_s * (
            number + 0.6
        ):
            time.sleep(POLL_S)
        print(
            f"{number}  {KINDS[kind]}; steps kept:"
            f" {', '.join(f'{arm.name} {kept(arm)}' for arm in found)}",
            flush=True,
        )
    for loop in loops:
        loop.join()


def kept(arm: Arm) -> int:
    return max((step["step"] for step in arm.steps()), default=0)


def measured(arm: Arm, save_steps: int, until: float) -> dict[str, Any]:
    """The useful share, and what the model says of it; seconds."""
    steps = arm.steps()
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if b["step"] == a["step"] + 1]
    pauses = [(b["time"] - a["time"], b["step"]) for a, b in pairs]
    pace = statistics.median(pause for pause, step in pauses if step % save_steps != 1)
    saves = [pause - pace for pause, step in pauses if step % save_steps == 1]
    save_s = statistics.median(saves) if saves else math.nan
    wall_s = until - steps[0]["time"]
    detection, restart = [], []
    for fault in arm.faults:
        before = max((step["step"] for step in steps if step["time"] <= fault["time"]), default=0)
        new = [step["time"] for step in steps if step["time"] > fault["ended"]]
        if not new:
            continue
        detection.append(fault["ended"] - fault["time"])
        restart.append(new[0] - fault["ended"])
        fault["steps_lost"] = (
            before - min(step["step"] for step in steps if step["time"] == new[0]) + 1
        )
    interval_s = save_steps * pace + save_s
    between_s = wall_s / max(len(arm.faults), 1)
    useful = kept(arm) * pace / wall_s
    d, r = (statistics.mean(values) if values else math.nan for values in (detection, restart))
    model = 1 - save_s / interval_s - (interval_s / 2 + d + r) / between_s
    return {
        "useful": round(useful, 4),
        "model": round(model, 4),
        "of_the_model": round(useful / model, 4),
        "I_s": round(interval_s, 3),
        "s_s": round(save_s, 4),
        "d_s": round(d, 3),
        "r_s": round(r, 3),
        "r_p95_s": (
            round(statistics.quantiles(restart, n=20)[-1], 3) if len(restart) > 1 else math.nan
        ),
        "M_s": round(between_s, 2),
        "pace_s": round(pace, 4),
        "steps_kept": kept(arm),
        "starts": arm.starts,
        "faults": arm.faults,
        "most_steps_lost": max((fault.get("steps_lost", 0) for fault in arm.faults), default=0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every-s", type=float, default=60, help="seconds between two faults")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["rank", "all"])
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument(
        "--hang-floor-s", type=float, default=10, help="launch.hang_floor_s of ours"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = arms(folder, arguments.save_steps, arguments.hang_floor_s)
        load = recording.quiet()
        torment(found, arguments.minutes, arguments.every_s, arguments.kinds, arguments.seed)
        until = time.time()
        figures = {arm.name: measured(arm, arguments.save_steps, until) for arm in found}
        for arm in found:
            print(
                f"-- {arm.name}\n"
                + (arm.folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
            )
    head = (
        "",
        "useful",
        "model",
        "useful / model",
        "s",
        "I",
        "d",
        "r (p95)",
        "M",
        "steps kept",
        "most steps lost",
    )
    rows = [
        (
            name,
            one["useful"],
            one["model"],
            one["of_the_model"],
            f"{one['s_s']} s",
            f"{one['I_s']} s",
            f"{one['d_s']} s",
            f"{one['r_s']} ({one['r_p95_s']}) s",
            f"{one['M_s']} s",
            one["steps_kept"],
            one["most_steps_lost"],
        )
        for name, one in figures.items()
    ]
    kinds = ", ".join(KINDS[kind] for kind in arguments.kinds)
    text = f"{len(found[0].faults)} faults in {arguments.minutes:g} minutes, in turn: {kinds}."
    text += f" Goal: {GOAL} of the model.\n\n"
    recording.write(
        "useful_time", {"load_before": load, **figures}, text + recording.table(head, rows)
    )
    return 0 if figures["ours"]["of_the_model"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
