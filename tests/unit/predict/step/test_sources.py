"""The step that a candidate asks for."""

from __future__ import annotations

import pytest

from launch.predict.step import sources
from tests.builders import facts_of, machine, plan, recipe_of

pytestmark = pytest.mark.unit


def test_on_a_cpu_a_step_is_recorded_with_its_fused_attention():
    question = facts_of(recipe_of(), machine()).question(plan().strategy)
    recorded = sources.alone(question).outer
    assert (recorded.architecture, recorded.fused_attention) == ("", True)
