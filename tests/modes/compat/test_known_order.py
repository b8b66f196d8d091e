"""Once the rows are tokenised, a plan is made for the micro-batches that the run will have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.data.worker import WORKER
from launch.plan import facts as plan_facts
from launch.predict import estimate
from launch.predict.facts import Facts
from launch.predict.memory import traced_steps
from launch.predict.memory.largest_batches import LargestBatches
from launch.predict.models import model_config
from launch.predict.traces import Traces
from launch.schema.plan import DataFormat, Strategy
from tests import builders
from tests.builders import CODE, machine, recipe_of
from tests.unit.predict.memory.test_largest_batches import write
from training.data.batches import NumberedRows

ROWS, BATCH = 90, 6
DATA = DataFormat("prompt_response", {"prompt": "prompt", "response": "response"}, "parquet", "")


def facts_of(folder: Path, attention: str, **data: Any) -> Facts:
    """The facts of rows that lie in a folder."""
    recipe = recipe_of(
        model={"shape": "llama-tiny", "dtype": "bfloat16", "attn_implementation": attention},
        data={"train_file": "x", "max_length": 96, **data},
        training={"bf16": True, "num_train_epochs": 1, "per_device_train_batch_size": BATCH},
        launch={"mode": "single_gpu"},
    )
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=builders.CACHE)
    facts = plan_facts.build(recipe, machine(gpus=1), config, parameters, family, DATA)
    rows = NumberedRows(folder / "train.arrow")
    lengths = rows.lengths()
    targets = sorted((int((row.labels[1:] >= 0).sum()) for row in rows), reverse=True)
    counts = {"rows": ROWS, "dropped": 0, "bad": 0, "tokens": int(lengths[:, 0].sum())}
    counts |= {"lengths": lengths.tolist(), "most_targets": targets, "target_tokens": sum(targets)}
    longest = int(lengths.max())
    return builders.changed(
        facts,
        counts=counts,
        lengths=(longest, longest),
        largest_batches=LargestBatches(folder, folder / "kept", ROWS),
        traces=Traces(recipe, facts.model.size, facts.model.lora_targets, folder / "traces"),
    )


def candidate_of(attention: str) -> Strategy:
    chosen = builders.plan(
        recipe_of(training={"bf16": True}, launch={"mode": "single_gpu"}), machine(gpus=1)
    ).strategy
    return replace(
        chosen.with_levers(attn_implementation=attention, logits_at_targets=True),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        mixed_precision="bf16",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    write(made, "train", ROWS, 2, is_pair=False)
    return made


@pytest.mark.parametrize("attention", ["sdpa", "varlen_attn"])
def test_a_plan_is_for_the_largest_micro_batch_of_the_run(folder, attention):
    facts, candidate = facts_of(folder, attention), candidate_of(attention)
    assert facts.traces is not None
    with WORKER:
        facts.fetch([candidate])
        known = estimate.judge(facts, candidate)
        steps = traced_steps.list_steps(facts, candidate)
        bound = estimate.judge(builders.changed(facts, largest_batches=None), candidate)
        assert known.memory.peak is not None
        assert bound.memory.peak is not None
        # the same as for rows that are all as long as those of that micro-batch
        same = []
        for step in steps:
            (size,) = step.sizes
            each = -(-size.targets // BATCH)
            alike = {"most_targets": [size.targets - each * (BATCH - 1), *[each] * (BATCH - 1)]}
            assert facts.rows.counts is not None
            of_one_length = builders.changed(
                facts,
                largest_batches=None,
                is_ragged=size.is_padded or attention == "varlen_attn",
                lengths=step.question.lengths,
                counts={**facts.rows.counts, **alike},
            )
            of_one_length.fetch([candidate])
            same.append(estimate.judge(of_one_length, candidate).memory.step_allocated_bytes)
    most = max(same)
    tolerance = 0 if attention == "sdpa" else 8 / 96 * most  # lengths are a multiple of 8
    assert most - tolerance <= known.memory.step_allocated_bytes <= most
    assert known.memory.step_allocated_bytes < bound.memory.step_allocated_bytes
    first = known.phases.device.first_step
    assert first is not None
    assert first.allocated_bytes <= known.memory.step_allocated_bytes


def test_a_micro_batch_without_padding_is_planned_without_a_mask(tmp_path):
    """Rows of two lengths have the most targets in a batch without padding, which gets no mask."""
    write(tmp_path, "train", ROWS, 2, is_pair=False, lengths=(40, 88))
    facts, candidate = facts_of(tmp_path, "sdpa"), candidate_of("sdpa")
    candidate = replace(candidate, per_device_train_batch_size=2)
    with WORKER:
        facts.fetch([candidate])
        steps = traced_steps.list_steps(facts, candidate)
        assert [step.question.is_padded for step in steps] == [True, False]
        padded, full = (step.sizes[0] for step in steps)
        assert full.targets > padded.targets
        assert (padded.source, padded.is_padded) == (full.source, True) != (88, full.is_padded)
        facts.fetch_steps(step.question for step in steps)
        traces = [traced_steps.trace(facts, step, candidate) for step in steps]
    highest = [trace.peak(2, None).allocated_bytes for trace in traces if trace]
    most = facts.trace(candidate)
    assert most is not None
    assert max(highest) < most.peak(2, None).allocated_bytes


@pytest.mark.parametrize(
    ("values", "levers", "words"),
    [
        ({"counts": None}, {}, "not tokenised yet"),
        ({"continues_another": True}, {}, "continues another"),
        ({}, {"batch_by_tokens": True}, "batch_by_tokens"),
    ],
)
def test_where_the_order_is_not_known_a_bound_counts_and_the_plan_says_why(
    folder, values, levers, words
):
    facts = builders.changed(facts_of(folder, "sdpa"), **values)
    candidate = candidate_of("sdpa").with_levers(**levers)
    reason = facts.no_order(candidate)
    assert reason is not None
    assert words in reason
    most = facts.most_targets(candidate)
    assert not most.sizes
    length = most.length
    counted = (
        sum(facts.rows.counts["most_targets"][:BATCH]) if facts.rows.counts else BATCH * length
    )
    assert most.count(BATCH) == min(counted, BATCH * length)


def test_all_epochs_count_and_each_division_has_its_own_largest_micro_batch(folder):
    facts, candidate = facts_of(folder, "sdpa"), candidate_of("sdpa")
    most = [
        facts.most_targets(replace(candidate, per_device_train_batch_size=rows)).count(rows)
        for rows in (1, 2, 6)
    ]
    assert most == sorted(most)
    targets = np.array(facts.rows.counts["most_targets"]) if facts.rows.counts else np.empty(0)
    assert most[0] == targets[0]  # the row with most is trained alone
    assert most[2] < targets[:6].sum()
    more = facts.recipe.training.model_copy(update={"num_train_epochs": 40.0})
    longer = builders.changed(facts, recipe=facts.recipe.model_copy(update={"training": more}))
    assert longer.most_targets(candidate).count(6) > most[2]
