"""What ran out of memory rules out what would take as much of it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch import evidence
from launch.estimate import CLEARLY_BELOW, Exceeded, RanOut
from launch.rundir import RunDir
from launch.schema import GIB, MemoryEstimate
from tests.builders import machine, plan, wish

STRATEGY = plan().strategy
HALF = replace(STRATEGY, per_device_train_batch_size=STRATEGY.per_device_train_batch_size // 2)
STEP = RanOut("device", "step", STRATEGY, 10 * GIB)


def test_only_what_takes_clearly_less_is_left():
    assert STEP.rules_out(HALF, int(CLEARLY_BELOW * 10 * GIB) - 1, is_traced=True) is None
    words = STEP.rules_out(HALF, int(9.9 * GIB), is_traced=True)
    assert words == "9.90 GiB, and a plan of 10.00 GiB ran out of memory in step"


def test_where_nothing_else_is_left_fewer_samples_are_less_if_nothing_else_is_given_back():
    def ruled_out(candidate):
        return STEP.rules_out(candidate, 11 * GIB, is_traced=True, fewer_is_less=True)

    assert ruled_out(HALF) is None
    assert ruled_out(STRATEGY)
    recomputing = replace(STEP, candidate=replace(STRATEGY, gradient_checkpointing=True))
    assert recomputing.rules_out(HALF, 11 * GIB, is_traced=True, fewer_is_less=True)
    assert replace(STEP, of="host").rules_out(HALF, 11 * GIB, is_traced=True, fewer_is_less=True)


def test_without_a_trace_a_smaller_micro_batch_or_checkpointing_is_less():
    assert STEP.rules_out(STRATEGY, 10 * GIB, is_traced=False)
    assert STEP.rules_out(HALF, 10 * GIB, is_traced=False) is None
    assert STEP.rules_out(replace(STRATEGY, gradient_checkpointing=True), 10 * GIB, is_traced=False) is None


def test_an_evaluation_that_ran_out_rules_out_its_batch_and_not_the_training():
    failed = RanOut("device", "evaluation", replace(STRATEGY, per_device_eval_batch_size=8), 10 * GIB)
    assert failed.rules_out(replace(STRATEGY, per_device_eval_batch_size=4), 10 * GIB, is_traced=True) is None
    assert failed.rules_out(replace(STRATEGY, per_device_eval_batch_size=8), 1 * GIB, is_traced=True)
    alone = RanOut("device", "evaluation", replace(STRATEGY, per_device_eval_batch_size=1), 10 * GIB)
    assert alone.rules_out(alone.candidate, 10 * GIB, is_traced=True), "one sample cannot be halved"


def test_what_ran_out_of_the_host_says_nothing_of_the_card():
    exceeded = Exceeded(ran_out=(replace(STEP, of="host"),))
    states = MemoryEstimate(10 * GIB, 0, 0)
    assert exceeded.rules_out("device", STRATEGY, 10 * GIB, states) is None
    assert exceeded.rules_out("host", STRATEGY, 10 * GIB, states)


@pytest.mark.parametrize("section", ["save", "export"])
def test_a_card_that_ran_out_in_writing_needs_other_states_and_no_other_batch(section):
    recipe = wish(training={"per_device_train_batch_size": 8})
    two = machine(gpus=2)
    first = plan(recipe, two)
    assert first.strategy.mode == "dual_gpu_nccl"
    failed = RanOut("device", section, first.strategy, first.estimate.model_state_bytes)
    again = plan(recipe, two, exceeded=Exceeded(ran_out=(failed,)))
    assert again.strategy.zero_stage == 1
    assert again.strategy.per_device_train_batch_size == 8
    assert again.strategy.gradient_checkpointing == first.strategy.gradient_checkpointing
    assert f"ran out of memory in {section}" in " ".join(again.rejected)


@pytest.mark.parametrize("section", ["step", "evaluation"])
def test_the_plan_after_it_holds_the_effective_batch(section):
    recipe = wish(training={"per_device_train_batch_size": 8, "per_device_eval_batch_size": 6})
    first = plan(recipe)
    failed = RanOut("device", section, first.strategy, first.estimate.device_bytes)
    again = plan(recipe, exceeded=Exceeded(ran_out=(failed,)))
    assert again.strategy.effective_batch_size == first.strategy.effective_batch_size
    batches = again.strategy.per_device_train_batch_size, again.strategy.per_device_eval_batch_size
    assert batches == ((8, 3) if section == "evaluation" else batches)
    assert section == "evaluation" or batches[0] < 8 or again.strategy.gradient_checkpointing


def test_the_next_start_of_an_unfinished_run_knows_what_ran_out(tmp_path):
    (tmp_path / "tiny" / "20261121-000000").mkdir(parents=True)
    run = RunDir(tmp_path / "tiny" / "20261121-000000")
    assert evidence.of_unfinished(tmp_path, "tiny") == Exceeded()
    run.plan_file.write_text("{}")
    evidence.write(run, Exceeded(ran_out=(STEP,)))
    assert evidence.of_unfinished(tmp_path, "tiny") == Exceeded(ran_out=(STEP,))
