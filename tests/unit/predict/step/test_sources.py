"""The step that a candidate asks for."""

from __future__ import annotations

import pytest

from tests.builders import facts_of, machine, plan, recipe_of

pytestmark = pytest.mark.unit


def test_on_a_cpu_a_step_is_traced_with_its_fused_attention():
    question = facts_of(recipe_of(), machine()).question(plan().strategy)
    assert (question.architecture, question.fused_attention) == ("", True)
