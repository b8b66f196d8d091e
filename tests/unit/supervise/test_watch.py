"""Rules by which ranks are stopped or ended. Ranks are small programs that note their signals; the
clock is the test's."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from launch.base import files, processes
from launch.run_folder.layout import RunDir
from launch.schema.result import Ended, SecondStep
from launch.schema.run_sections import LaunchSection
from launch.supervise.heartbeats import Beat
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals
from launch.supervise.watch import RankWatcher

# A launcher starts a rank in each of its folders, and ends with 7 when all have ended.
LAUNCHER = """
import subprocess, sys
rank, obeys, *folders = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, "-IS", "-c", rank, obeys, each]) for each in folders]
sys.exit([rank.wait() for rank in ranks] and 7)
"""
# A rank notes its signals, and ends where it obeys one.
RANK = """
import os, pathlib, signal, sys, time
def note(number, frame):
    name = signal.Signals(number).name
    with open(folder / "signals", "a") as file:
        file.write(name + " ")
    if name == sys.argv[1]:
        sys.exit()
folder = pathlib.Path(sys.argv[2])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR2):
    signal.signal(number, note)
(folder / "pid").write_text(str(os.getpid()))
(folder / "started").touch()
time.sleep(600)  # until a signal, or the end of the test
"""
LIMIT_S = 60.0  # a watch takes less than a second
LATER = 1e9  # a beat of that time is never old


@dataclass
class Watched:
    """A launcher with two ranks, and a clock that goes on by 4 s from one look at them to the
    next."""

    run: RunDir
    child: subprocess.Popen[bytes]
    folders: list[Path]
    tick_s: float = 2.0
    now_s: float = 0.0
    stands: Callable[[], object] = lambda: False  # true: the clock stands still
    until_s: float = field(default_factory=lambda: time.monotonic() + LIMIT_S)

    def pid(self, rank: int) -> int:
        return int((self.folders[rank] / "pid").read_text())

    def signals(self, rank: int) -> list[str]:
        file = self.folders[rank] / "signals"
        return file.read_text().split() if file.exists() else []

    def beat(self, rank: int, section: str, at_s: float = LATER, pid: int | None = None) -> None:
        beat = Beat(rank, pid or self.pid(rank), section, 5, 9, at_s, 0.1, processes.boot_id())
        files.write_json(self.run.attempts()[0].heartbeat_file(rank), beat)

    def ends_at(self, seconds: float) -> None:
        """Let the ranks that are left end at that time, at which the clock stops."""

        def is_over() -> bool:
            for rank in (0, 1) if self.now_s >= seconds else ():
                processes.send(self.pid(rank), signal.SIGKILL)
            return self.now_s >= seconds

        self.stands = is_over

    def ends_after(self, name: str, at_s: float) -> None:
        """Let the clock stand at that time until each rank has noted a signal."""
        self.stands = lambda: (
            self.now_s >= at_s and not all(name in self.signals(rank) for rank in (0, 1))
        )

    def clock(self) -> float:
        assert time.monotonic() < self.until_s, "the watch does not end"
        self.now_s += 0 if self.stands() else self.tick_s
        return self.now_s

    def until_end(
        self,
        signals: StopSignals | None = None,
        host_limit_bytes: int = 0,
        fits: bool = True,
        yields: bool = False,
    ) -> tuple[Ended, str]:
        """The end, and the lines of the screen."""
        shown = io.StringIO()
        # only a limit of the host makes the host stop them
        launch = LaunchSection(hang_floor_s=1, host_stop_fraction=0.97 if host_limit_bytes else 0)
        watch = RankWatcher(
            self.run,
            self.run.attempts()[0],
            Screen(stream=shown),
            signals or StopSignals(),
            launch,
            host_limit_bytes,
            lambda second_step: fits,
            lambda host_bytes: yields,
            self.clock,
        )
        return watch.until_end(self.child), shown.getvalue()


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Iterator[Callable[[str], Watched]]:
    """A function that starts a launcher and two ranks, which end at that signal."""
    monkeypatch.setattr(processes, "POLL_S", 0.01)  # a watch looks often: the tests are short
    run = RunDir.create(tmp_path, "tiny", datetime.now())
    run.new_attempt()

    def start(obeys: str) -> Watched:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        argv = [sys.executable, "-IS", "-c", LAUNCHER, RANK, obeys, *map(str, folders)]
        child = subprocess.Popen(argv, env={**os.environ, "LOWMEM_RUN": run.tag})
        while not all((folder / "started").exists() for folder in folders):
            assert child.poll() is None
            time.sleep(0.02)
        job = Watched(run, child, folders)
        # the end of what obeys takes no time of the clock
        job.stands = lambda: any(obeys in job.signals(rank) for rank in (0, 1))
        return job

    yield start
    processes.end_tree(run.tag)


def stop(number: int) -> StopSignals:
    signals = StopSignals()
    signals.collect()
    signals.receive(number, None)
    return signals


# ---- a stop
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_each_rank_gets_a_stop_once_and_the_launcher_ends_with_them(watched, sent, received):
    job = watched(received)
    job.beat(0, "step")
    job.beat(1, "evaluation")
    ended, lines = job.until_end(stop(sent))
    assert [job.signals(rank) for rank in (0, 1)] == [[received]] * 2
    assert (ended.returncode, ended.hang, ended.ended_ranks) == (7, "", [])
    assert f"{signal.Signals(sent).name}: saving a checkpoint, then stopping" in lines


def test_want_of_memory_and_runs_that_wait_stop_the_ranks_too(watched):
    job = watched("SIGTERM")
    for rank in (0, 1):
        job.beat(rank, "step")
    ended, lines = job.until_end(host_limit_bytes=1, yields=True)
    assert [job.signals(rank) for rank in (0, 1)] == [["SIGTERM"]] * 2
    assert (ended.returncode, ended.is_yielded) == (7, True)
    assert ended.pressure.startswith("the job takes")
    assert f"saving and stopping: {ended.pressure}" in lines


@pytest.mark.parametrize("section", ["load", "tokenise"])
def test_ranks_that_have_trained_nothing_are_killed_ten_seconds_after_a_stop(watched, section):
    job = watched("nothing")
    for rank in (0, 1):
        job.beat(rank, section)
    job.ends_after("SIGTERM", at_s=8)
    ended, _ = job.until_end(stop(signal.SIGTERM))
    assert ended.returncode == 1
    assert 10 < job.now_s < 30
    assert job.signals(0) == ["SIGTERM"]


def test_ranks_that_train_get_the_time_that_they_need_to_save(watched):
    job = watched("nothing")
    job.beat(0, "load")
    job.beat(1, "save")
    job.ends_at(24)
    job.until_end(stop(signal.SIGTERM))
    assert job.now_s >= 24


def test_a_stop_that_comes_again_ends_the_ranks_at_once(watched):
    job = watched("nothing")
    for rank in (0, 1):
        job.beat(rank, "step")
    signals = stop(signal.SIGTERM)
    signals.at_once = True
    ended, _ = job.until_end(signals)
    assert (ended.returncode, ended.unkillable) == (1, [])
    assert job.now_s < 10


def test_a_launcher_without_ranks_is_stopped_itself(watched):
    ended, _ = watched("nothing").until_end(stop(signal.SIGTERM))
    assert ended.returncode == -signal.SIGTERM


def test_a_process_that_has_got_the_number_of_a_rank_is_left_alone(watched):
    job = watched("nothing")
    with subprocess.Popen(["sleep", "600"]) as stranger:
        job.beat(0, "load")
        job.beat(1, "load", pid=stranger.pid)
        job.stands = lambda: job.now_s >= 8 and not job.signals(0)
        ended, _ = job.until_end(stop(signal.SIGTERM))
        assert stranger.poll() is None
        stranger.kill()
    assert (ended.returncode, job.signals(0), ended.unkillable) == (1, ["SIGTERM"], [])


def test_a_request_to_save_goes_to_the_first_rank_once(watched):
    job = watched("nothing")
    for rank in (0, 1):
        job.beat(rank, "step")
    job.ends_at(16)
    is_over = job.stands
    job.stands = lambda: not job.signals(0) or is_over()
    signals = StopSignals()
    signals.save = True
    ended, _ = job.until_end(signals)
    assert (ended.returncode, signals.save) == (7, False)
    assert [job.signals(rank) for rank in (0, 1)] == [["SIGUSR2"], []]


def test_ranks_whose_second_step_took_too_much_are_ended(watched):
    job = watched("nothing")
    job.beat(0, "step")
    measured = SecondStep(1, 1 << 20, 2 << 30)
    files.write_json(job.run.attempts()[0].second_step_file, measured)
    ended, _ = job.until_end(fits=False)
    assert (ended.returncode, ended.is_refuted, job.signals(0)) == (1, True, [])


# ---- a rank that is silent, and a rank that is alone
# ---------------------------------------------------------------------------


def test_ranks_that_hang_write_their_stacks_and_are_asked_to_end_and_then_killed(watched):
    job = watched("nothing")
    job.beat(0, "step")
    job.beat(1, "step", at_s=0)
    job.ends_after("SIGTERM", at_s=14)
    ended, lines = job.until_end()
    assert ended.hang.startswith(f"rank 1 (process {job.pid(1)}, sleeping) hangs: no sign of life")
    assert f"{ended.hang}; stacks of all ranks: " in lines
    assert [job.signals(rank) for rank in (0, 1)] == [["SIGQUIT", "SIGTERM"]] * 2
    assert (ended.returncode, ended.ended_ranks) == (1, [])
    assert 13 < job.now_s < 40


def test_ranks_that_hang_and_end_when_asked_to_leave_the_end_of_their_launcher(watched):
    job = watched("SIGTERM")
    for rank in (0, 1):
        job.beat(rank, "step", at_s=0)
    ended, _ = job.until_end()
    assert (ended.returncode, job.signals(1)) == (7, ["SIGQUIT", "SIGTERM"])


@pytest.mark.parametrize(
    ("section", "tick_s"),
    [
        ("save", 2.0),  # may take 30 times as long as a step
        ("step", 3.0),  # this process was stopped between two looks, and so were the ranks
    ],
)
def test_a_silence_that_has_a_reason_is_no_hang(watched, section, tick_s):
    job = watched("nothing")
    for rank in (0, 1):
        job.beat(rank, section, at_s=0)
    job.tick_s = tick_s
    job.ends_at(20)
    ended, _ = job.until_end()
    assert (ended.hang, ended.returncode, job.signals(0)) == ("", 7, [])


def test_a_rank_that_does_not_follow_another_ones_end_is_killed_and_does_not_hang(watched):
    job = watched("nothing")
    job.beat(0, "step")
    job.beat(1, "step", at_s=0)
    processes.send(job.pid(0), signal.SIGKILL)
    while processes.is_alive(job.pid(0)):
        time.sleep(0.02)
    ended, lines = job.until_end()
    assert (ended.hang, ended.ended_ranks, job.signals(1)) == ("", [job.pid(1)], [])
    assert f"ending rank 1 (process {job.pid(1)}, step) with SIGKILL: another rank ended" in lines
    assert job.now_s > 10


@pytest.mark.parametrize("section", ["step", "tokenise"])
def test_a_rank_has_ten_seconds_to_follow_another_ones_end(watched, section):
    job = watched("nothing")
    job.beat(0, section)
    job.beat(1, "step")
    processes.send(job.pid(0), signal.SIGKILL)
    while processes.is_alive(job.pid(0)):
        time.sleep(0.02)
    # the process that tokenised has ended before the ranks began
    job.ends_at(12 if section == "step" else 24)
    ended, _ = job.until_end()
    assert (ended.returncode, ended.ended_ranks) == (7, [])
