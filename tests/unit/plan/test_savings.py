"""Savings and costs of ways of saving memory, from the candidates that were compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.plan import facts as plan_facts
from launch.plan.savings import savings
from launch.predict import estimate
from launch.predict.estimate import Judged
from launch.predict.facts import Facts
from launch.predict.models import model_config
from launch.predict.time.timing import TimeEstimate
from launch.schema.machine import GIB
from launch.schema.plan import MemoryEstimate, Peak
from tests import builders
from tests.builders import CACHE, CODE, DATA_FORMAT, machine, plan, recipe_of
from tests.unit.predict.test_estimate import Recorded, asked

STRATEGY = plan(recipe_of(), machine(1)).strategy


def facts_of(shape: str) -> Facts:
    """A plan of which nothing is traced."""
    recipe = recipe_of(data={"train_file": "x", "max_length": 2048}, model={"shape": shape})
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=CACHE)
    return plan_facts.build(recipe, machine(1), config, parameters, family, DATA_FORMAT)


CONTEXT = facts_of("t5-tiny")  # of which the least that a step holds is not known


def judged(gib: float, seconds: float | None, host_gib: float = 2, **strategy: Any) -> Judged:
    peak = Peak("backward", "mm", {"activations": int(gib * GIB)})
    memory = MemoryEstimate(0, 0, 0, peak=peak, host={"imports": int(host_gib * GIB)})
    time = TimeEstimate(seconds, seconds, 0, 0, 0, 0, 0, "") if seconds else None
    rows = strategy.pop("rows", STRATEGY.per_device_train_batch_size)
    candidate = replace(STRATEGY, per_device_train_batch_size=rows).with_levers(**strategy)
    return Judged(candidate, memory, time, 20 * GIB, None)


def test_the_nearest_with_more_and_with_less_memory_are_named():
    chosen = judged(12, 2.0, every_n_layers=2)
    every = judged(6, 2.5, every_n_layers=1)
    quarter = judged(15, 1.9, every_n_layers=4)
    assert list(savings(CONTEXT, chosen, [chosen, judged(18, 1.6), quarter, every])) == [
        "checkpointing 1 layer in 2 instead of checkpointing 1 layer in 4: 3.00 GiB less, 5%"
        " slower",
        "checkpointing 1 layer in 2 instead of checkpointing: 6.00 GiB more, 20% faster",
    ]


def test_host_ram_is_said_where_it_differs():
    both = {"every_n_layers": 1, "activation_offloading": True}
    chosen = judged(5, 2.2, 3, **both)
    (line,) = savings(CONTEXT, chosen, [chosen, judged(6, 2.0, every_n_layers=1)])
    assert line == (
        "activations on the host instead of activations on the device: 1.00 GiB less, 10% slower,"
        " 1.00 GiB more host RAM"
    )


def test_candidates_that_differ_in_two_ways_or_were_not_traced_say_nothing():
    chosen = judged(5, 2.2, num_output_chunks=8)
    two_ways = judged(9, 1.0, every_n_layers=1)
    assert list(savings(CONTEXT, chosen, [chosen, two_ways, judged(7, None)])) == []
    assert list(savings(CONTEXT, judged(5, None), [judged(7, 1.0)])) == []


def test_a_traced_step_is_compared_with_none_for_what_it_does_not_save():
    facts = builders.changed(builders.facts_of(asked(), machine(1)), traces=Recorded())
    strategy = plan(asked(), machine(1)).strategy
    chosen = estimate.judge(facts, strategy.with_levers(every_n_layers=1))
    words = [line.partition(":")[0] for line in savings(facts, chosen, [chosen])]
    assert words == ["checkpointing instead of no checkpointing"]
