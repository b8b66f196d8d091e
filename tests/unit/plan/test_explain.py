"""The table of candidates, and the reasons of a changed batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.plan import explain
from launch.predict.estimate import Judged
from launch.predict.time.timing import TimeEstimate
from launch.schema.machine import GIB
from launch.schema.plan import MemoryEstimate, Peak
from tests.builders import facts_of, machine, plan, recipe_of

RECIPE = recipe_of(training={"per_device_train_batch_size": 8})
STRATEGY = plan(RECIPE, machine(1)).strategy


def judged(gib: float, seconds: float | None, misses: str | None = None, **strategy: Any) -> Judged:
    peak = Peak("backward", "mm", {"activations": int(gib * GIB)}) if gib else None
    time = TimeEstimate(seconds, seconds, 0, 0, 0, 0, 0, "") if seconds else None
    candidate = replace(STRATEGY, **strategy)
    return Judged(candidate, MemoryEstimate(0, 0, 0, peak=peak), time, 20 * GIB, misses)


def test_what_an_untraced_candidate_holds_is_a_bound():
    chosen, bound, unknown = judged(12, 2.0), judged(30, None), judged(0, None)
    _, *lines = explain.table([(chosen, "chosen"), (bound, "does not fit"), (unknown, "no")])
    assert ["  12.00 GiB" in line for line in lines] == [True, False, False]
    assert ">= 30.00 GiB" in lines[1]
    assert lines[2].split()[-3:] == ["?", "?", "no"]


@pytest.mark.parametrize(
    ("losers", "said"),
    [
        ([], "the fastest by prediction"),
        ([judged(30, None, "A"), judged(25, 1.0, "B")], "8 samples at once need A"),
        (
            [judged(30, None, "A", mode="deepspeed_zero3", num_processes=2), judged(25, 1, "B")],
            "8 samples at once need B",
        ),
        (
            [judged(30, None, "A", mode="deepspeed_zero3", num_processes=2)],
            "8 samples at once need A with deepspeed_zero3 x2",
        ),
    ],
)
def test_the_reason_of_a_batch_is_that_of_the_chosen_mode_or_names_the_other(losers, said):
    chosen = judged(12, 2.0, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    facts = facts_of(RECIPE, machine(1))
    verdicts = [(each, "does not fit") for each in losers]
    changes = explain.changes(facts, chosen.candidate, verdicts)
    (reason,) = {
        change.reason.partition(";")[0]
        for change in changes
        if change.key == "training.per_device_train_batch_size"
    }
    assert reason == said


def test_fewer_processes_than_were_asked_for_are_the_reason_of_more_accumulation():
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    facts = facts_of(recipe_of(training=batch), machine(1))
    chosen = judged(12, 2.0, gradient_accumulation_steps=2)
    (change,) = explain.changes(facts, chosen.candidate, [])
    assert (change.key, change.effective) == ("training.gradient_accumulation_steps", "2")
    assert change.reason == "1 process instead of 2: the effective batch stays 16"
