"""The state of a run from its files, and its lines on the watch."""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console

from launch.base import files, locks, processes
from launch.base.errors import EXIT_CODES, ConfigError, ResourceError
from launch.base.workspace import CODE, Workspace
from launch.queue import leases
from launch.queue.leases import Needs
from launch.run_folder.layout import RunDir
from launch.schema.result import AttemptEnd, Failure, HeldOut, StepEvent
from launch.status import runs, table, watch
from launch.status.watch import CardState, Watcher

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
    assert "silent for 9" in watch.page([found], [], []).plain


@pytest.mark.parametrize(
    ("exit_code", "state"), [(0, "complete"), (75, "stopped"), (130, "stopped"), (12, "failed")]
)
def test_the_word_of_the_launcher_ends_a_run(run, exit_code, state):
    beat(run, "step")
    end(run, exit_code, "CUDA ran out" if exit_code == 12 else "")
    found = runs.RunFiles(run).state()
    assert found.state == state
    assert found.silent_s is None
    text = watch.page([found], [], []).plain
    assert (("attempt 1: CUDA ran out (exit code 12: out of GPU memory)") in text) == (
        exit_code == 12
    )


@pytest.mark.parametrize(("columns", "count"), [(120, 4), (40, 2)])
def test_runs_that_a_low_terminal_has_no_room_for_are_counted(run, columns, count):
    end(run, 12, "CUDA ran out of memory in step 12 of the second epoch")
    found = [runs.RunFiles(run).state()] * 20
    rows = 16
    terminal = Console(width=columns, height=rows, file=(output := io.StringIO()))
    text = watch.page(found, [], ["a line of one that waits"], terminal)
    terminal.print(text)
    assert len(output.getvalue().splitlines()) <= rows
    lines = text.plain.splitlines()
    assert lines[-2:] == [
        f"{20 - count} more: python -m launch runs, or a higher terminal",
        "a line of one that waits",
    ]
    every = watch.page(found, [], [], Console(width=columns, height=200)).plain
    assert every == watch.page(found, [], []).plain


@pytest.mark.parametrize("exit_code", EXIT_CODES)
def test_a_start_that_ended_before_a_step_says_so_in_words_with_the_line_to_type(
    run, watcher, exit_code
):
    """The steps are those of the attempt before it, since the run has trained them."""
    write_steps(run, range(1, 4))
    run.recipe_yaml.touch()
    run.new_attempt()
    run.plan_file.write_text("{}", encoding="utf-8")
    if exit_code:
        end(run, exit_code, "its logits differ")
    older = RunDir(run.root.with_name("20250101-000000"))
    older.attempt(1).root.mkdir(parents=True)
    older.attempt(1).tokenising_file.touch()  # it has no plan
    older.recipe_yaml.touch()
    end(older, 75, "stopped by SIGTERM")
    row, old = table.rows(run.root.parents[1])
    assert (row.run.step, row.run.max_steps, row.run.loss) == (3, 1000, 3.0)
    line = f"python -m launch run {run.recipe_yaml}"
    # the same line goes on with the newer one
    assert (old.ended, old.run.fix, old.run.again) == ("stopped", "", "")
    assert table.next_lines([row, old]) == [f"{row.run.run} goes on: {line}"]
    watched = watcher().runs()
    assert [(state.fix, state.again) for state in watched] == [(row.run.fix, line), ("", "")]
    assert f"  {row.run.fix}\n  {line}\n" in watch.page(watched, [], []).plain
    if not exit_code:  # no word of its end
        assert (row.ended, row.run.verdict) == ("lost", "")
        assert row.run.fix.startswith("killed, or the machine went down; run the same line again")
        return
    words = f"exit code {exit_code}: {EXIT_CODES[exit_code]}"
    assert row.run.verdict == f"attempt 2: its logits differ ({words})"
    assert row.run.fix == "fix"
    assert {row.run.verdict, row.run.fix} <= {line.strip() for line in printed([row], 1000)}


def test_a_start_that_tokenises_is_listed_and_watched(run, watcher):
    run.plan_file.unlink()
    run.attempts()[-1].tokenising_file.touch()
    beat(run, "tokenise")
    with locks.lock(run.lock_file, "it"):
        (row,), (state,) = table.rows(run.root.parents[1]), watcher().runs()
        assert (row.ended, row.run.fix, state.state) == ("tokenising", "", "tokenising")
        run.attempts()[-1].tokenised_file.touch()  # and a plan is made
        (row,), (state,) = table.rows(run.root.parents[1]), watcher().runs()
    assert (row.ended, row.run.fix, state.state) == ("starting", "", "starting")
    assert state.silent_s is None  # the process has ended


def printed(rows: Sequence[Any], columns: int) -> list[str]:
    terminal = Console(width=columns, file=(output := io.StringIO()))
    for line in table.lines(rows, columns):
        terminal.print(line, crop=False)
    return output.getvalue().splitlines()


def test_a_reason_has_the_whole_width_and_a_long_name_a_line_of_its_own(run):
    write_steps(run, range(1, 148), max_steps=100_000)
    run.plan_file.write_text("{}", encoding="utf-8")
    end(run, 12, "no room on the card for the second epoch of a run that has a long cause")
    row = replace(table.rows(run.root.parents[1])[0], bytes=5 << 20)
    name = f"{'n' * 60}/20260101-000000"
    long = replace(row, run=replace(row.run, run=name, verdict="", fix="", eval_loss=1.5))
    row = replace(row, run=replace(row.run, run="short/20260101-000000"))
    assert printed([row, long], 80) == [
        "run                    state            steps    loss  held out     disk",
        "short/20260101-000000  failed  147 of 100,000  3.0000            5.0 MiB",
        "  attempt 1: no room on the card for the second epoch of a run that has a long  ",
        "  cause (exit code 12: out of GPU memory)                                       ",
        "  fix",
        f"{'n' * 60}/20260101-000000",
        f"{' ' * 23}failed  147 of 100,000  3.0000    1.5000  5.0 MiB",
        "2 runs, 10.0 MiB",
    ]
    # no column of held-out losses where there are none
    assert printed([row], 80)[0].split() == ["run", "state", "steps", "loss", "disk"]


