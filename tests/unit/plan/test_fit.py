"""The table of `fit`: what its rows say of a choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.plan import fit
from launch.plan.fit import Fit, Method
from launch.predict.estimate import Judged
from launch.schema.machine import GIB
from launch.schema.plan import MemoryEstimate
from tests.builders import machine, plan, recipe_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("method", "half", "changes"),
    [
        ("full", False, ()),
        ("full", True, ("bf16 weights",)),
        ("lora", False, ()),  # whose frozen weights are in 16 bits anyway
        ("qlora", False, ()),
    ],
)
def test_weights_in_16_bits_are_a_change_only_where_they_are_trained(
    method: Method, half: bool, changes: tuple[str, ...]
) -> None:
    recipe = fit.recipe_of("qwen2.5-0.5b", method, 512, half)
    rows = recipe.training.per_device_train_batch_size
    strategy = replace(plan(recipe_of(), machine(1)).strategy, per_device_train_batch_size=rows)
    chosen = Judged(strategy, MemoryEstimate(0, 0, 0), None, 20 * GIB, None)
    found = Fit("qwen2.5-0.5b", method, 512, recipe, chosen)
    assert found.changes == changes
    fewer = replace(chosen, candidate=replace(strategy, per_device_train_batch_size=2))
    assert replace(found, chosen=fewer).changes == (*changes, "batch 2")
