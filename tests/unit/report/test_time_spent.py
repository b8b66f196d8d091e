"""The time of attempts adds up, each second under one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.report import run_figures
from launch.report.run_figures import uses_of_attempt
from launch.run_folder.layout import AttemptDir
from launch.run_folder.steps import Stretch
from launch.schema.result import AttemptEnd, HeldOut, Outcome
from tests.unit.report.test_compare import START, STEP_S, WAIT_S, step


def stretch(count: int, counted: int, first_s: float = STEP_S) -> Stretch:
    """Steps from START on, of which so many count; the first is slower."""
    rest_s = first_s - STEP_S
    steps = [
        step(n, START + rest_s + STEP_S * n, seconds=first_s if n == 1 else STEP_S)
        for n in range(1, count + 1)
    ]
    evaluations = (HeldOut(count, 8 * count, 2.0, 3.0, steps[-1].time + 3.0),)
    return Stretch(
        attempt=AttemptDir(Path("not there")),  # not read here
        counted=tuple(steps[:counted]),
        steady=tuple(steps[2:counted]),
        evaluations=evaluations,
        steady_since=steps[1].time,
        wall_s=evaluations[0].time - steps[1].time,
        began=START,
        trained_s=sum(event.seconds for event in steps),
    )


def test_each_second_of_the_attempts_has_one_name():
    killed = uses_of_attempt(
        AttemptEnd(137, None, 50.0, ended_at=START + 30.0), None, stretch(10, 6)
    )
    outcome = Outcome(complete=True, ended="complete", save_seconds=4.0)
    end = AttemptEnd(0, None, 60.0, ended_at=START + 55.0)
    complete = uses_of_attempt(end, outcome, stretch(10, 10, first_s=12.0), tokenising_s=9.0)
    without = uses_of_attempt(AttemptEnd(3, None, 7.0, ended_at=START), None, None)
    uses = run_figures.spent([killed, complete, without])
    assert dict(uses) == {
        run_figures.TRAINING: pytest.approx(16 * (STEP_S - WAIT_S)),
        run_figures.FIRST_STEPS: pytest.approx(10.0),
        run_figures.WAITING: pytest.approx(16 * WAIT_S),
        run_figures.EVALUATING: 6.0,
        run_figures.AGAIN: 4 * STEP_S,
        run_figures.STARTING: 20.0 + 5.0,
        run_figures.SAVING: 4.0,
        run_figures.TOKENISING: 9.0,
        run_figures.WITHOUT: 7.0,
        run_figures.REST: pytest.approx(50 - 20 - 23 + 60 - 5 - 30 - 3 - 4),
    }
    assert sum(dict(uses).values()) == pytest.approx(50.0 + 60.0 + 7.0 + 9.0)


def test_an_attempt_whose_launcher_was_killed_counts_as_far_as_its_records_go():
    uses = run_figures.spent([uses_of_attempt(None, None, stretch(4, 4))])
    assert sum(dict(uses).values()) == pytest.approx(4 * STEP_S + 3.0)
