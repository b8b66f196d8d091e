"""Runs that wait for each other: in order, past each other where that delays nobody, and ended by
signals without a trace."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from launch.base.errors import ConfigError
from launch.base.workspace import Workspace
from launch.probe import machine as probe_machine
from launch.queue import leases, starts
from launch.queue.admission import Supply
from launch.queue.leases import Needs
from launch.schema.machine import GIB
from launch.schema.run_sections import LaunchSection
from launch.supervise.run_lease import Blocked
from tests import builders
from tests.process.queue.holders import TAKE_MEMORY, said

RUN = (sys.executable, "-m", "launch", "run")
ROOT = Path(__file__).resolve().parents[3]


def test_of_random_rounds_of_starts_stops_and_kills_no_lease_is_left():
    argv = [sys.executable, "-m", "benchmarks.queue_rounds", "--rounds", "120", "--seed", "7"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_runs_that_wait_start_by_priority_and_then_in_the_order_in_which_they_came(tmp_path, hold):
    holder = hold("8")
    assert said(holder) == "holds 1"
    waiting = {}
    for number, priority in ((2, "0"), (3, "0"), (4, "5")):
        waiting[number] = hold("9", priority)
        line = said(waiting[number])
        assert line.startswith(f"waiting as run {number} for 9.00 GiB of host RAM, of which 2.00")
        assert f"process {holder.pid})" in line
    assert "behind" not in line  # of priority 5
    holder.kill()
    for number in (4, 2, 3):
        lines = [said(waiting[number])]
        while lines[-1] != f"holds {number}":
            lines.append(said(waiting[number]))
        assert f"run {number} starts: planning with the memory that is free now" in lines
        waiting[number].kill()


def test_a_smaller_run_passes_one_that_waits_only_if_it_does_not_delay_it(tmp_path, hold):
    assert said(hold("6")) == "holds 1"
    assert said(hold("8", "0")).startswith("waiting as run 2")
    larger = hold("3", "0")
    line = said(larger)
    assert line.startswith("waiting as run 3 for run 2 of ")
    assert "is before it, and waits for 8.00 GiB of host RAM" in line
    larger.kill()
    larger.wait()
    assert said(hold("3")).startswith("run 2 of ")
    assert said(hold("2")) == "holds 4"


def test_memory_that_a_program_without_a_lease_takes_delays_a_start(tmp_path):
    """Its end is what the probe shows."""

    def meminfo(available_gib: float) -> None:
        lines = f"MemTotal: {10 << 20} kB\nMemAvailable: {int(available_gib * (1 << 20))} kB\n"
        (tmp_path / "proc/meminfo").write_text(lines)

    def supply(granted):
        available = probe_machine.host_available(tmp_path, {})[0]
        return Supply(
            builders.machine(host_available_bytes=available, host_limit_bytes=10 * GIB), granted
        )

    lines = []

    def say(line: str) -> None:
        lines.append(line)
        meminfo(9)

    (tmp_path / "proc").mkdir()
    meminfo(2)
    record = leases.boot_record(state="granted", needs=Needs(8 * GIB))
    place = tmp_path / "leases"
    place.mkdir()
    # a plan for what is free may start sooner
    lease, is_granted = starts.wait(
        place, record, supply, lambda own: "", lambda line: None, plan_again_s=0.0
    )
    assert not is_granted
    lease.waits_for = ""
    lease, is_granted = starts.wait(place, record, supply, lambda own: "", say, lease)
    assert is_granted and lease.record.state == "granted"
    assert lines[0].endswith("of which 2.00 GiB can be had; other programs hold the rest")
    lease.release()


def test_a_run_waits_for_a_time_and_for_another_run(tmp_path, hold, monkeypatch):
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path))
    workspace = Workspace(tmp_path)

    def reason(**keys: str) -> str:
        return Blocked(LaunchSection(**keys), tmp_path, workspace).reason(None)

    other = hold("4")
    assert said(other) == "holds 1"
    assert reason(after="1").startswith("launch.after: the end of run 1 of ")
    with pytest.raises(ConfigError, match=r"launch.after 2: there was no such run, the last is"):
        reason(after="2")
    with pytest.raises(ConfigError, match=r"launch.after runs/tiny/1: no run has that folder"):
        reason(after="runs/tiny/1")
    (tmp_path / "runs/tiny").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"launch.after runs/tiny: no run has that folder"):
        reason(after="runs/tiny")
    (tmp_path / "runs/tiny/1/attempts/01").mkdir(parents=True)
    assert reason(after="runs/tiny/1") == ""
    with leases.admission(tmp_path) as begin:
        run = str(tmp_path / "runs/tiny/1")
        own = begin(leases.boot_record(state="granted", needs=Needs(0), run=run))
    assert reason(after="runs/tiny/1") == ""  # its own lease
    own.release()
    other.kill()
    other.wait()
    assert reason(after="1") == ""
    assert reason(not_before="2020-01-01T00:00") == ""
    later = datetime.now().replace(year=datetime.now().year + 1, day=1)
    assert f"{later:%Y-%m-%d %H:%M}" in reason(not_before=f"{later:%Y-%m-%dT%H:%M}")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("waiting")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_a_run_that_waits_at_once_without_a_ticket(
    tmp_path, workspace, hold, number, code
):
    assert said(hold("4")) == "holds 1"
    recipe = builders.recipe(workspace)
    child = subprocess.Popen(
        # the bare flag does not take the recipe as its value
        [*RUN, "--launch.wait", str(recipe), "--launch.host_limit_gib=4.2"],
        env=builders.environment(workspace, LOWMEM_LEASES=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    try:
        line = next(line for line in child.stdout if "waiting as run 2 for" in line)
        assert "of host RAM, of which 0.20 GiB can be had; leased: run 1 of" in line
        assert [lease.record.state for lease in leases.live(tmp_path)] == ["granted", "waiting"]
        # the second one finds its rows tokenised
        listed = builders.launch(workspace, "runs", LOWMEM_LEASES=str(tmp_path)).stdout
        assert re.search(r"^tiny/\S+ +waiting ", listed, re.MULTILINE), listed
        child.send_signal(number)
        rest = child.stdout.read()
        assert child.wait() == code
        (line,) = rest.splitlines()
        assert line.startswith(f"error: stopped by {number.name} while no rank ran; ")
        assert line.endswith("; run the same line again")
    finally:
        child.kill()
        child.wait()
    assert [path.name for path in tmp_path.glob("*.lease")] == ["1.lease"]
    assert not list(workspace.glob("runs/tiny/[0-9]*/plan.json"))


def test_a_wait_beside_other_programs_ends_with_its_hours_too(tmp_path, workspace):
    """Its plan is tried again and again meanwhile."""
    recipe, limit_bytes = builders.recipe(workspace), probe_machine.machine().host_limit_bytes
    reserve_gib = (limit_bytes - 3 * GIB) / GIB
    program = subprocess.Popen(
        [sys.executable, "-c", TAKE_MEMORY, str(4 * GIB)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "taken\n"
        done = builders.launch(
            workspace,
            *("run", str(recipe), "--launch.wait=0.01", f"--launch.host_reserve_gib={reserve_gib}"),
            LOWMEM_LEASES=str(tmp_path),
        )
    finally:
        program.kill()
        program.wait()
    assert done.returncode == 3, done.stderr
    assert "launch.wait: 0.01 h are over" in done.stderr
    assert list(tmp_path.glob("*.lease")) == []


def test_a_wait_of_some_hours_ends_with_3_and_names_what_it_waited_for(tmp_path, workspace, hold):
    assert said(hold("4")) == "holds 1"
    recipe = builders.recipe(workspace)
    began = time.monotonic()
    done = builders.launch(
        workspace,
        *("run", str(recipe), "--launch.wait=0.0005", "--launch.host_limit_gib=4.2"),
        LOWMEM_LEASES=str(tmp_path),
    )
    assert done.returncode == 3, done.stderr
    assert "launch.wait: 0.0005 h are over, and this run still waits for 0." in done.stderr
    assert time.monotonic() - began > 0.0005 * 3600
    assert [path.name for path in tmp_path.glob("*.lease")] == ["1.lease"]
