"""Errors of predictions, and the margin that follows from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.predict.history import calibration
from launch.predict.history.calibration import Figures
from tests.unit.predict.history.entries import add, measurement, residuals


def test_residuals_are_of_the_runs_that_have_both_sides(book):
    for at, (predicted, measured) in enumerate(
        [(100, 110), (100, 95), (None, 5), (100, None), (0, 5), (200, 250)]
    ):
        book.record(measurement(f"run-{at}", predicted, measured, time=float(at)))
    book.record(measurement("cpu", 100, 300, device="cpu"))
    book.record(measurement("elsewhere", 100, 400, machine_key="machine-2", time=50.0))
    assert residuals(book) == pytest.approx([0.10, -0.05, 0.25, 3.0])
    assert residuals(book, device="cpu") == pytest.approx([2.0])
    assert residuals(book, "reserved_bytes") == []


def test_only_the_newest_residuals_count(book):
    lines = [json.dumps(asdict(measurement(took=100 + number))) for number in range(600)]
    add(book.path, "\n".join(lines) + "\n")
    margin = calibration.margin(
        book.measurements(), "allocated_bytes", "cuda", "machine-1", prior=0.0, level=0.001
    )
    assert margin.fraction == pytest.approx((600 - calibration.NEWEST) / 100)
    assert f" of {calibration.NEWEST} runs on this machine" in margin.reason


@pytest.mark.parametrize(
    ("count", "level", "rank"),
    [
        (18, 0.95, None),
        (19, 0.95, 19),
        (20, 0.95, 20),
        (39, 0.95, 38),
        (99, 0.95, 95),
        (9, 0.9, 9),
        (99, 0.07, 7),
    ],
)
def test_the_bound_is_the_residual_of_that_rank(count, level, rank):
    found = calibration.conformal_bound([float(value) for value in range(count, 0, -1)], level)
    assert found == rank


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=60),
    st.sampled_from([0.5, 0.8, 0.9, 0.95]),
)
def test_the_bound_covers_at_least_its_level_of_runs_that_are_like_the_others(values, level):
    covered = 0
    for at, value in enumerate(values):  # each in turn is the next run, the others are known
        bound = calibration.conformal_bound(values[:at] + values[at + 1 :], level)
        covered += bound is None or value <= bound
    assert covered >= level * len(values) - 1e-9


def test_a_margin_is_of_this_machine_else_of_its_kind_of_device_else_the_prior(book):
    def margin(machine_key: str = "machine-1", device: Any = "cuda") -> calibration.Margin:
        # of 3 runs the largest
        runs = book.measurements()
        return calibration.margin(
            runs, "allocated_bytes", device, machine_key, prior=0.5, level=0.75
        )

    assert (margin().fraction, margin().is_assumed) == (0.5, True)
    assert margin().reason == "assumed: 0 run(s) measured so far, a 75% bound needs 3"
    for measured in (104, 102):
        book.record(measurement(took=measured, machine_key="machine-2"))
    assert margin().reason == "assumed: 2 run(s) measured so far, a 75% bound needs 3"
    book.record(measurement(took=103, machine_key="machine-2"))
    assert (margin().fraction, margin().is_assumed) == (pytest.approx(0.04), False)
    assert margin().reason == "75% bound of 3 runs on every cuda machine in the ledger"
    for measured in (97, 98, 96):
        book.record(measurement(took=measured))
    assert margin().fraction == pytest.approx(-0.02)
    assert margin().reason == "75% bound of 3 runs on this machine"
    assert margin(device="cpu").fraction == 0.5


def test_the_calibration_report_says_when_there_is_nothing_yet(book):
    nothing = ["calibration: nothing to compare yet; each run that ends adds its figures"]
    assert book.calibration_lines() == nothing
    book.record(measurement(took=None))
    assert book.calibration_lines() == nothing


def test_the_calibration_report_counts_and_names_the_worst_runs(book):
    for at, measured in enumerate([100, 102, 99, 104, 80, 102, 112]):
        book.record(measurement(f"run-{at}", 100, measured))
    figures = {"predicted": Figures(step_s=1.0), "measured": Figures(step_s=2.0)}
    book.record(measurement("slow", device="cpu", **figures))
    lines = book.calibration_lines()
    assert lines[:9] == [
        (
            "allocated on cuda: 7 run(s), error median 2.0%, p95 20.0%, max 20.0%, bias -0.1%;"
            " 2 under-predicted by more than 3%"
        ),
        f"    below -10%     1 {'#' * 15}",
        "   -10% to -3%     0",
        f"    -3% to -1%     1 {'#' * 15}",
        f"    -1% to +1%     1 {'#' * 15}",
        f"    +1% to +3%     2 {'#' * 30}",
        f"   +3% to +10%     1 {'#' * 15}",
        f"    above +10%     1 {'#' * 15}",
        "  worst: run-4 -20.0%, run-6 +12.0%, run-3 +4.0%, run-1 +2.0%, run-5 +2.0%",
    ]
    assert lines[9].startswith("seconds per step on cpu: 1 run(s), error median 100.0%,")
    assert lines[-1] == "  worst: slow +100.0%"
