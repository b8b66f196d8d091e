"""By tokens no micro-batch takes more than the plan says: of few long rows, of many short ones,
traced and real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import BATCH, Log
from tests import real_steps
from tests.modes.trace.test_trace import peak_bytes, recipe_of, whole_step
from training.trace.cuda_semantics import Target

# tokens of the longest row; of those in a micro-batch; micro-steps of a step
LONGEST, ROWS, PARTS = 64, 3, 8
SHAPES = [(ROWS, LONGEST), (4, 48), (6, 32), (12, 16), (ROWS * PARTS, LONGEST // PARTS)]
SECTIONS = ("forward", "backward", "optimizer")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", {}),
    "llama, eager": ("llama-tiny", {"model": {"attn_implementation": "eager"}}),
    "llama, checkpointing, loss in chunks": (
        "llama-tiny",
        {"training": {"activation_checkpointing": True, "num_output_chunks": 4}},
    ),
    "t5, autocast": ("t5-tiny", {"training": {"bf16": True}}),
}


def planned(name: str) -> tuple[Recipe, Plan]:
    shape, sections = CASES[name]
    training = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": PARTS}
    return recipe_of(
        shape, **{**sections, "training": {**training, **sections.get("training", {})}}
    )


def traced(recipe: Recipe, plan: Plan, rows: int, length: int, target: Target | None = None) -> int:
    log = whole_step(recipe, plan, (length, length), True, BATCH, target)
    strategy = replace(plan.strategy, per_device_train_batch_size=rows)
    of_rows = real_steps.batch(recipe, replace(plan, strategy=strategy), length, True)
    targets = -(-len(of_rows["target_ids"]) // strategy.levers.num_output_chunks)
    return max(peak_bytes(log, rows, section, targets) for section in SECTIONS)


@pytest.mark.parametrize("attention", ["varlen_attn", "flash_attention_2"])
def test_short_flattened_rows_are_long_ones_of_more_documents(attention, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, plan = recipe_of("llama-tiny", training={"bf16": True, "num_output_chunks": 2})
    plan = replace(plan, strategy=plan.strategy.with_levers(attn_implementation=attention))

    def of(length: int, documents: int) -> Log:
        target = Target("8.6", documents=1)
        log = whole_step(recipe, plan, (length, length), True, BATCH, target)
        return log.of_documents(documents)

    short, one, dense = of(LONGEST // PARTS, 1), of(LONGEST, 1), of(LONGEST, PARTS)
    for section in SECTIONS:
        expected, found = (
            peak_bytes(log, rows, section, 40)
            for log, rows in ((short, ROWS * PARTS), (dense, ROWS))
        )
        assert found == pytest.approx(expected, rel=1e-3)
    assert peak_bytes(one, ROWS, "backward", 40) < peak_bytes(dense, ROWS, "backward", 40)


@pytest.mark.parametrize("card", [pytest.param(None, marks=pytest.mark.campaign), "8.6"])
@pytest.mark.parametrize("name", CASES)
def test_between_the_longest_rows_and_the_most_none_is_higher(name, card, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, plan = planned(name)
    found = {
        shape: traced(recipe, plan, *shape, Target(card) if card else None) for shape in SHAPES
    }
    ends = max(found[SHAPES[0]], found[SHAPES[-1]])
    assert max(found.values()) <= ends * 1.001, found


@pytest.mark.parametrize("name", ["llama, eager", "t5, autocast"])
def test_real_steps_of_every_shape_stay_below_what_is_planned_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, plan = planned(name)
    bound = max(traced(recipe, plan, *shape) for shape in (SHAPES[0], SHAPES[-1]))
    highest = 0
    for rows, length in SHAPES[::2]:
        real = _real_peak_bytes(recipe, plan, rows, length)
        assert real <= bound * 1.002, (rows, length)
        highest = max(highest, real)
    assert highest >= bound * 0.99, "the bound is that of a shape that there is"


def _real_peak_bytes(recipe: Recipe, plan: Plan, rows: int, length: int) -> int:
    """Of two steps of micro-batches of so many rows."""
    strategy = replace(
        plan.strategy, per_device_train_batch_size=rows, gradient_accumulation_steps=2
    )
    trainer = real_steps.trainer(recipe, replace(plan, strategy=strategy), length, True, steps=2)
    return real_steps.peak_bytes(trainer)
