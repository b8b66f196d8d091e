"""The operators of passes, as runs that are stored once."""

from __future__ import annotations

import json

from launch.predict.step import reduced
from launch.schema.recorded_step import Call, Log, Operator, Passes

ADD = Operator("aten::add", "other", "float32", bytes=(0, 12, 0, 0), launches=1, form="broadcast")
PRODUCT = Operator("aten::mm", "product", "bfloat16", flops=(0, 8, 2, 0), launches=1)
COPY = Operator("offload", "offload", bytes=(4, 16, 0, 0))
STATE = Operator("aten::_fused_adamw_", "other", launches=1)
STATES = Operator("aten::_fused_adamw_", "other", bytes=(8, 0, 0, 0), launches=2, form="list")
OPERATORS = [ADD, PRODUCT, COPY, STATE, STATES, ADD]


def log_of(*calls: tuple[int, str, int | None]) -> Log:
    return Log(
        operators=OPERATORS,
        calls=[
            Call(number, phase, None if layer is None else (0, layer))
            for number, phase, layer in calls
        ],
    )


LAYERS = [(number, "forward:0", layer) for layer in range(3) for number in (1, 2)]
STEP = log_of(
    (0, "input", None),
    *LAYERS,
    (0, "backward:0", None),
    (1, "forward:1", 0),
    (1, "backward:1", 0),
    (3, "optimizer", None),
    *[(4, "optimizer", layer) for layer in range(3)],
    (1, "evaluation", 0),
)


def test_like_layers_are_one_run_and_each_micro_step_has_its_own():
    of_step = reduced.passes_of_log(STEP)
    assert of_step.runs == [(1, 2), (0,), (1,), (3,), (4,)]
    assert of_step.micro_steps == [[(0, 3), (1, 1)], [(2, 2)]]
    assert of_step.offloaded == [COPY.bytes] * 3
    assert of_step.update == [(3, 1), (4, 3)]
    assert of_step.evaluation == [(2, 1)]


def test_passes_are_read_as_they_were_stored_without_operators_of_other_phases():
    of_step = reduced.passes_of_log(STEP)
    again = reduced.read_passes(json.loads(json.dumps(reduced.stored_passes(of_step))))
    assert [tuple(run) for run in again.runs] == of_step.runs
    assert again.micro_steps == of_step.micro_steps
    assert (again.update, again.evaluation) == (of_step.update, of_step.evaluation)
    assert again.operators[:5] == OPERATORS[:5]
    assert again.operators[5].name == ""


def test_operators_are_changed_wherever_they_run():
    doubled = reduced.passes_of_log(STEP).with_operators(
        lambda each: Operator(each.name + "!", each.kind)
    )
    assert [each.name for each in doubled.operators][:2] == ["aten::add!", "aten::mm!"]
    assert doubled.runs == reduced.passes_of_log(STEP).runs
    assert Passes([], [], [[]]).offloaded == []
