"""Watch of an attempt's ranks until all have ended: pass stops on, warn, end ranks that hang, stop
all before the kernel kills one for memory."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launch.base import files, processes
from launch.base.text import size
from launch.probe import machine
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import Ended, SecondStep
from launch.schema.run_sections import LaunchSection
from launch.supervise.heartbeats import BEFORE_TRAINING, MAPPING, Beat, Progress, read_all
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals

_MEASURED_INTERVAL_S = 1.0
_STOOD_S = 5.0  # gap between two looks: this process itself was stopped, or its machine slept
_LOAD_GRACE_S = 10.0  # time for ranks that have trained nothing yet
STACKS_S = 2.0  # time for stacks to be written
_HANG_GRACE_S = 10.0  # time between SIGTERM and SIGKILL of ranks that hang
_ALONE_GRACE_S = 10.0  # time for the launcher and the other ranks, once a rank has ended
_REPORT_S = 2.0  # time for the launcher to report how each rank ended, once all have ended
# share of ten seconds in which all processes of the machine waited for memory
_STALLED_PERCENT = 50.0
_PRESSURE = re.compile(r"^full avg10=([\d.]+)", re.MULTILINE)


class RankWatcher:
    """Watches a launcher and its ranks: signals and the host's free RAM stop them, heartbeats show
    which of them hang."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        screen: Screen,
        signals: StopSignals,
        launch: LaunchSection,
        host_limit_bytes: int,
        check: Callable[[SecondStep], bool],
        hold: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._attempt, self._screen, self._signals = run, attempt, screen, signals
        self._launch, self._host_limit_bytes = launch, host_limit_bytes
        self._check, self._hold, self._clock = check, hold, clock
        self._ended = Ended()
        self._signalled: set[int] = set()  # pids of ranks that know they are to stop
        self._is_checked = False
        self._job, self._measured_at = processes.JobMemory(os.getpid()), 0.0
        self._stopping_since: float | None = None
        self._hanging_since: float | None = None
        self._alone_since: float | None = None
        self._progress = Progress()
        self._looked_s = self._woke_s = clock()

    def until_end(self, child: subprocess.Popen[bytes]) -> Ended:
        """Watch until the launcher and its ranks have ended, or nothing can end them."""
        is_forced = False
        processes.forget_peak()
        self._screen.start(self._attempt)
        try:
            while not is_forced and not self._is_over(child):
                self._screen.update()
                now_s, beats = self._clock(), self._beats()
                self._measure(now_s, beats)
                is_forced = (
                    self._refuted()
                    or self._stop(child, beats, now_s)
                    or self._is_alone(child, beats, now_s)
                    or self._hang(beats, now_s)
                )
                if line := self._progress.slow(beats, now_s):
                    self._screen.say(line)
            self._screen.update()
        finally:
            self._screen.stop()
            # no process outlives the attempt, however it ended
            unkillable = processes.end_tree(self._run.tag)
        self._ended.unkillable = [process.pid for process in unkillable]
        self._ended.host_peak_bytes = self._job.peak_bytes
        if not unkillable:
            child.wait()
            processes.reap()
        self._ended.returncode = 1 if is_forced or child.returncode is None else child.returncode
        return self._ended

    def _beats(self) -> list[Beat]:
        """Beats of the ranks that are alive. Where this process has been stopped too (Ctrl-Z, a
        paused container), they begin when it goes on."""
        now_s = self._clock()
        if now_s - self._looked_s > _STOOD_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return [
            replace(beat, monotonic_s=max(beat.monotonic_s, self._woke_s))
            for beat in read_all(self._attempt)
            if processes.is_alive(beat.pid)
        ]

    def _is_over(self, child: subprocess.Popen[bytes]) -> bool:
        try:
            child.wait(timeout=processes.POLL_S)
        except subprocess.TimeoutExpired:
            return False
        if self._beats():  # a launcher of one rank dies from a signal; its rank saves first
            time.sleep(processes.POLL_S)
            return False
        return True

    def _measure(self, now_s: float, beats: list[Beat]) -> None:
        in_training = bool(beats) and all(beat.section not in MAPPING for beat in beats)
        if now_s - self._measured_at < _MEASURED_INTERVAL_S:
            self._job.sample(in_training)
            return
        self._measured_at = now_s
        # measured on both sides of the job: what it takes or frees meanwhile is not others' memory
        before = machine.host_available()[0]
        job = self._job.read(in_training)
        if self._hold(job) and not self._ended.is_yielded:
            self._ended.is_yielded = True
            self._screen.say("queue yield: saving a checkpoint, then waiting for memory again")
        for_job = job + max(before, machine.host_available()[0])
        self._ended.host_left_bytes = min(self._ended.host_left_bytes or for_job, for_job)
        if not self._ended.pressure:
            fraction = self._launch.host_stop_fraction
            self._ended.pressure = pressure(self._host_limit_bytes, fraction, job) or ""
            if self._ended.pressure:
                self._screen.say(f"saving and stopping: {self._ended.pressure}")

    def _refuted(self) -> bool:
        if self._is_checked or not (measured := self._attempt.read_second_step()):
            return False
        self._is_checked = True
        self._ended.is_refuted = not self._check(measured)
        return self._ended.is_refuted

    def _stop(self, child: subprocess.Popen[bytes], beats: list[Beat], now_s: float) -> bool:
        """Pass a stop or a request to save on to the ranks, not to their launcher, which would end
        them; True: kill them."""
        if self._signals.save and beats:
            self._signals.save = False
            processes.send(beats[0].pid, signal.SIGUSR2)
        ended = self._ended
        if self._signals.stop is None and not ended.pressure and not ended.is_yielded:
            return False
        if self._stopping_since is None:
            self._stopping_since = now_s
            if self._signals.stop is not None:
                name = signal.Signals(self._signals.stop).name
                self._screen.say(
                    f"{name}: saving a checkpoint, then stopping. Send it again to stop now."
                )
        number = signal.SIGINT if self._signals.stop == signal.SIGINT else signal.SIGTERM
        for beat in beats:
            if beat.pid not in self._signalled and processes.is_tagged(beat.pid, self._run.tag):
                self._signalled.add(beat.pid)
                processes.send(beat.pid, number)
        if not beats and not self._signalled and child.poll() is None:
            child.terminate()
        is_training = any(beat.section not in BEFORE_TRAINING for beat in beats)
        return self._signals.at_once or (
            not is_training and now_s - self._stopping_since > _LOAD_GRACE_S
        )

    def _hang(self, beats: list[Beat], now_s: float) -> bool:
        """Find a rank that hangs, save all stacks, ask it to end; True: kill it."""
        if self._alone_since is not None:  # ranks that wait for an ended rank are silent
            return False
        if self._hanging_since is not None:
            if now_s - self._hanging_since > STACKS_S:
                for beat in beats:
                    if beat.pid not in self._signalled:
                        self._signalled.add(beat.pid)
                        processes.send(beat.pid, signal.SIGTERM)
            return now_s - self._hanging_since > STACKS_S + _HANG_GRACE_S
        silent = self._progress.silent(beats, now_s, self._launch.hang_floor_s)
        if silent is None:
            return False
        self._ended.hang = silent
        self._hanging_since = now_s
        self._signalled.clear()
        self._screen.say(f"{silent}; stacks of all ranks: {self._attempt.root}/ranks/*/stacks.txt")
        for beat in beats:
            processes.send(beat.pid, signal.SIGQUIT)
            # a rank that was stopped writes its stacks only now
            processes.send(beat.pid, signal.SIGCONT)
        return False

    def _is_alone(self, child: subprocess.Popen[bytes], beats: list[Beat], now_s: float) -> bool:
        """End the remaining ranks where one rank has ended and they have not followed; True: kill
        the launcher.

        In a collective of NCCL a rank takes no signal but SIGKILL, and torchrun's agent, which
        sends SIGTERM, waits for it. Killed with its ranks, the agent would never report which of
        them ended first, and how."""
        ranks = [beat for beat in read_all(self._attempt) if beat.section != "tokenise"]
        if child.poll() is not None or all(processes.is_alive(beat.pid) for beat in ranks):
            return False
        self._alone_since = self._alone_since or now_s
        if now_s - self._alone_since <= _ALONE_GRACE_S:
            return False
        for beat in beats:
            if processes.is_tagged(beat.pid, self._run.tag):
                self._end_rank(beat, now_s - self._alone_since)
        return now_s - self._alone_since > _ALONE_GRACE_S + _REPORT_S

    def _end_rank(self, beat: Beat, waited_s: float) -> None:
        """Send SIGKILL, and say so once."""
        if beat.pid not in self._ended.ended_ranks:
            self._ended.ended_ranks.append(beat.pid)
            self._screen.say(
                f"ending rank {beat.rank} (process {beat.pid}, {beat.section}) with SIGKILL:"
                f" another rank ended {waited_s:.0f} s ago, and this rank still runs"
            )
        processes.send(beat.pid, signal.SIGKILL)


def pressure(
    limit_bytes: int, fraction: float, job_bytes: int, root: Path = Path("/")
) -> str | None:
    """The reason why a run should stop now, None without one. `fraction` is
    launch.host_stop_fraction of the limit; 0: never.

    Page cache counts as free. `job_bytes` is of JobMemory, because some limits (Slurm's, an
    rlimit) do not show how much of them is used."""
    if not fraction:
        return None
    free, why = machine.host_available(root)
    stalled = _PRESSURE.search(files.system_text(root / "proc/pressure/memory"))
    percent = stalled[1] if stalled else "0"
    signs = (
        (free < (1 - fraction) * limit_bytes, f"{size(free)} of host RAM is left ({why})"),
        (
            job_bytes > fraction * limit_bytes,
            f"the job takes {size(job_bytes)} of a host limit of {size(limit_bytes)}",
        ),
        (
            float(percent) > _STALLED_PERCENT,
            f"every process waited for memory in {percent} % of the last 10 s"
            " (/proc/pressure/memory)",
        ),
    )
    return next((sign for is_there, sign in signs if is_there), None)
