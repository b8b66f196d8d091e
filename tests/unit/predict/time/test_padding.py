"""The share of padding that a plan tells is the one that training has."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from launch.predict.time import padding
from launch.report import first_screen, plan_lines
from launch.schema.data_section import DataSection
from tests import builders
from training.data.encode import CacheCounts
from training.data.sample_order import SampleOrder, TokenBudget

pytestmark = pytest.mark.unit


def rows(count: int, encoder_decoder: bool) -> np.ndarray:
    """Tokens of source and target, as of chat: many short rows, few long ones."""
    drawn = np.random.default_rng(5).gamma(1.5, 40, (count, 2)).astype(np.int32).clip(2, 512)
    return drawn if encoder_decoder else np.repeat(drawn[:, :1], 2, axis=1)


def counted(lengths: np.ndarray) -> dict[str, Any]:
    counts = CacheCounts()
    for source, target in lengths.tolist():
        counts.add([{"input_ids": [1] * source, "labels": [1] * target}])
    return vars(counts)


@pytest.mark.parametrize("encoder_decoder", [False, True])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("is_by_tokens", [False, True])
@pytest.mark.parametrize("cut", [(16, 1, 1), (4, 8, 1), (3, 2, 2), (1, 24, 2)])
def test_the_plan_tells_the_padding_that_an_epoch_has(
    encoder_decoder, is_grouped, is_by_tokens, cut
):
    lengths = rows(6000, encoder_decoder)
    longest = tuple((-(-lengths.max(axis=0) // 8) * 8).tolist())
    budget = (
        TokenBudget(lambda: lengths, cut[0] * longest[0], cut[0] * longest[1], 8)
        if is_by_tokens
        else None
    )
    real = computed = micro_steps = 0
    for rank in range(cut[2]):
        order = SampleOrder(
            6000, *cut, rank, 1, lengths=(lambda: lengths) if is_grouped else None, budget=budget
        )
        batches = list(order)
        micro_steps = sum(batch is not None for batch in batches)
        for batch in filter(None, batches):
            real += lengths[batch].sum()
            computed += (-(-lengths[batch].max(axis=0) // 8) * 8).sum() * len(batch)
    strategy = replace(
        builders.plan(builders.recipe_of(), builders.machine()).strategy,
        per_device_train_batch_size=cut[0],
        gradient_accumulation_steps=cut[1],
        num_processes=cut[2],
    ).with_levers(batch_by_tokens=is_by_tokens)
    data = DataSection(train_file="x", group_by_length=is_grouped)
    padded = padding.compute(counted(lengths), strategy, 8, data, longest)
    assert padded is not None
    assert padded.share == pytest.approx(1 - real / computed, abs=0.02)
    assert padded.rows == 6000
    mean = padding.mean_split(counted(lengths), strategy, 8, data, longest)
    assert mean is not None
    micro_batches = micro_steps * cut[2]
    assert mean.rows * sum(longest) == pytest.approx(computed / micro_batches, rel=0.06)
    if is_by_tokens:
        assert padded.micro_steps == pytest.approx(micro_steps / order.steps_per_epoch, rel=0.06)
        mean = padding.mean_split(counted(lengths), strategy, 8, data, longest)
        assert mean is not None
        assert mean.micro_steps == pytest.approx(padded.micro_steps, rel=0.06)
        assert mean.rows * mean.micro_steps * sum(longest) * cut[2] == pytest.approx(
            computed / order.steps_per_epoch, rel=0.06
        )


def test_lengths_that_are_kept_are_spread_over_the_whole_file():
    lengths = np.stack([np.arange(50_000), np.arange(50_000)], axis=1)
    counts = CacheCounts()
    for source, _ in lengths.tolist():
        counts.add([{"input_ids": range(source), "labels": range(0)}])
    assert 2048 <= len(counts.lengths) < 4096
    assert np.allclose(np.diff([source for source, _ in counts.lengths]), counts.stride)
    assert counts.lengths[-1][0] > 50_000 - 2 * counts.stride


def test_a_packed_plan_says_what_a_step_covers_before_and_after_tokenising():
    recipe = builders.recipe_of(data={"train_file": "x", "max_length": 128, "packing": True})
    plan = builders.plan(recipe, builders.machine())
    words = "\n".join(plan_lines.full_text(recipe, builders.machine(), plan))
    assert "a step covers 32 packed sequences of at most 128 tokens, instead of 32 rows" in words
    assert plan.num_samples is None, "file rows are no packed sequences"
    counts = {
        **counted(rows(3000, False)),
        "rows": 900,
        "documents": 3000,
        "tokens": 112_000,
        "longest_input": 128,
    }
    packed = padding.compute(counts, plan.strategy, 1, recipe.data, (128, 128))
    assert packed is not None
    assert packed.share == pytest.approx(1 - 112_000 / (900 * 128))
    words = "\n".join(
        plan_lines.full_text(recipe, builders.machine(), replace(plan, rows=3000, padding=packed))
    )
    assert (
        "a step covers 32 packed sequences with about 107 rows and 3,982 tokens, instead of 32 rows"
        in words
    )
    assert "epochs of 29 steps" in words
    assert (
        f"  padding    3% of the tokens that a step computes; {packed.at_random:.0%} if rows were"
        " not packed" in words
    )


def test_a_plan_with_much_padding_names_what_leaves_less():
    recipe = builders.recipe_of()
    plan = builders.plan(recipe, builders.machine())
    random = padding.compute(counted(rows(3000, False)), plan.strategy, 1, recipe.data, (128, 128))
    assert random is not None
    line = plan_lines.padding(plan, random)
    assert random.by_length < 0.1
    assert line.startswith(f"{random.share:.0%} of the tokens that a step computes")
    assert line.endswith(
        f"; --data.group_by_length=true leaves {random.by_length:.0%}, in steps of one length"
    )


def test_a_plan_by_tokens_says_what_bounds_a_micro_batch():
    recipe = builders.recipe_of(
        data={"train_file": "x", "max_length": 128, "batch_by_tokens": True}
    )
    plan = builders.plan(recipe, builders.machine())
    words = "\n".join(plan_lines.full_text(recipe, builders.machine(), plan))
    assert "16 per device x 2 accumulation x 1 process = 32 effective" in words
    assert (
        "by tokens: a micro-batch has at most 2,048 tokens, padding included, as 16 of the longest"
        " rows (128) have" in words
    )
    padded = padding.compute(
        counted(rows(3000, False).clip(2, 128)), plan.strategy, 1, recipe.data, plan.lengths
    )
    assert padded is not None
    assert padded.micro_steps is not None
    words = "\n".join(
        plan_lines.full_text(recipe, builders.machine(), replace(plan, padding=padded))
    )
    each = 32 / padded.micro_steps
    assert (
        f"{padded.micro_steps:.1f} micro-steps a step on average, of {each:.1f} rows each, instead"
        " of 2" in words
    )
    assert (
        f"padding    {padded.share:.0%} of the tokens that a step computes; {padded.at_random:.0%}"
        " if rows came" in words
    )
    whole = replace(
        plan,
        strategy=replace(
            plan.strategy, per_device_train_batch_size=32, gradient_accumulation_steps=1
        ),
    )
    words = "\n".join(plan_lines.full_text(recipe, builders.machine(), whole))
    assert "data.batch_by_tokens changes nothing: all rows of a step are one micro-batch" in words


def test_packing_and_a_cut_by_tokens_are_not_both():
    with pytest.raises(
        ValueError, match="packing leaves nothing for batch_by_tokens to do; set one of the two to"
    ):
        DataSection(train_file="x", packing=True, batch_by_tokens=True)


def test_the_steps_of_an_epoch_are_those_of_the_rows_that_are_trained():
    """Rows without a target and bad rows are not; before tokenising, the plan says so."""
    recipe = builders.recipe_of(data={"train_file": "x", "max_bad_rows": 9})
    plan = replace(builders.plan(recipe, builders.machine()), rows=3000)
    batch, epochs = plan.strategy.effective_batch_size, recipe.training.num_train_epochs
    assert plan.total_steps(recipe) == epochs * -(-3000 // batch)
    words = "\n".join(plan_lines.full_text(recipe, builders.machine(), plan))
    assert "3,000 rows (bad rows included)" in words
    words = "\n".join(first_screen.lines(recipe, builders.machine(), plan, datetime(2026, 1, 1)))
    assert "3,000 rows (bad rows included)" in words
    counts = {**counted(rows(2800, False)), "rows": 2800, "tokens": 112_000, "longest_input": 128}
    trained = padding.compute(counts, plan.strategy, 1, recipe.data, (128, 128))
    plan = replace(plan, padding=trained, rows_left_out=200)
    assert plan.total_steps(recipe) == epochs * -(-2800 // batch)
    assert "bad rows included" not in "\n".join(
        plan_lines.full_text(recipe, builders.machine(), plan)
    )