def test_the_documented_exit_codes_have_words():
    page = (CODE / "docs" / "exit_codes.md").read_text("utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(code) for code in EXIT_CODES]


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
    assert found.verdict == "attempt 1: CUDA ran out (exit code 12: out of GPU memory)"


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
    names = ("tiny", "tiny/20260101-000000", "tiny-20260101-000000", str(run.root))
    for watched in (watcher(), *map(watcher, names)):
        assert [state.state for state in watched.runs()] == ["waiting"]
        assert "tiny" in watched.waiting()[0]
        assert watch.page(watched.runs(), [], []).plain == "tiny/20260101-000000  waiting"
    assert [row.ended for row in table.rows(run.root.parents[1])] == ["waiting"]
    run.plan_file.unlink()  # rows are there, and it has made no plan that it keeps
    assert [row.ended for row in table.rows(run.root.parents[1])] == ["waiting"]
    assert table.rows(run.root.parents[1] / "elsewhere") == []
    run.plan_file.touch()
    waiting.clear()
    assert [state.state for state in watcher().runs()] == ["lost"]
    assert watcher().waiting() == []


@pytest.mark.parametrize("name", ["other", "*", "**", "/nowhere", "runs/tiny", "a\x1b[31m"])
def test_a_name_of_no_run_is_refused(watcher, name):
    with pytest.raises(ConfigError, match=r"expected a recipe that has run in .*; .*: tiny$"):
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
    text = watch.page([found], [], []).plain
    assert "step 12 of 1,000  0:32:56 left" in text
    assert "loss 2  ████" in text
    assert "VRAM 3.00 GiB, predicted 0.00 GiB, 20.0 in all" in text


def test_a_long_file_of_steps_is_read_from_its_end(run):
    write_steps(run, range(1, 20_001))
    watched = runs.RunFiles(run)
    found = watched.state()
    assert found.step == 20_000
    assert 100 < len(found.losses) <= runs.KEPT_STEPS
    assert watched._lines and watched._lines.offset == run.attempts()[-1].events_file.stat().st_size


def test_the_steps_of_earlier_attempts_are_read_once(run):
    run.new_attempt()
    watched = runs.RunFiles(run)
    assert watched.state().loss is None
    run.attempts()[0].events_file.write_text(json.dumps(asdict(EVENT)) + "\n", encoding="utf-8")
    assert watched.state().loss is None
    assert runs.RunFiles(run).state().loss == 3.0


def test_of_runs_that_have_ended_only_those_that_are_shown_are_read(run, watcher):
    for day in range(1, 13):
        ended = RunDir(run.root.with_name(f"202602{day:02}-000000"))
        ended.new_attempt()
        ended.plan_file.touch()
    watched = watcher()
    with locks.lock(run.lock_file, "it"):
        names = [state.run for state in watched.runs()]
    days = range(12, 4, -1)
    assert names == ["tiny/20260101-000000", *(f"tiny/202602{day:02}-000000" for day in days)]
    assert sum(read._root is not None for read in watched._files.values()) == len(names)


def test_runs_that_may_not_be_read_are_not_called_none(run, watcher):
    watched, runs, user = watcher(), run.root.parents[1], os.geteuid()
    runs.chmod(0)
    os.seteuid(user or 65534)  # root reads what nobody may
    try:
        with pytest.raises(PermissionError):
            table.rows(runs)
        with pytest.raises(PermissionError):
            watched.runs()
    finally:
        os.seteuid(user)
        runs.chmod(0o700)


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
    assert "held out 1.25" in watch.page([runs.RunFiles(run).state()], [], []).plain


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ((), ""),
        ((1.0, 1.0), "▁▁"),
        ((0.0, 7.0), "▁█"),
        ((1e-310, 0.0), "█▁"),
        ((1e308, -1e308), "▁▁"),
        ((0.0, math.nan, 7.0), "▁ █"),
        ((math.inf,), " "),
        (tuple(map(float, range(8))), "▁▂▃▄▅▆▇█"),
        (tuple(value // 2 for value in range(48)), "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"),  # means of two
    ],
)
def test_a_curve_has_a_bar_for_each_value_or_mean(values, bars):
    assert watch.curve(values) == bars


@pytest.mark.parametrize(
    ("encoding", "drawn"), [("utf-8", "▁▂▃▄▅▆▇█"), ("ascii", ".:-=+*%#"), ("latin-1", ".:-=+*%#")]
)
def test_a_terminal_without_the_bars_gets_a_curve_of_signs(run, encoding, drawn):
    for step in range(1, 9):
        write_steps(run, range(step, step + 1), loss=float(step))
    with locks.lock(run.lock_file, "it"):
        page = watch.page([runs.RunFiles(run).state()], [], [])
    colours = page.spans
    assert f"  loss 8  {drawn}  1,600 tokens/s" in watch.in_encoding(page, encoding).plain
    assert page.spans == colours


def test_a_card_is_a_line():
    card = CardState(0, "RTX 3090", 3 << 30, 24 << 30, 97, None)
    assert watch.card_line(card) == "card 0 RTX 3090  3.0 of 24.0 GiB  busy 97 %"
