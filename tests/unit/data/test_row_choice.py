"""Held-out rows are chosen by their numbers alone: as many as asked for, spread over all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.base.errors import DataError
from launch.data import sources
from launch.data.sources import EvenChoice, RowChoice

pytestmark = pytest.mark.unit


@given(st.integers(1, 400), st.data())
def test_as_many_rows_as_asked_for_are_chosen_and_counted(total, data):
    chosen = data.draw(st.integers(0, total))
    choice = EvenChoice(chosen, total, "a seed")
    numbers = [number for number in range(total) if choice.holds(number)]
    assert len(numbers) == chosen
    for number in range(total):
        assert choice.before(number) == sum(i < number for i in numbers)


def test_chosen_rows_are_spread_but_not_periodic():
    numbers = [n for n in range(10_000) if EvenChoice(100, 10_000, "a seed").holds(n)]
    assert [number // 100 for number in numbers] == list(range(100))
    assert len({number % 100 for number in numbers}) > 40
    others = [n for n in range(10_000) if EvenChoice(100, 10_000, "another").holds(n)]
    assert len(set(numbers) & set(others)) < 10


def test_each_row_is_in_one_part():
    held_out = sources.choose_held_out(0.3, 50, "rows.jsonl")
    taken = {
        part: {n for n in range(50) if RowChoice(held_out, part).takes(n)}
        for part in ("train", "validation")
    }
    assert len(taken["validation"]) == 15
    assert taken["train"] == set(range(50)) - taken["validation"]


def test_the_rows_stay_the_same_between_versions():
    choice = sources.choose_held_out(4, 40, "rows.jsonl")
    assert [number for number in range(40) if choice.holds(number)] == [2, 13, 21, 34]


@pytest.mark.parametrize(
    ("size", "total", "numbers"),
    [
        (0.01, 40, "holds 0 of 40 rows out, and leaves 40 to train on"),
        (40, 40, "holds 40 of 40 rows out, and leaves 0 to train on"),
        (50, 40, "holds 50 of 40 rows out, and leaves 0 to train on"),
        (0.99, 40, "holds 40 of 40 rows out, and leaves 0 to train on"),
    ],
)
def test_no_part_may_be_empty(size, total, numbers):
    with pytest.raises(DataError, match=rf"rows\.jsonl: data\.validation_size {size} {numbers}"):
        sources.choose_held_out(size, total, "rows.jsonl")
