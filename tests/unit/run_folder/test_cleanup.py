"""`runs` lists every run, and `runs clean` removes what its rules say and nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import datetime, timedelta

import pytest

from launch.__main__ import main
from launch.base import files, locks
from launch.base.errors import ResourceError
from launch.base.workspace import Workspace
from launch.render import run_files
from launch.run_folder import disk_space, layout
from launch.run_folder.layout import RunDir
from launch.schema.result import AttemptEnd, Continues, ExportedModel, HeldOut, Outcome
from tests import builders
from tests.unit.status.test_runs import EVENT

CHECKPOINT_BYTES = 1000
LONG_AGO = 1_000_000.0


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path / "workspace"))
    return Workspace.here()


def made(workspace: Workspace, day: int, is_complete: bool = True, name: str = "wish") -> RunDir:
    """A run of that day with two checkpoints, as a launcher and rank 0 write it."""
    recipe, on = builders.recipe_of(name=name), builders.machine()
    run = RunDir.create(workspace.runs, name, datetime(2026, 1, 1) + timedelta(days=day))
    attempt = run_files.write_run(run, recipe, on, builders.plan(recipe, on), workspace)
    for step in (4, 8):
        folder = run.checkpoints / f"checkpoint-{step:06d}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(CHECKPOINT_BYTES))
    event = {**asdict(EVENT), "step": 8, "max_steps": 8 if is_complete else 16}
    attempt.events_file.write_text(json.dumps(event) + "\n")
    scored = asdict(HeldOut(8, 64, 2.5, 1.0, 1.0))
    attempt.held_out_file.write_text(json.dumps(scored) + "\n")
    model = workspace.root / "models" / f"{name}-{day}"
    if is_complete:
        outcome = Outcome(complete=True, ended="complete", model_dir=str(model), step=8)
        files.write_json(attempt.outcome_file, outcome)
        files.write_json(attempt.supervisor_file, AttemptEnd(0, None, 1.0))
        model.mkdir(parents=True)
        files.write_json(model / "lowmem.json", ExportedModel(run.run_id))
    return run


def dry_run(workspace: Workspace, age_s: float = 1000.0) -> RunDir:
    run = RunDir.dry_run(workspace.runs, "wish")
    (run.root / "plan.json").write_bytes(bytes(100))
    time = run.root.stat().st_mtime - age_s
    os.utime(run.root, (time, time))
    return run


def test_a_file_of_two_names_is_counted_once(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "first").write_bytes(b"x" * 100)
    (tmp_path / "b" / "second").hardlink_to(tmp_path / "a" / "first")
    (tmp_path / "b" / "third").write_bytes(b"x" * 10)
    assert disk_space.size_bytes(tmp_path) == 110
    assert disk_space.size_bytes(tmp_path / "a" / "first") == 100


def test_dry_runs_go_first_then_checkpoints_of_complete_runs_beyond_the_newest(workspace, capsys):
    oldest, older, unfinished, *newest = [
        made(workspace, day, is_complete=day != 2) for day in range(5)
    ]
    other = made(workspace, 0, name="other")
    left_over = dry_run(workspace)
    (workspace.root / "models/wish-1/lowmem.json").unlink()  # of another run now
    (oldest.checkpoints / "commits.damaged").touch()  # a list of checkpoints that could not be read
    before = disk_space.size_bytes(workspace.runs)
    command = ["runs", "clean", "--keep", "2"]
    assert main([*command, "--dry-run"]) == 0
    promised = capsys.readouterr().out
    assert disk_space.size_bytes(workspace.runs) == before
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert promised.replace("would free", "freed").splitlines() == lines
    assert lines[0].startswith("a dry run: wish/dry-run, ")
    assert lines[1] == "checkpoints of the complete run: wish/20260101-000000, 2.0 KiB"
    assert lines[2].startswith("stays: wish-20260103-000000: not complete; --unfinished removes")
    assert lines[3].startswith("stays: wish-20260102-000000: its model is not in its output_dir")
    assert lines[3].endswith("only weights here; --unfinished removes its checkpoints")
    assert lines[4] == "freed 2.1 KiB"
    assert before - disk_space.size_bytes(workspace.runs) == 2 * CHECKPOINT_BYTES + 100
    assert not left_over.root.exists()
    assert oldest.outcome() and not any(oldest.checkpoints.iterdir())
    for run in (older, unfinished, *newest, other):
        assert disk_space.has_checkpoints(run)


def test_unfinished_runs_go_only_when_asked(workspace, capsys):
    run = made(workspace, 0, is_complete=False)
    assert main(["runs", "clean", "--keep", "0"]) == 0
    assert disk_space.has_checkpoints(run)
    assert main(["runs", "clean", "--keep", "0", "--unfinished"]) == 0
    assert not disk_space.has_checkpoints(run)
    assert "(it could still be continued)" in capsys.readouterr().out


def test_a_run_in_use_and_the_source_of_an_unfinished_run_stay(workspace, capsys):
    source, running = made(workspace, 0), made(workspace, 1)
    continuing = made(workspace, 2, is_complete=False)
    continues = Continues(source.checkpoints / "checkpoint-000008", 64)
    files.write_json(continuing.continues_file, continues)
    with layout.run_lock(running):
        assert main(["runs", "clean", "--keep", "0"]) == 0
        assert not disk_space.remove(disk_space.Removal("complete", running, 0))
    words = capsys.readouterr().out
    assert "stays: wish-20260102-000000: in use" in words
    assert "stays: wish-20260101-000000: an unfinished run continues from its checkpoint" in words
    assert words.endswith("freed 0.0 KiB\n")
    assert disk_space.has_checkpoints(source) and disk_space.has_checkpoints(running)


@pytest.mark.parametrize("linked", ["checkpoints", "run", "recipe"])
def test_what_lies_behind_a_link_stays(workspace, tmp_path, capsys, linked):
    run, disk = made(workspace, 0), tmp_path / "disk"
    link = {"checkpoints": run.checkpoints, "run": run.root, "recipe": run.root.parent}[linked]
    link.rename(disk)
    link.symlink_to(disk)
    before = sorted(disk.rglob("*"))
    assert main(["runs", "clean", "--keep", "0"]) == 0
    assert link.is_symlink() and sorted(disk.rglob("*")) == before
    assert f"its checkpoints lie behind the link {link}" in capsys.readouterr().out


def test_what_no_run_wrote_stays(workspace, capsys):
    run, runs = made(workspace, 0), workspace.runs
    theirs = [run.checkpoints / name for name in ("notes.md", "best/a.safetensors")]
    theirs += [runs / "wish/backup/checkpoints/checkpoint-000012/a.safetensors"]
    theirs += [runs / "wish/20260102-000000/checkpoints/checkpoint-000012/a.safetensors"]
    theirs += [runs / "wish/dry-run/thesis.tex", runs / "mine/dry-run/plan.txt"]
    dry_run(workspace)
    (runs / "empty" / "folder").mkdir(parents=True)
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for path in runs.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    assert main(["runs", "clean", "--keep", "0"]) == 0
    assert all(path.read_text() == "mine" for path in theirs)
    assert (runs / "empty" / "folder").is_dir()
    assert {path.name for path in run.checkpoints.iterdir()} == {"notes.md", "best"}
    with pytest.raises(ResourceError, match="holds something that no dry run of ours wrote"):
        RunDir.dry_run(runs, "wish")
    with pytest.raises(ResourceError, match="mine/dry-run: holds something that no dry run"):
        RunDir.dry_run(runs, "mine")


def test_a_start_that_ended_before_its_plan_goes_a_dry_run_of_now_stays(workspace):
    killed, failed, lost = (
        RunDir.create(workspace.runs, "wish", datetime(2025, 1, day)) for day in (1, 2, 3)
    )
    files.write_json(failed.new_attempt().supervisor_file, AttemptEnd(4, None, 1.0))
    for run in (failed, lost):  # of the lost one no word of its end
        run.attempt(1).root.mkdir(parents=True, exist_ok=True)
        run.attempt(1).tokenising_file.touch()
    for run in (killed, failed, lost):
        os.utime(run.root, (LONG_AGO, LONG_AGO))
    new = RunDir.create(workspace.runs, "wish", datetime(2026, 1, 2))
    recent = dry_run(workspace, age_s=0.0)
    with locks.lock(lost.lock_file, "it"):  # a plan is made
        os.utime(lost.root, (LONG_AGO, LONG_AGO))
        assert main(["runs", "clean"]) == 0
    assert not killed.root.exists() and not failed.root.exists() and lost.root.exists()
    os.utime(lost.root, (LONG_AGO, LONG_AGO))
    assert main(["runs", "clean"]) == 0
    assert not lost.root.exists()
    assert new.root.exists() and recent.root.exists()


def test_what_is_left_of_a_start_that_was_killed_while_it_dropped_its_attempts_goes(
    workspace, capsys
):
    dropped, half_dropped, theirs = (
        RunDir.create(workspace.runs, "wish", datetime(2025, 1, day)) for day in (1, 2, 3)
    )
    for run in (dropped, half_dropped):
        with layout.run_lock(run):
            run.recipe_yaml.write_text("name: wish")
    half_dropped.new_attempt().log_file.write_text("tokenising")
    theirs.recipe_yaml.write_text("name: mine")  # no start has locked it
    for run in (dropped, half_dropped, theirs):
        os.utime(run.root, (LONG_AGO, LONG_AGO))
    assert main(["runs", "clean"]) == 0
    said = capsys.readouterr().out
    assert said.count("a start without a plan: wish/2025010") == 2
    assert not dropped.root.exists() and not half_dropped.root.exists()
    assert theirs.recipe_yaml.read_text() == "name: mine"


def test_the_list_has_each_run_with_its_outcome_and_size(workspace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    made(workspace, 0)
    stopped = made(workspace, 1, is_complete=False)
    end = AttemptEnd(75, None, 1.0)
    files.write_json(stopped.attempts()[-1].supervisor_file, end)
    assert main(["runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "wish/" in line]
    assert lines[0][:5] == ["wish/20260102-000000", "stopped", "8", "of", "16"]
    assert lines[1][:7] == ["wish/20260101-000000", "complete", "8", "of", "8", "3.0000", "2.5000"]
    assert main(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["stopped", "complete"]
    assert rows[1]["started_at"] == "2026-01-01T00:00:00"
    assert rows[1]["checkpoint_bytes"] == 2 * CHECKPOINT_BYTES < rows[1]["bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clean", "--keep", "-1"], "--keep -1: expected 0 or more runs"),
        (["--keep", "2"], "are for runs clean; add clean"),
        (["clean", "--json"], "--json is for the list alone"),
    ],
)
def test_flags_that_do_not_fit_are_refused(workspace, capsys, words, message):
    assert main(["runs", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_runs_there_is_a_line(workspace, capsys):
    assert main(["runs"]) == 0 and main(["runs", "clean"]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_the_name_of_a_run_means_its_own_model_or_none(workspace, tmp_path):
    older, newer = (made(workspace, day) for day in (1, 2))
    target, previous = tmp_path / "model", tmp_path / "model.previous"
    for run in (older, newer):
        attempt = run.attempts()[-1]
        outcome = attempt.read_outcome()
        assert outcome is not None
        files.write_json(attempt.outcome_file, replace(outcome, model_dir=str(target)))
    target.mkdir()
    assert layout.left_in(older.root) == target  # nothing says whose it is
    files.write_json(target / "lowmem.json", ExportedModel(newer.run_id))
    assert layout.left_in(newer.root) == target
    with pytest.raises(ResourceError, match=f"is gone: .* a later one, {newer.run_id}; give"):
        layout.left_in(older.root)
    previous.mkdir()
    files.write_json(previous / "lowmem.json", ExportedModel(older.run_id))
    assert layout.left_in(older.root) == previous
