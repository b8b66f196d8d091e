"""This machine's own runs correct predicted seconds: of three like ones the median, and what a run
was corrected by does not count twice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from launch.predict.history import calibration
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.time.timing import TimeEstimate
from launch.schema.plan import NOT_CORRECTED, SecondsCorrection
from tests.builders import plan
from tests.unit.predict.history.entries import measurement

STRATEGY = replace(plan().strategy, mode="cpu", device="cpu", num_processes=1)


def run(factor: float, **given: Any) -> Measurement:
    """A run on this machine that took `factor` times the seconds of the rates."""
    facts: dict[str, Any] = {
        "device": "cpu",
        "mode": "cpu",
        "predicted": Figures(step_s=2.0),
        "measured": Figures(step_s=2.0 * factor),
        "time_model": calibration.time_model(),
    }
    return measurement(**{**facts, **given})


def correction(*runs: Measurement, waits_share: float = 0.0, **given: Any) -> SecondsCorrection:
    like = calibration.comparable_runs(runs, "machine-1")
    return calibration.seconds_correction(like, "model-1", replace(STRATEGY, **given), waits_share)


def test_three_like_runs_correct_by_their_median_and_fewer_do_not():
    assert correction(run(1.2), run(1.4)) == NOT_CORRECTED
    of_three = correction(run(1.2), run(1.4), run(1.3))
    assert (of_three.factor, of_three.runs) == (pytest.approx(1.3), 3)
    assert (of_three.least, of_three.most) == (pytest.approx(1.2 / 1.3), pytest.approx(1.4 / 1.3))
    assert "corrected x 1.3, the median of 3 runs of this model by cpu on this" in of_three.reason
    assert "1.2 to 1.4 times" in of_three.reason


def test_one_odd_run_moves_nothing():
    assert correction(run(1.0), run(1.0), run(1.0), run(50.0)).factor == pytest.approx(1.0)


def test_old_runs_fade():
    assert correction(*[run(3.0)] * 9, *[run(1.1)] * 5).factor == pytest.approx(1.1)


def test_what_corrected_a_run_is_taken_out_of_its_prediction():
    """Each run after a first few is predicted right, and the factor stays."""
    right = run(1.0, correction=1.3)
    assert correction(*[right] * 3).factor == pytest.approx(1.3)


@pytest.mark.parametrize(
    "other",
    [
        {"machine_key": "machine-2"},
        {"time_model": "that of another version"},
        {"time_model": ""},
        {"device": "cuda"},
        {"measured": Figures()},
        {"predicted": Figures()},
        {"waits_share": 0.5},
        {"core_share": 0.89},
    ],
)
def test_runs_of_another_kind_do_not_count(other):
    runs = run(1.2), run(1.2), run(1.2, **other)
    assert correction(*runs) == NOT_CORRECTED


def test_the_nearest_runs_count():
    of_mode = [run(1.5, model_key="model-2")] * 3
    others = [run(2.0, mode="multi_cpu", num_processes=2)] * 3
    assert correction(*others).factor == 2.0
    assert correction(*others).of == "on its CPU"
    assert correction(*others, *of_mode).factor == 1.5
    of_model = correction(*others, *of_mode, *[run(1.1)] * 3)
    assert (of_model.factor, of_model.runs) == (pytest.approx(1.1), 3)


def test_a_device_that_waits_for_its_host_is_corrected_by_others_that_do():
    waiting = [run(2.0, waits_share=0.6)] * 3
    assert correction(*waiting, waits_share=0.5).factor == 2.0
    assert correction(*waiting, waits_share=0.1) == NOT_CORRECTED


def test_corrected_seconds_are_still_the_sum_of_their_parts():
    time = TimeEstimate(2.1, 1.0, 0.5, 0.3, 0.2, 0.1, 0.0, "")
    half = time.corrected(SecondsCorrection(0.5, 1, 1, 3, "here"))
    assert half.step_s == pytest.approx(1.05)
    assert half.compute_s + half.memory_s + half.launch_s + half.optimizer_s + (
        half.communication_s + half.offload_s
    ) == pytest.approx(half.step_s)
    assert half.waits_share == pytest.approx(time.waits_share)
    assert half.reason == ""


@pytest.mark.parametrize(
    ("taken", "cores", "ranks", "slowdown"),
    [
        (1.0, 2, 1, 2.0),
        (0.5, 2, 1, 1.5),
        (1.0, 1, 1, 2.0),
        (6.0, 4, 1, 2.5),
        (1.0, 2, 2, 1.5),
        (1.0, 4, 2, 2.0),
    ],
)
def test_other_programs_on_the_cores_slow_every_step_down(taken, cores, ranks, slowdown):
    """A rank waits for its slowest thread; ranks of one thread share the cores with the others."""
    like = calibration.comparable_runs([run(1.3)] * 3, "machine-1")
    alone = partial(calibration.seconds_correction, like, "model-1")
    strategy = replace(STRATEGY, num_processes=ranks)
    beside = calibration.beside_others(alone, taken, cores)(strategy, 0.0)
    assert beside.factor == pytest.approx(1.3 * slowdown)
    assert beside.slowdown == pytest.approx(slowdown)
    assert beside.reason == alone(strategy, 0.0).reason  # what runs have taught is apart


def test_a_quiet_machine_and_a_card_are_as_fast_as_alone():
    alone = partial(calibration.seconds_correction, [], "model-1")
    assert calibration.beside_others(alone, 0.2, 2)(STRATEGY, 0.0) == NOT_CORRECTED
    on_card = replace(STRATEGY, device="cuda")
    assert calibration.beside_others(alone, 2.0, 2)(on_card, 0.0) == NOT_CORRECTED
