"""No family has fewer levers than when lists of names decided on them."""

from __future__ import annotations

import pytest

from benchmarks.families import FAMILIES
from launch.schema.levers import PLAIN, ROWS
from tests.modes.compat.families_by_name import AT_TARGETS, CHUNKED, FLATTENED, TILED
from training.trace.model_parts import model_parts

BY_NAME = {
    "tiled_mlp_num_shards": TILED,
    "num_output_chunks": CHUNKED,
    "logits_at_targets": AT_TARGETS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_levers_that_it_had_and_a_refusal_says_what_it_lacks(name):
    family = model_parts(dict(FAMILIES[name])).family
    for lever, had in BY_NAME.items():
        reason = ROWS[lever].refusal(PLAIN, family)
        if family.model_type in had:
            assert reason is None
        elif reason is not None:
            assert reason.startswith(f"the model is a {family.model_type}, ")
    assert family.forward.flattens or family.model_type not in FLATTENED
