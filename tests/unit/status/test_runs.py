"""The state of a run from its files, and its lines on the screen."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from launch.base import files, locks, processes
from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import Workspace
from launch.queue import leases
from launch.queue.leases import Needs
from launch.run_folder.layout import RunDir
from launch.schema.result import AttemptEnd, Failure, HeldOut, StepEvent
from launch.status import runs, screen
from launch.status.cards import CardState
from launch.status.watcher import Watcher

EVENT = StepEvent(
    step=1,
    max_steps=1000,
    epoch=0.1,
    samples_seen=8,
    tokens=800.0,
    samples=8.0,
    loss=3.0,
    learning_rate=1e-4,
    grad_norm=1.0,
    seconds=0.5,
    vram_allocated_bytes=2 << 30,
    vram_reserved_bytes=3 << 30,
    vram_total_bytes=20 << 30,
    host_pss_bytes=1 << 30,
    time=1000.0,
)


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "runs/tiny/20260101-000000")
    run.root.mkdir(parents=True)
    run.new_attempt()
    return run


def write_steps(run: RunDir, steps: range, seconds: float = 2.0, **changes: Any) -> None:
    with run.attempts()[-1].events_file.open("a", encoding="utf-8") as file:
        for step in steps:
            event = replace(EVENT, step=step, time=1000.0 + seconds * step, **changes)
            file.write(json.dumps(asdict(event)) + "\n")


def beat(run: RunDir, section: str, age_s: float = 0.0) -> None:
    fields = {
        "rank": 0,
        "section": section,
        "step": 10,
        "max_steps": 1000,
        "monotonic_s": time.monotonic() - age_s,
        "p99_s": 1.0,
        "pid": os.getpid(),
        "boot": processes.boot_id(),
    }
    run.attempts()[-1].heartbeat_file(0).write_text(json.dumps(fields), encoding="utf-8")


def end(run: RunDir, exit_code: int, cause: str = "") -> None:
    failure = Failure("oom", exit_code, cause, "proof", "fix") if cause else None
    files.write_json(run.attempts()[-1].supervisor_file, AttemptEnd(exit_code, failure, 1.0))


@pytest.mark.parametrize(
    ("section", "state"),
    [
        ("load", "loading"),
        ("step", "training"),
        ("evaluation", "evaluating"),
        ("save", "saving"),
        ("export", "exporting"),
        ("tokenise", "tokenising"),
    ],
)
def test_a_run_whose_launcher_lives_is_in_the_section_of_its_rank(run, section, state):
    beat(run, section, age_s=90)
    with locks.lock(run.lock_file, "it"):
        found = runs.RunFiles(run).state()
    assert (found.state, found.step, found.max_steps) == (state, 10, 1000)
    assert found.silent_s == pytest.approx(90, abs=5)
    assert "silent for 9" in screen.page([found], [], []).plain


@pytest.mark.parametrize(
    ("exit_code", "state"), [(0, "complete"), (75, "stopped"), (130, "stopped"), (12, "failed")]
)
def test_the_word_of_the_launcher_ends_a_run(run, exit_code, state):
    beat(run, "step")
    end(run, exit_code, "CUDA ran out" if exit_code == 12 else "")
    found = runs.RunFiles(run).state()
    assert found.state == state
    assert found.silent_s is None
    text = screen.page([found], [], []).plain
    assert (("attempt 1: CUDA ran out (exit code 12)") in text) == (exit_code == 12)


@pytest.mark.parametrize(("columns", "count"), [(120, 7), (40, 3)])
def test_runs_that_a_low_terminal_has_no_room_for_are_counted(run, columns, count):
    end(run, 12, "CUDA ran out of memory in step 12 of the second epoch")
    found = [runs.RunFiles(run).state()] * 20
    rows = 16
    lines = screen.page(found, [], ["a line of one that waits"], (columns, rows)).plain.splitlines()
    assert sum(math.ceil(len(line) / columns) for line in lines) <= rows
    assert lines[-2:] == [
        f"{20 - count} more: python -m launch runs, or a higher terminal",
        "a line of one that waits",
    ]
    every = screen.page(found, [], [], (columns, 200)).plain
    assert every == screen.page(found, [], []).plain


def test_a_run_without_launcher_and_without_its_word_is_lost(run):
    beat(run, "step")
    with locks.lock(run.lock_file, "it"):
        pass
    assert runs.RunFiles(run).state().state == "lost"


def test_between_two_attempts_it_is_starting_and_says_what_ended_the_last(run):
    end(run, 12, "CUDA ran out")
    run.new_attempt()
    with locks.lock(run.lock_file, "it"):
        found = runs.RunFiles(run).state()
    assert (found.state, found.attempt) == ("starting", 2)
    assert found.verdict == "attempt 1: CUDA ran out (exit code 12)"


def test_what_ended_an_older_attempt_is_no_verdict_on_a_later_one(run):
    end(run, 75, "stopped by SIGTERM")
    run.new_attempt()
    with locks.lock(run.lock_file, "it"):
        assert runs.RunFiles(run).state().verdict == ""
    lost = runs.RunFiles(run).state()
    assert (lost.state, lost.verdict) == ("lost", "")


@pytest.fixture
def watcher(run, tmp_path, monkeypatch) -> Callable[..., Watcher]:
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path / "leases"))
    run.plan_file.write_text("{}", encoding="utf-8")
    return lambda named=None: Watcher(Workspace(tmp_path), named)


def test_a_run_that_waits_is_waiting_whatever_its_files_lack(run, watcher, monkeypatch):
    record = leases.boot_record(state="waiting", needs=Needs(0), run=str(run.root), recipe="tiny")
    waiting = [leases.Lease(2, os.geteuid(), 1, record)]
    # of real processes: tests/process/queue; leases of this process are not among those read
    monkeypatch.setattr(leases, "live", lambda place: waiting)
    for watched in (watcher(), watcher("tiny"), watcher(str(run.root))):
        assert [state.state for state in watched.runs()] == ["waiting"]
        assert "tiny" in watched.waiting()[0]
        assert screen.page(watched.runs(), [], []).plain == "tiny/20260101-000000  waiting"
    waiting.clear()
    assert [state.state for state in watcher().runs()] == ["lost"]
    assert watcher().waiting() == []


@pytest.mark.parametrize("name", ["other", "*", "**", "/nowhere", "runs/tiny", "a\x1b[31m"])
def test_a_name_of_no_run_is_refused(watcher, name):
    with pytest.raises(ConfigError, match="expected a recipe that has run in"):
        watcher(name)


def test_a_dry_run_is_no_run(run, watcher):
    dry_run = run.root.rename(run.root.parent / "dry-run")
    with pytest.raises(ConfigError, match="expected a recipe"):
        watcher(str(dry_run))


def test_where_no_folder_of_leases_can_be_made_there_are_none(run, watcher, monkeypatch):
    monkeypatch.setenv("LOWMEM_LEASES", "/dev/null/leases")
    assert watcher().waiting() == []
    with pytest.raises(ResourceError, match="LOWMEM_LEASES /dev/null/leases: no folder"):
        leases.folder()


def test_steps_are_read_as_they_are_written_and_their_pace_says_what_is_left(run):
    watched = runs.RunFiles(run)
    with locks.lock(run.lock_file, "it"):
        assert watched.state().loss is None
        write_steps(run, range(1, 11))
        assert watched.state().losses == (3.0,) * 10
        write_steps(run, range(11, 13), loss=2.0)
        with run.attempts()[-1].events_file.open("a", encoding="utf-8") as file:
            file.write('{"step": 13')  # a line that is being written
        found = watched.state()
    assert (found.step, found.loss, found.tokens_per_s) == (12, 2.0, 1600)
    assert found.losses == (3.0,) * 10 + (2.0,) * 2
    assert found.seconds_left == pytest.approx((1000 - 12) * 2.0)
    assert (found.vram_bytes, found.vram_total_bytes) == (3 << 30, 20 << 30)
    text = screen.page([found], [], []).plain
    assert "step 12 of 1,000  0:32:56 left" in text
    assert "loss 2  ████" in text
    assert "VRAM 3.00 GiB, predicted 0.00 GiB, 20.0 in all" in text


def test_a_long_file_of_steps_is_read_from_its_end(run):
    write_steps(run, range(1, 20_001))
    watched = runs.RunFiles(run)
    found = watched.state()
    assert found.step == 20_000
    assert 100 < len(found.losses) <= runs.KEPT_STEPS
    assert watched._read_bytes == run.attempts()[-1].events_file.stat().st_size


def test_damaged_files_count_as_missing(run):
    attempt = run.attempts()[-1]
    write_steps(run, range(1, 3))
    with attempt.events_file.open("ab") as file:
        file.write(b"\xff\x00 nothing\n[]\n")
    attempt.plan_file.write_text("[]", encoding="utf-8")
    attempt.supervisor_file.write_text("{", encoding="utf-8")
    attempt.held_out_file.write_text("3\n", encoding="utf-8")
    run.lock_file.write_text('{"pid": "x"}', encoding="utf-8")
    found = runs.RunFiles(run).state()
    assert (found.state, found.step, found.eval_loss) == ("lost", 2, None)


def test_the_last_evaluation_is_shown(run):
    held_out = HeldOut(step=2, samples_seen=16, loss=1.25, seconds=1.0, time=1.0)
    run.attempts()[-1].held_out_file.write_text(
        json.dumps(asdict(held_out)) + "\n", encoding="utf-8"
    )
    end(run, 0)
    assert "held out 1.25" in screen.page([runs.RunFiles(run).state()], [], []).plain


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ((), ""),
        ((1.0, 1.0), "▁▁"),
        ((0.0, 7.0), "▁█"),
        ((0.0, math.nan, 7.0), "▁ █"),
        ((math.inf,), " "),
        (tuple(map(float, range(8))), "▁▂▃▄▅▆▇█"),
        (tuple(value // 2 for value in range(48)), "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"),  # means of two
    ],
)
def test_a_curve_has_a_bar_for_each_value_or_mean(values, bars):
    assert screen.curve(values) == bars


def test_a_card_is_a_line():
    card = CardState(0, "RTX 3090", 3 << 30, 24 << 30, 97, None)
    assert screen.card_line(card) == "card 0 RTX 3090  3.0 of 24.0 GiB  busy 97 %"
