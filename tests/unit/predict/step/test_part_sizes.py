"""Work of a step whose logits are made in another number of parts than were recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from launch.predict.step.part_sizes import PartSizes
from launch.schema.recorded_step import LOSS, Call, Operator

pytestmark = pytest.mark.unit
CALL = Call(0, "forward", None)


@pytest.mark.parametrize(
    ("of_part", "of_four"),
    [
        ((7, 5, 0, 0), (7, 5, 0, 0)),
        ((7, 5, 3, 0), (7, 5, 6, 0)),  # two parts were recorded
        ((7, 5, 0, 3), (7, 5, 12, 0)),
    ],
)
@pytest.mark.parametrize("field", ["flops", "bytes"])
def test_what_a_call_outside_of_parts_does_for_targets_is_done_for_each_part(
    field, of_part, of_four
):
    sizes = PartSizes(SimpleNamespace(recorded_layers={LOSS: 2}), parts=4, positions=0)  # pyright: ignore
    operator = Operator("aten::add", "other", **{field: of_part})
    assert getattr(sizes.operator(operator, CALL, None, None), field) == of_four
