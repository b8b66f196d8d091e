"""Micro-batches of rows of like length are candidates wherever rows differ, and nobody said no."""

from __future__ import annotations

from typing import Any

import pytest

from launch.plan import candidates
from launch.predict.facts import Facts
from tests.builders import changed, facts_of, machine, plan, recipe_of

COUNTS = {"rows": 90, "lengths": [[9, 9], [120, 120]] * 45}


def facts(counts: dict[str, Any] | None = COUNTS, is_ragged: bool = True, **sections: Any) -> Facts:
    recipe = recipe_of(**sections)
    return changed(facts_of(recipe, machine()), counts=counts, is_ragged=is_ragged)


def splits(given: Facts, **levers: Any) -> list[tuple[int, int]]:
    own = plan(given.recipe, machine()).strategy.with_levers(**levers)
    found = list(candidates.sorted_splits(given, own))
    assert all(each.levers.batch_by_tokens for each in found)
    assert {each.effective_batch_size for each in found} <= {own.effective_batch_size}
    return [(each.per_device_train_batch_size, each.gradient_accumulation_steps) for each in found]


@pytest.mark.parametrize("typed", [{}, {"batch_by_tokens": True}])
def test_the_own_micro_batch_and_parts_of_it_are_sorted(typed):
    assert splits(facts(data=typed)) == [(16, 2), (8, 4), (4, 8), (2, 16)]


def test_of_a_step_of_one_micro_batch_its_parts_are():
    training = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    assert splits(facts(training=training)) == [(6, 2), (3, 4)]


def test_an_exact_batch_is_sorted_and_not_split():
    assert splits(facts(launch={"exact_batch": True})) == [(16, 2)]


@pytest.mark.parametrize(
    ("given", "levers"),
    [
        ({"data": {"batch_by_tokens": False}}, {}),
        ({"data": {"packing": True}}, {}),
        ({"counts": None}, {}),
        ({"is_ragged": False}, {}),
        ({}, {"attn_implementation": "varlen_attn"}),
    ],
    ids=["typed false", "packed", "not tokenised", "one length", "flattened"],
)
def test_rows_are_not_sorted_where_it_saves_nothing_or_somebody_said_no(given, levers):
    assert splits(facts(**given), **levers) == []
