"""Runs that are killed at random moments until they end, each with the weights of one that was not.

Half of the kills wait for a save to begin. The ranks are forks of one process that has imported
what they need, so a start costs two seconds; a start is otherwise that of train_low_mem.py, from a
plan in a run folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import recording
from launch.base import files
from launch.data import token_cache
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir

# by mode
RANKS = {"cpu": 1, "multi_cpu": 2, "deepspeed_zero1": 2, "deepspeed_zero2": 2, "deepspeed_zero3": 2}
KILLS_OF_A_RUN = 12  # then it is left to end
LIMIT_S = 180.0  # of one start
SERVER = """
import json, os, signal, sys, traceback
from training import run  # all that a rank imports
import train_low_mem
for line in sys.stdin:
    asked = json.loads(line)
    pids = []
    for rank in range(asked["ranks"]):
        pid = os.fork()
        if pid == 0:
            if asked["ranks"] > 1:
                os.environ.update(asked["env"], RANK=str(rank), LOCAL_RANK=str(rank))
            log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                code = train_low_mem.main(asked["argv"])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(codes), flush=True)
"""


@dataclass
class Outcome:
    """What a campaign has seen."""

    runs: int = 0
    kills: int = 0
    in_saves: int = 0  # kills while something was staged
    # a verified checkpoint that was not there any more
    lost: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # more steps lost than lie between two saves
    differing: list[str] = field(default_factory=list)  # weights or rows of a finished run
    errors: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.late or self.differing or self.errors)


class Ranks:
    """The process whose forks are the ranks."""

    def __init__(self, workspace: Path, number: int) -> None:
        self.number = number
        env = {**recording.environment(workspace), "OMP_NUM_THREADS": "1"}
        env |= {"LOWMEM_SUPERVISED": "1", "LOWMEM_ROOT_PID": str(os.getpid())}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=recording.CODE,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(workspace / "server.log").open("w"),
            text=True,
        )
        self.workspace = workspace

    def start(self, run: RunDir) -> tuple[list[int], Path]:
        """A new attempt of the run: the ranks' process ids, and their log."""
        attempt = run.new_attempt()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = attempt.root / "log.txt"
        env = {
            "WORLD_SIZE": self.number,
            "LOCAL_WORLD_SIZE": self.number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        asked = {
            "ranks": self.number,
            "env": {key: str(value) for key, value in env.items()},
            "argv": ["--run-dir", str(run.root), "--attempt", str(attempt.number)],
            "log": str(log),
        }
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline()), log

    def codes(self) -> list[int]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def prepare(workspace: Path, mode: str) -> RunDir:
    """A planned run on a tiny model, not started."""
    from tests import builders

    training = {"save_steps": 5, "max_steps": 60, "per_device_train_batch_size": 8 // RANKS[mode]}
    recipe = builders.recipe(
        workspace, launch={"num_processes": RANKS[mode], "mode": mode}, training=training
    )
    done = builders.launch(workspace, "run", str(recipe), "--dry-run")
    assert done.returncode == 0, done.stderr
    run = RunDir(builders.only_run(workspace))
    shutil.rmtree(run.root / "attempts")
    return run


def fresh(run: RunDir, workspace: Path) -> None:
    """The run as it was planned."""
    for name in ("attempts", "checkpoints", "tensorboard"):
        shutil.rmtree(run.root / name, ignore_errors=True)
    run.checkpoints.mkdir()
    shutil.rmtree(workspace / "model", ignore_errors=True)


def good_steps(run: RunDir) -> list[int]:
    return [
        manifest.step_of(path)
        for path in manifest.committed(run.checkpoints)
        if manifest.fault(path) is None
    ]


def weights(workspace: Path) -> str:
    return hashlib.sha256((workspace / "model" / "model.safetensors").read_bytes()).hexdigest()


def last_step(run: RunDir) -> int:
    """Of the newest attempt, as far as its log goes."""
    file = run.attempts()[-1].events_file
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for_save(run: RunDir, rng: random.Random, is_running: Sequence[int], saves: int) -> None:
    """Until so many saves have begun, and a little longer."""
    until, seen, was_there = time.monotonic() + LIMIT_S, 0, False
    while time.monotonic() < until and alive(is_running):
        is_there = any(run.checkpoints.glob("tmp-checkpoint-*"))
        seen, was_there = seen + (is_there and not was_there), is_there
        if seen >= saves:
            time.sleep(rng.uniform(0, 0.03))
            return
        time.sleep(0.0005)


def alive(pids: Sequence[int]) -> bool:
    """Whether all of them run; an ended child of the server is a zombie until it has been waited
    for."""
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
    return True


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def campaign(folder: Path, count: int, seed: int, mode: str = "multi_cpu") -> Outcome:
    """`count` kills; the runs' folders go under `folder`."""
    from launch.run_folder import sample_audit

    rng, seen, workspace = random.Random(seed), Outcome(), folder / "h"
    run = prepare(workspace, mode)
    save_steps = run.read_recipe().training.save_steps
    ranks = Ranks(workspace, RANKS[mode])
    try:
        began = time.monotonic()
        _, log = ranks.start(run)
        codes = ranks.codes()
        assert codes == [0] * RANKS[mode], log.read_text()
        (tokens,) = (workspace / ".cache" / "tokens").glob("*/" + token_cache.TOKENS_READY)
        files.write_json(run.tokens_file, {"folder": str(tokens.parent)})  # which the launcher does
        whole_s, expected, rows = (
            time.monotonic() - began,
            weights(workspace),
            sample_audit.lines(run),
        )
        while seen.kills < count:
            fresh(run, workspace)
            seen.runs += 1
            for number in range(KILLS_OF_A_RUN + 1):
                before = good_steps(run)
                pids, log = ranks.start(run)
                is_last = number == KILLS_OF_A_RUN or seen.kills == count
                if not is_last and rng.random() < 0.5:
                    wait_for_save(run, rng, pids, saves=rng.randint(1, 3))
                elif not is_last:
                    time.sleep(rng.uniform(0, whole_s))
                if not is_last:
                    kill(pids)
                codes = ranks.codes()
                where = f"seed {seed}, run {seen.runs}, start {number + 1}"
                if codes == [0] * RANKS[mode]:
                    break
                if is_last or -signal.SIGKILL not in codes:
                    seen.errors.append(f"{where}: ended with {codes}: {log.read_text()[-2000:]}")
                    break
                seen.kills += 1
                seen.in_saves += any(run.checkpoints.glob("tmp-checkpoint-*"))
                after = good_steps(run)
                if before and (not after or after[-1] < before[-1]):
                    seen.lost.append(f"{where}: {before} before, {after} after")
                if (done := last_step(run)) - (after[-1] if after else 0) > save_steps:
                    seen.late.append(f"{where}: step {done} was done, {after} is there")
            if codes == [0] * RANKS[mode] and (
                weights(workspace) != expected or sample_audit.lines(run) != rows
            ):
                seen.differing.append(f"seed {seed}, run {seen.runs}: {sample_audit.lines(run)}")
            if seen.errors:
                break
    finally:
        ranks.close()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=RANKS, default="multi_cpu")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        seen = campaign(Path(folder), arguments.count, arguments.seed, arguments.mode)
    seconds = round(time.monotonic() - began)
    rows = [
        (
            f"runs ({arguments.mode}, {RANKS[arguments.mode]} rank(s), 60 steps, a save every 5)",
            seen.runs,
        ),
        ("kill -9 of all ranks", seen.kills),
        ("of these during a save", seen.in_saves),
        ("verified checkpoints lost", len(seen.lost)),
        ("kills that cost more than the steps between two saves", len(seen.late)),
        (
            "runs that ended with other weights or rows than one that was not killed",
            len(seen.differing),
        ),
        ("starts that failed", len(seen.errors)),
        ("seconds", seconds),
    ]
    name = "kills" if arguments.mode == "multi_cpu" else f"kills_{arguments.mode}"
    measured = {**asdict(seen), "seed": arguments.seed, "seconds": seconds}
    recording.write(name, measured, recording.table(("", ""), rows), module="kills")
    return 0 if seen.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
