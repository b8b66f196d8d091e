"""Keys of the recipe that let a run wait."""

from __future__ import annotations

import math
from datetime import datetime

import pytest
from pydantic import ValidationError

from launch.schema.run_sections import LaunchSection, start_time

pytestmark = pytest.mark.unit

NOON = datetime(2026, 12, 31, 12, 0, 30)


@pytest.mark.parametrize(
    ("value", "waits", "longest_s"),
    [(False, False, math.inf), (True, True, math.inf), (1, True, 3600), (0.5, True, 1800)],
)
def test_hours_to_wait_and_a_wait_without_limit_are_told_apart(value, waits, longest_s):
    launch = LaunchSection.model_validate({"wait": value})
    assert (launch.waits, launch.wait_s) == (waits, longest_s)


@pytest.mark.parametrize("value", [-1, "soon", float("nan")])
def test_a_wait_is_hours_or_true(value):
    with pytest.raises(ValidationError, match="wait"):
        LaunchSection.model_validate({"wait": value})


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("22:30", datetime(2026, 12, 31, 22, 30)),
        ("12:00", datetime(2027, 1, 1, 12, 0)),  # of tomorrow
        ("2026-12-31T22:30", datetime(2026, 12, 31, 22, 30)),
        ("2026-12-31 22:30:05", datetime(2026, 12, 31, 22, 30, 5)),
        ("2020-01-01T00:00", datetime(2020, 1, 1)),
    ],
)
def test_a_time_without_a_day_is_the_next_one(text, moment):
    assert start_time(text, NOON) == moment


@pytest.mark.parametrize("text", ["25:00", "noon", "2026-02-30T10:00", "22", "", "12:00 "])
def test_a_text_that_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ValidationError, match=r"is no time; expected one such as 22:30"):
        LaunchSection(not_before=text)


def test_a_number_needs_no_quotes():
    assert LaunchSection.model_validate({"after": 7}).after == "7"
    with pytest.raises(ValidationError, match=r"22 is no time"):
        LaunchSection.model_validate({"not_before": 22})


@pytest.mark.parametrize("keys", [{"after": "3"}, {"not_before": "22:30"}])
def test_a_run_that_comes_after_another_waits_for_memory_too(keys):
    assert LaunchSection(**keys).waits


def test_several_machines_do_not_wait_one_by_one():
    with pytest.raises(ValidationError, match="wait, after and not_before are for one machine"):
        LaunchSection(nodes=2, main_process_ip="10.0.0.1", wait=True)
