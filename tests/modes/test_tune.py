"""Tuning by real trials, and the second step that refutes a plan: real launches on a CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from launch.base.workspace import Workspace
from launch.plan import planner
from launch.plan.resolve import resolve
from launch.predict.history import cache_keys, calibration
from launch.predict.history.ledger import Ledger, Tuned
from launch.queue import leases
from launch.schema.plan import MemoryEstimate, Peak
from launch.schema.result import SecondStep
from tests import builders
from tests.builders import launch

GIB = 1 << 30


def test_trials_confirm_the_fastest_and_later_runs_use_it(tmp_path):
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    recipe = builders.recipe(tmp_path, count=24, training=batch)
    tuned = launch(tmp_path, "tune", str(recipe))
    assert tuned.returncode == 0, tuned.stderr
    trials = re.findall(r"^trial \d: cpu x1, batch (\d+) x (\d+)", tuned.stdout, re.MULTILINE)
    assert 1 <= len(trials) <= 3
    assert all(int(batch) * int(steps) == 8 for batch, steps in trials)
    assert tuned.stdout.count("fits, ") == len(trials)
    assert leases.last_number(tmp_path / "leases") == len(trials)  # one after another
    assert leases.live(tmp_path / "leases") == []
    best = re.search(
        r"^tuned: cpu x1, batch (\d+) x (\d+).*: ([\d.]+) s a step", tuned.stdout, re.MULTILINE
    )
    assert best is not None
    seconds = re.findall(
        r"fits, ([\d.]+) s a step of the longest rows: ([\d.]+) s of the recipe's own", tuned.stdout
    )
    assert best[3] in [own for _, own in seconds]
    # these rows differ in length
    assert all(float(own) < float(longest) for longest, own in seconds)
    ran = launch(tmp_path, "run", str(recipe), "--explain")
    assert ran.returncode == 0, ran.stderr
    assert (
        f"  batch      {best[1]} per device x {best[2]} accumulation x 1 process = 8 effective"
        in ran.stdout
    )
    if best[1] != "2":
        assert "tuned: the fastest of real trials on this machine" in ran.stdout
    asked = launch(tmp_path, "plan", str(recipe), "2")
    assert "  batch      2 per device x 4 accumulation" in asked.stdout  # what is typed is obeyed
    assert list((tmp_path / ".cache" / "trials").iterdir()) == []
    again = launch(tmp_path, "tune", str(recipe), "--forget")
    assert "forgotten" in again.stdout
    assert "nothing was tuned" in launch(tmp_path, "tune", str(recipe), "--forget").stdout


@pytest.mark.campaign
def test_auto_tunes_once_and_trains(tmp_path):
    recipe = builders.recipe(tmp_path, count=16, training={"per_device_train_batch_size": 4})
    first = launch(tmp_path, "run", str(recipe), "auto")
    assert first.returncode == 0, first.stderr
    assert "tuned: " in first.stdout
    assert "done: " in first.stdout
    second = launch(tmp_path, "run", str(recipe), "auto", "--resume", "never")
    assert second.returncode == 0, second.stderr
    assert "trial 1" not in second.stdout


def test_a_recipe_that_was_tuned_as_allow_relaxed_it_is_not_tuned_again(tmp_path, monkeypatch):
    recipe = builders.recipe(
        tmp_path,
        count=16,
        allow=["data.max_length"],
        data={"max_length": 128},
        training={"max_steps": 1},
    )
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path))
    choice = resolve(str(recipe), [], trace=False)
    *_, (relaxed, _) = planner.relaxed_contexts(choice.facts)
    assert relaxed.recipe.data.max_length < 128
    tuned = Tuned(
        time=0.0,
        machine_key=cache_keys.machine_key(relaxed.machine),
        model_key=cache_keys.model_key(relaxed.model.size),
        recipe_key=cache_keys.recipe_key(relaxed.recipe),
        strategy=choice.plan.strategy,
        why="",
        step_s=1.0,
    )
    Ledger(Workspace(tmp_path).ledger_file, print).record(tuned)
    ran = launch(tmp_path, "run", str(recipe), "auto")
    assert ran.returncode == 0, ran.stderr
    assert "trial 1" not in ran.stdout
    assert "forgotten" in launch(tmp_path, "tune", str(recipe), "--forget").stdout


def test_an_ended_run_is_in_the_ledger_and_the_report_shows_its_error(tmp_path):
    assert "nothing to compare yet" in launch(tmp_path, "report", "--calibration").stdout
    recipe = builders.recipe(tmp_path, count=16)
    assert launch(tmp_path, "run", str(recipe)).returncode == 0
    said = launch(tmp_path, "report", "--calibration").stdout
    assert "host RAM on cpu: 1 run(s)" in said
    (run,) = Ledger(Workspace(tmp_path).ledger_file, print).measurements()
    # a busy machine
    assert run.predicted.host_pss_bytes == pytest.approx(run.measured.host_pss_bytes, rel=0.35)
    (second_step,) = (tmp_path / "runs").glob("tiny/*/attempts/01/second_step.json")
    assert json.loads(second_step.read_text())["host_pss_bytes"] > 0


def estimated(allocated: int, host: int) -> MemoryEstimate:
    return MemoryEstimate(
        *(1, 1, 1),
        peak=Peak("backward", "mm", {"activations": allocated}),
        host={"model": host},
        step_allocated_bytes=allocated,
        step_reserved_bytes=allocated,
    )


def test_a_step_that_took_more_than_predicted_is_said_and_refutes_a_plan_without_room():
    plan = replace(builders.plan(), estimate=estimated(10 * GIB, 4 * GIB), budget_bytes=11 * GIB)
    measured = SecondStep(allocated_bytes=0, reserved_bytes=0, free_bytes=0, host_pss_bytes=0)
    assert calibration.compare(plan, measured, 8 * GIB).lines == ()
    close = calibration.compare(plan, replace(measured, allocated_bytes=int(10.2 * GIB)), 8 * GIB)
    assert (close.lines, close.over) == ((), "")
    above = calibration.compare(plan, replace(measured, allocated_bytes=int(10.5 * GIB)), 8 * GIB)
    assert above.lines == ("step 2: allocated 10.50 GiB, predicted 10.00 (+5.0%)",)
    assert above.over == ""
    far = calibration.compare(plan, replace(measured, allocated_bytes=12 * GIB), 8 * GIB)
    assert "exceed the budget of 11.00 GiB" in far.over
    assert far.exceeded == pytest.approx(0.2)
    host = calibration.compare(plan, replace(measured, host_pss_bytes=9 * GIB), 8 * GIB)
    assert "host RAM 9.00 GiB, predicted 4.00 (+125.0%)" in host.over
    assert host.host_exceeded == pytest.approx(1.25)


def test_the_ledger_is_where_the_house_keeps_it(tmp_path):
    assert (
        Ledger(Workspace(tmp_path).ledger_file, print)
        .calibration_lines()[0]
        .startswith("calibration: nothing")
    )
