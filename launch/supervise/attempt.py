"""An attempt at a run: start the ranks, watch them, judge how they ended."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from launch.base import environment, files, processes
from launch.probe import machine
from launch.probe.gpu_signs import XidWatch
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Command
from launch.schema.recipe import Recipe
from launch.schema.result import AttemptEnd, AttemptRecord, Ended, Outcome, RunResult, SecondStep
from launch.supervise import failures, heartbeats, stop_signals
from launch.supervise.screen import Screen
from launch.supervise.watch import RankWatcher

_LOG_TAIL_BYTES = 1 << 20  # a cause and the stacks of eight ranks after it, at 98 KiB each
# Variables by which launchers configure their ranks. Those of a launcher around this one, or
# exported by hand, would change what ours starts: ACCELERATE_USE_CPU drops DeepSpeed, RANK and
# WORLD_SIZE change the number of ranks.
_LAUNCHERS_OWN = re.compile(
    r"(ACCELERATE|FSDP|TORCHELASTIC)_|((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT))$"
)
# Settings of torchrun's agent, with which accelerate starts several ranks. It passes signals on to
# them, also Slurm's early signal, which would end it, and does not limit the time for their
# checkpoint. accelerate has no flag for either.
_AGENTS_OWN = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "86400",
}


def run(
    recipe: Recipe,
    planned_on: Machine,
    run: RunDir,
    attempt: AttemptDir,
    command: Command,
    screen: Screen,
    check: Callable[[SecondStep], bool] = lambda measured: True,
    hold: Callable[[int], bool] = lambda host_bytes: False,
    signals: stop_signals.StopSignals | None = None,
    end_s: float | None = None,
) -> RunResult:
    """Start the ranks of an attempt and watch them to their end.

    `check` gets the memory of the second step; if it returns False the ranks are ended, and the
    result, which is no failure, asks to plan again. `hold` gets the job's host RAM each second, and
    returns True if the run is to yield its memory.
    `signals` collects signals for several attempts; `end_s` is the time on the monotonic clock at
    which they must be over."""
    strategy = attempt.read_plan().strategy
    cards = strategy.processes_per_machine if strategy.device == "cuda" else 0
    beginning = Beginning(xids=XidWatch(planned_on.gpus[:cards]))
    processes.adopt()
    with stop_signals.signals() if signals is None else nullcontext(signals) as signals:
        signals.collect()
        ended, limit_bytes = Ended(), planned_on.host_limit_bytes
        if signals.stop is None:
            watch = RankWatcher(
                run, attempt, screen, signals, recipe.launch, limit_bytes, check, hold
            )
            with attempt.log_file.open("ab") as log:
                ended = watch.until_end(_start(command, recipe.launch.pass_env, run, log, end_s))
    return result_of(beginning, ended, run, attempt, signals.stop, limit_bytes)


@dataclass(frozen=True)
class Beginning:
    """The moment at which an attempt began, to compare its end with."""

    monotonic_s: float = field(default_factory=time.monotonic)
    oom_kills: machine.OomKills = field(default_factory=machine.oom_kills)
    xids: XidWatch | None = None  # None: no ranks


def result_of(
    beginning: Beginning,
    ended: Ended,
    run: RunDir,
    attempt: AttemptDir,
    stopped_by: int | None,
    host_limit_bytes: int,
) -> RunResult:
    """The verdict on an attempt, from the end of its processes and the files in its folder."""
    outcome = attempt.read_outcome()
    completed = bool(outcome and outcome.complete)
    # the ranks measure once more at their end, after the last measurement from outside
    ended = replace(
        ended,
        host_peak_bytes=max(ended.host_peak_bytes, outcome.host_pss_bytes if outcome else 0),
    )
    beats, rank_errors = heartbeats.read_all(attempt), tuple(attempt.rank_errors())
    with_error = {error.rank for error in rank_errors}
    record = AttemptRecord(
        ended=ended,
        rank_errors=rank_errors,
        log_tail=log_tail(attempt.log_file),
        oom_kills=_grown(beginning.oom_kills, oom_kills := machine.oom_kills()),
        oom_kills_of_machine=oom_kills.is_of_machine,
        host_limit_bytes=host_limit_bytes,
        completed=completed,
        stopped_by=stopped_by,
        preempted=None if completed else outcome,
        # not the process that tokenises, which has a rank's place
        silent_ranks=tuple(
            (beat.rank, beat.pid)
            for beat in beats
            if beat.rank not in with_error and beat.section != "tokenise"
        ),
        xids=beginning.xids.read() if beginning.xids else (),
        section=heartbeats.section_of_the_first(beats, rank_errors),
        **last_vram(attempt.events_file),
    )
    failure = None if ended.is_refuted else failures.classify(record)
    # a stop before there was a rank to write it
    if outcome is None and failure is not None and failure.kind in ("stopped", failures.YIELDED):
        files.write_json(attempt.outcome_file, Outcome(complete=False, ended="preempted"))
    step = run.last_step()
    notes = [
        (
            failure and failure.kind == "stopped" and not (outcome and outcome.checkpoint),
            f"step {step} is saved" if step else "no step is saved, tokenised rows stay",
        ),
        (
            ended.unkillable,
            f"not even SIGKILL ended process {', '.join(map(str, ended.unkillable))}: restart the"
            " machine",
        ),
        (
            failure is None and ended.returncode and not ended.is_refuted,
            f"the launcher ended with {ended.returncode} while closing down, after the model was"
            f" written: {attempt.log_file}",
        ),
    ]
    return RunResult(
        run_dir=str(run.root),
        exit_code=failure.exit_code if failure else 0,
        failure=failure,
        seconds=time.monotonic() - beginning.monotonic_s,
        host_peak_bytes=ended.host_peak_bytes,
        host_left_bytes=ended.host_left_bytes,
        summary=asdict(outcome) if outcome and completed else {},
        plan_again=ended.is_refuted,
        note="; ".join(text for is_so, text in notes if is_so),
        unkillable=tuple(ended.unkillable),
        last_step=max((beat.step for beat in beats), default=0),
    )


def _start(
    command: Command, pass_env: Sequence[str], run: RunDir, log: IO[bytes], end_s: float | None
) -> subprocess.Popen[bytes]:
    inherited = environment.passed(os.environ, pass_env)
    variables = {
        **{key: value for key, value in inherited.items() if not _LAUNCHERS_OWN.match(key)},
        **_AGENTS_OWN,
        **command.env,
        "LOWMEM_RUN": run.tag,  # marks every process of this run
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
        preexec_fn=processes.settle_child,
    )


def last_vram(events: Path) -> dict[str, int]:
    """The GPU memory of the last step that was logged whole."""
    names = ("vram_reserved_bytes", "vram_total_bytes")
    for line in reversed(log_tail(events).splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            step = json.loads(line)
            return {name: int(step[name]) for name in names}
    return {}


def _grown(before: machine.OomKills, after: machine.OomKills) -> int | None:
    """The growth of a counter; None where it cannot be read."""
    return None if after.count is None or before.count is None else after.count - before.count


def log_tail(path: Path) -> str:
    """The end of a file: of an attempt's log, in which its cause is looked for."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def write_outcome(result: RunResult, attempt: AttemptDir) -> None:
    """Write the end of the attempt as the supervisor saw it, beside rank 0's outcome."""
    files.write_json(
        attempt.supervisor_file,
        AttemptEnd(
            result.exit_code, result.failure, result.seconds, result.host_peak_bytes, time.time()
        ),
    )
