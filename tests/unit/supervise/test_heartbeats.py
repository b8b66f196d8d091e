"""How long a rank may be silent."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.base import processes
from launch.run_folder.layout import AttemptDir
from launch.schema.result import RankError
from launch.supervise import heartbeats, watch
from launch.supervise.heartbeats import Beat, Progress
from training.control.heartbeat import WRITE_INTERVAL_S, Heartbeat, p99


def failed(rank: int) -> RankError:
    return RankError(rank, "ValueError", "boom", time=1.0)


def beat(section: str = "step", p99_s: float = 0.1) -> Beat:
    return Beat(rank=1, pid=1, section=section, step=7, max_steps=9, monotonic_s=0.0, p99_s=p99_s)


@pytest.mark.parametrize(
    ("found", "limit_s"),
    [
        (beat(), 60),
        (beat(p99_s=20), 100),  # five times the longest usual pause
        (beat("evaluation"), 300),
        (beat("first step"), 1800),  # torch.compile, kernels that are built
        (beat("save", p99_s=500), 2500),
    ],
)
def test_the_limit_is_the_sections_floor_or_five_times_what_is_usual(found, limit_s):
    assert found.limit_s(floor_s=60) == limit_s


def test_a_process_that_stands_still_gets_no_more_than_a_step_does_whatever_it_was_at():
    with subprocess.Popen(["sleep", "600"]) as child:
        saving = dataclasses.replace(beat("save"), pid=child.pid)
        assert saving.limit_s(floor_s=60) == 1800
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert saving.limit_s(floor_s=60) == 60
        child.kill()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_silent_rank_is_spared_only_while_it_still_computes(goes_on):
    """Not for what it computed before its last sign of life."""
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\n"
    # the rule is about processor time, so a child has to use some; the test ends it
    code += "while True: pass" if goes_on else "time.sleep(600)"
    argv = [sys.executable, "-ISc", code]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        progress, beats = Progress(), [dataclasses.replace(beat(), pid=child.pid)]
        assert progress.silent(beats, now_s=0, floor_s=1) is None
        before_s = processes.cpu_s(child.pid)
        while goes_on and processes.cpu_s(child.pid) < before_s + 0.1:
            time.sleep(0.02)
        assert (progress.silent(beats, now_s=2, floor_s=1) is None) == goes_on
        hangs = progress.silent(beats, now_s=3, floor_s=1) or ""
        assert "hangs: no sign of life for 3 s in step after step 7" in hangs
    finally:
        child.kill()
        child.wait()


def test_a_rank_writes_what_the_supervisor_reads(tmp_path):
    file = tmp_path / "3" / "heartbeat.json"
    file.parent.mkdir()
    assert heartbeats.read(file) is None
    took_s, began_s = WRITE_INTERVAL_S, time.monotonic()
    while took_s >= WRITE_INTERVAL_S:  # the machine may be busy
        writing = Heartbeat(file)
        writing.beat("load")
        writing.beat("step", 12, 40)
        step_s = time.monotonic()
        writing.beat("step", 13, 40)  # within half a second: not written
        took_s = time.monotonic() - step_s
    found = heartbeats.read(file)
    assert found is not None
    assert (found.rank, found.section, found.step, found.max_steps) == (3, "step", 12, 40)
    assert began_s <= found.monotonic_s <= time.monotonic()
    with writing:
        pass
    found = heartbeats.read(file)
    assert found is not None
    assert found.step == 13


def test_a_beat_of_another_boot_or_half_written_says_nothing(tmp_path):
    file = tmp_path / "0" / "heartbeat.json"
    file.parent.mkdir()
    Heartbeat(file).beat("step", 1, 2)
    whole = file.read_text()
    file.write_text(whole[:40])
    assert heartbeats.read(file) is None
    file.write_text(whole.replace('"boot": "', '"boot": "x'))
    assert heartbeats.read(file) is None


def test_p99_is_the_largest_of_few_and_passes_over_one_of_many():
    assert p99(()) == 0
    assert p99((1.0, 9.0, 2.0)) == 9
    assert p99((*[1.0] * 199, 50.0)) == 1


def test_the_section_of_a_failure_is_that_of_the_first_rank_that_reported_or_fell_silent(
    tmp_path,
):
    attempt = AttemptDir(tmp_path)
    assert heartbeats.section_of_the_first(heartbeats.read_all(attempt), []) == ""
    Heartbeat(attempt.heartbeat_file(0)).beat("evaluation", 4, 9)
    Heartbeat(attempt.heartbeat_file(1)).beat("step", 4, 9)
    beats = heartbeats.read_all(attempt)
    assert heartbeats.section_of_the_first(beats, []) == "evaluation"
    assert heartbeats.section_of_the_first(beats, [failed(1), failed(0)]) == "step"
    # it is another machine's
    assert heartbeats.section_of_the_first(beats, [failed(7)]) == "evaluation"


def test_every_section_that_a_rank_names_has_a_limit():
    assert {"load", "tokenise", "first step", "step", "evaluation", "save", "export"} == set(
        heartbeats.FLOORS
    )


def test_host_pressure_is_told_by_what_is_left_by_the_job_and_by_stalls(tmp_path):
    root = tmp_path
    (root / "proc/pressure").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 20 kB\n")
    (root / "proc/pressure/memory").write_text("some avg10=90.00\nfull avg10=10.00 avg60=0.00\n")
    limit = 1000 * 1024
    assert "is left" in (watch.pressure(limit, 0.97, 0, root) or "")
    assert watch.pressure(limit, 0.99, 0, root) is None
    assert "the job takes" in (watch.pressure(limit, 0.99, limit, root) or "")
    (root / "proc/pressure/memory").write_text("some avg10=90.00\nfull avg10=61.50 avg60=0.00\n")
    assert "61.50 %" in (watch.pressure(limit, 0.99, 0, root) or "")


def test_a_fifo_in_place_of_a_heartbeat_is_replaced(tmp_path):
    file = AttemptDir(tmp_path / "attempts" / "01").heartbeat_file(0)
    os.mkfifo(file)
    with Heartbeat(file) as heartbeat:
        heartbeat.beat("step", 3, 9)
    (found,) = heartbeats.read_all(AttemptDir(tmp_path / "attempts" / "01"))
    assert (found.section, found.step) == ("step", 3)
