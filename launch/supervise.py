"""One attempt at a run, from the lock to the report: prepare, start the ranks, watch, stop them, say how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from launch import environment, failures, probe, rundir
from launch.resolve import Resolved
from launch.rundir import AttemptDir, RunDir
from launch.schema import Command, Evidence, RunResult
from launch.screen import Screen

POLL_S = 0.2
PSS_INTERVAL_S = 1.0
STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL
LOG_TAIL_BYTES = 64 << 10
# What launchers tell their ranks. Left over from one around us, or exported by hand, it would make ours start something
# else: ACCELERATE_USE_CPU drops DeepSpeed, RANK and WORLD_SIZE another number of ranks.
LAUNCHERS_OWN = re.compile(
    r"(ACCELERATE|FSDP|TORCHELASTIC)_|((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT))$"
)


def run(
    resolved: Resolved,
    rundir_: RunDir,
    attempt: AttemptDir,
    ready: Callable[[], Command],
    screen: Screen,
    check: Callable[[Mapping[str, int]], bool] = lambda measured: True,
) -> RunResult:
    """Run the attempt to its end: tokenise, ask what `ready` starts, watch it. The run folder is locked meanwhile.

    `check` is given what the second step took; where it says False the ranks are stopped, and the result, which is no
    failure, asks to plan again."""
    began = time.monotonic()
    oom_kills, host_peak, is_refuted = probe.oom_kills(), 0, False
    with _signals() as received:
        returncode = prepare(resolved, rundir_, attempt, screen.say)
        if returncode == 0:
            returncode, host_peak, is_refuted = _watch(
                ready(), rundir_, attempt, screen, received, check, resolved.recipe.launch.pass_env
            )
    outcome = rundir.read_json(attempt.outcome_file)
    evidence = Evidence(
        returncode=returncode,
        rank_errors=tuple(attempt.rank_errors()),
        log_tail=_tail(attempt.log_file),
        oom_kills=probe.oom_kills() - oom_kills,
        host_limit_bytes=resolved.machine.host_limit_bytes,
        host_peak_bytes=host_peak,
        completed=bool(outcome and outcome["complete"]),
        stopped_by=received[0] if received else None,
    )
    failure = None if is_refuted else failures.classify(evidence)
    return RunResult(
        run_dir=str(rundir_.root),
        exit_code=failure.exit_code if failure else 0,
        failure=failure,
        seconds=time.monotonic() - began,
        host_peak_bytes=host_peak,
        summary=outcome or {},
        plan_again=is_refuted,
        note=f"the launcher ended with {returncode} while closing down, after the model was written: {attempt.log_file}"
        if failure is None and returncode and not is_refuted
        else "",
    )


def prepare(resolved: Resolved, run: RunDir, attempt: AttemptDir, say: Callable[[str], None]) -> int:
    """Tokenise in a child, unless the rows are there already; returns its exit code."""
    known = rundir.read_json(run.tokens_file)
    if known and (Path(known["folder"]) / rundir.TOKENS_READY).exists():
        return 0
    folder = rundir.token_cache(resolved.house.cache, resolved.recipe, resolved.plan.shape, resolved.plan.data_format)
    if (folder / rundir.TOKENS_READY).exists():
        rundir.write_json(run.tokens_file, {"folder": str(folder)})
        return 0
    argv = [sys.executable, "-P", "-m", "training.prepare", "--run-dir", str(run.root)]
    argv += ["--attempt", str(attempt.number), "--cache", str(resolved.house.cache)]
    inherited = environment.passed(os.environ, resolved.recipe.launch.pass_env)
    added = {"PYTHONPATH": str(rundir.CODE), "HF_HUB_OFFLINE": "1", "LOWMEM_RUN": run.run_id}
    with subprocess.Popen(argv, env=inherited | added, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
        assert child.stdout is not None
        for line in child.stdout:
            say(line.rstrip("\n"))
    return child.returncode


def _watch(
    command: Command,
    run: RunDir,
    attempt: AttemptDir,
    screen: Screen,
    received: list[int],
    check: Callable[[Mapping[str, int]], bool],
    pass_env: Sequence[str],
) -> tuple[int, int, bool]:
    """Start the ranks, wait for them, stop them when told to.

    (exit code of the launcher, peak PSS of the job, whether the second step refuted the plan)"""
    inherited = environment.passed(os.environ, pass_env)
    variables = {
        **{key: value for key, value in inherited.items() if not LAUNCHERS_OWN.match(key)},
        **command.env,
        "LOWMEM_RUN": run.run_id,  # the tag by which any process of this run can be found
        "LOWMEM_ROOT_PID": str(os.getpid()),
        "LOWMEM_SUPERVISED": "1",
    }
    host_peak, measured_at, stopping_since, is_checked, is_refuted = 0, 0.0, None, False, False
    with attempt.log_file.open("ab") as log:
        child = subprocess.Popen(
            command.argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on the terminal is for us; we pass it on
            preexec_fn=rundir.die_with_launcher,
        )
        screen.start(attempt)
        try:
            while True:
                try:
                    returncode = child.wait(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    screen.update()
                now = time.monotonic()
                if now - measured_at >= PSS_INTERVAL_S:
                    measured_at = now
                    host_peak = max(host_peak, rundir.job_pss_bytes(os.getpid())[1])
                if not is_checked and (measured := rundir.read_json(attempt.second_step_file)):
                    is_checked, is_refuted = True, not check(measured)
                if (received or is_refuted) and stopping_since is None:
                    stopping_since = now
                    _signal_tree(run.run_id, signal.SIGTERM)
                elif stopping_since is not None and now - stopping_since > STOP_GRACE_S:
                    _signal_tree(run.run_id, signal.SIGKILL)
        finally:
            screen.stop()
            _signal_tree(run.run_id, signal.SIGKILL)  # nothing outlives the attempt, however it ended
    return returncode, host_peak, is_refuted


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect stop signals instead of dying from them; the first one counts."""
    received: list[int] = []
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tagged(run_id: str) -> list[psutil.Process]:
    """Every process that carries the run's tag in its environment, wherever it stands in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("LOWMEM_RUN") == run_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's
    return found


def _signal_tree(run_id: str, number: int) -> None:
    for process in tagged(run_id):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def write_outcome(result: RunResult, attempt: AttemptDir) -> None:
    """Beside rank 0's outcome, what the supervisor saw."""
    failure: Mapping[str, Any] | None = None if result.failure is None else vars(result.failure)
    rundir.write_json(
        attempt.root / "supervisor.json",
        {"exit_code": result.exit_code, "failure": failure, "seconds": result.seconds},
    )
