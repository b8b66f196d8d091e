"""One attempt at a run, from the lock to the report: prepare, start the ranks, watch them, say how
it ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO

from launch.base import environment, files, processes
from launch.base.errors import Interrupted
from launch.base.workspace import CODE
from launch.data import token_cache, token_hashes
from launch.plan.resolve import Resolved, tokenising_processes
from launch.probe import machine
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.plan import Command
from launch.schema.result import AttemptEnd, Evidence, Outcome, RunResult, SecondStep
from launch.supervise import failures, heartbeats, stop_signals
from launch.supervise.heartbeats import Progress
from launch.supervise.screen import Screen, Tail
from launch.supervise.stop_signals import StopSignals
from launch.supervise.watch import Ended, RankWatcher

LOG_TAIL_BYTES = 64 << 10
TOKENISE_GRACE_S = 5.0  # to remove what is half written
# What launchers tell their ranks. Left over from one around us, or exported by hand, it would make
# ours start something else: ACCELERATE_USE_CPU drops DeepSpeed, RANK and WORLD_SIZE another number
# of ranks.
LAUNCHERS_OWN = re.compile(
    r"(ACCELERATE|FSDP|TORCHELASTIC)_|((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT))$"
)
# torchrun's agent, which accelerate starts several ranks with: it passes signals on to them, also
# Slurm's early one, which would end it, and leaves it to us how long their checkpoint may take.
# accelerate has no flag for either.
AGENTS_OWN = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "86400",
}


def run(
    resolved: Resolved,
    rundir_: RunDir,
    attempt: AttemptDir,
    ready: Callable[[], Command],
    screen: Screen,
    check: Callable[[SecondStep], bool] = lambda measured: True,
    heard: StopSignals | None = None,
    end_s: float | None = None,
) -> RunResult:
    """Run the attempt to its end: tokenise, ask what `ready` starts, watch it.

    `check` is given what the second step took; where it says False the ranks are ended, and the
    result, which is no failure, asks to plan again. `heard` collects signals for several attempts;
    `end_s` is when they must be over, on the monotonic clock."""
    began = time.monotonic()
    oom_kills = machine.oom_kills()
    processes.adopt()
    with stop_signals.signals() if heard is None else nullcontext(heard) as heard:
        heard.collect()
        try:
            ended = prepare(resolved, rundir_, attempt, screen.say, heard)
        finally:
            screen.stop()
        if ended.returncode == 0 and heard.stop is None:
            watch = RankWatcher(
                rundir_,
                attempt,
                screen,
                heard,
                resolved.recipe.launch,
                resolved.machine.host_limit_bytes,
                check,
            )
            with suppress(Interrupted):  # `heard` has the stop, which the result names
                command = ready()
                with attempt.log_file.open("ab") as log:
                    ended = watch.until_end(_start(command, resolved, rundir_, log, end_s))
    outcome = attempt.read_outcome()
    completed = bool(outcome and outcome.complete)
    # the ranks' own last look: what came after the watch's would be lost
    host_peak_bytes = max(ended.host_peak_bytes, outcome.host_pss_bytes if outcome else 0)
    evidence = Evidence(
        returncode=ended.returncode,
        rank_errors=tuple(attempt.rank_errors()),
        log_tail=_tail(attempt.log_file),
        oom_kills=machine.oom_kills() - oom_kills,
        host_limit_bytes=resolved.machine.host_limit_bytes,
        host_peak_bytes=host_peak_bytes,
        completed=completed,
        stopped_by=heard.stop,
        preempted=None if completed else outcome,
        hang=ended.hang,
        pressure=ended.pressure,
        ended_ranks=tuple(ended.ended_ranks),
        **last_vram(attempt.events_file),
    )
    beats = heartbeats.read_all(attempt)
    failure = None if ended.is_refuted else failures.classify(evidence)
    if failure is not None:
        failure = replace(
            failure, section=heartbeats.section_of_the_first(beats, evidence.rank_errors)
        )
    # before there was a rank to say so
    if outcome is None and failure is not None and failure.kind == "stopped":
        files.write_json(attempt.outcome_file, Outcome(complete=False, ended="preempted"))
    notes = []
    if ended.unkillable:
        notes.append(
            f"not even SIGKILL ended process {', '.join(map(str, ended.unkillable))}: restart the"
            " machine"
        )
    if failure is None and ended.returncode and not ended.is_refuted:
        notes.append(
            f"the launcher ended with {ended.returncode} while closing down, after the model was"
            f" written: {attempt.log_file}"
        )
    return RunResult(
        run_dir=str(rundir_.root),
        exit_code=failure.exit_code if failure else 0,
        failure=failure,
        seconds=time.monotonic() - began,
        host_peak_bytes=host_peak_bytes,
        host_left_bytes=ended.host_left_bytes,
        summary=asdict(outcome) if outcome and completed else {},
        plan_again=ended.is_refuted,
        note="; ".join(notes),
        unkillable=tuple(ended.unkillable),
        last_step=max((beat.step for beat in beats), default=0),
    )


def _start(
    command: Command, resolved: Resolved, run: RunDir, log: IO[bytes], end_s: float | None
) -> subprocess.Popen[bytes]:
    inherited = environment.passed(os.environ, resolved.recipe.launch.pass_env)
    variables = {
        **{key: value for key, value in inherited.items() if not LAUNCHERS_OWN.match(key)},
        **AGENTS_OWN,
        **command.env,
        "LOWMEM_RUN": run.tag,  # the tag by which any process of this run can be found
        "LOWMEM_ROOT_PID": str(os.getpid()),
        "LOWMEM_SUPERVISED": "1",
    }
    if end_s is not None:
        variables["LOWMEM_END_S"] = str(end_s)
    return subprocess.Popen(
        command.argv,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C on the terminal is for us; we pass it on
        preexec_fn=processes.die_with_launcher,
    )


def prepare(
    resolved: Resolved,
    run: RunDir,
    attempt: AttemptDir,
    say: Callable[[str], None],
    heard: StopSignals | None = None,
) -> Ended:
    """Tokenise in a child, unless the rows are there already and undamaged. A stop ends the child,
    and so does its silence."""
    used = run.read_tokens()
    folder = used.folder if used else Path()
    if not used or not folder.exists():
        of = resolved.recipe, resolved.plan.shape, resolved.plan.data_format
        folder = token_cache.token_cache(resolved.workspace.cache, *of)
    try:
        if folder.exists() and not token_hashes.fault(folder, partial(_raise_stop, heard)):
            if not used or used.folder != folder:
                run.write_tokens(folder)
            return Ended()
    except Interrupted:
        return Ended()
    argv = [sys.executable, "-P", "-m", "training.data.prepare", "--run-dir", str(run.root)]
    argv += ["--attempt", str(attempt.number), "--cache", str(resolved.workspace.cache)]
    argv += ["--processes", str(tokenising_processes(resolved))]
    inherited = environment.passed(os.environ, resolved.recipe.launch.pass_env)
    added = {"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1", "LOWMEM_RUN": run.tag}
    said_file = attempt.root / "tokenise.log"
    # what libraries print goes where the ranks' output goes
    with said_file.open("wb") as file, attempt.log_file.open("ab") as log:
        child = subprocess.Popen(
            argv,
            env=inherited | added,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.die_with_launcher,
        )
    lines = Tail(said_file, from_start=True)
    until, hang, progress = None, "", Progress()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=processes.POLL_S)
        for line in lines.new_lines():
            say(line)
        if child.returncode is not None:
            return Ended(child.returncode, hang=hang)
        beats = heartbeats.read_all(attempt)
        if not hang and (
            hang := progress.silent(beats, time.monotonic(), resolved.recipe.launch.hang_floor_s)
            or ""
        ):
            say(hang)
            child.kill()
        if heard is not None and heard.stop is not None:
            if until is None:
                child.terminate()
                until = time.monotonic() + TOKENISE_GRACE_S
            elif heard.at_once or time.monotonic() > until:
                child.kill()


def _raise_stop(heard: StopSignals | None) -> None:
    if heard is not None and heard.stop is not None:
        raise Interrupted(heard.stop)


def last_vram(events: Path) -> dict[str, int]:
    """The GPU memory of the last step that was logged; the rank may have died while it wrote
    another."""
    names = ("vram_reserved_bytes", "vram_total_bytes")
    for line in reversed(_tail(events).splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            step = json.loads(line)
            return {name: int(step[name]) for name in names}
    return {}


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def write_outcome(result: RunResult, attempt: AttemptDir) -> None:
    """Beside rank 0's outcome, what the supervisor saw."""
    end = AttemptEnd(result.exit_code, result.failure, result.seconds, result.host_peak_bytes)
    files.write_json(attempt.supervisor_file, end)
