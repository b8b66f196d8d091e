"""Savings and costs of ways of saving memory, from the candidates that were compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.plan.savings import savings
from launch.predict.estimate import Judged
from launch.predict.time.timing import TimeEstimate
from launch.schema.machine import GIB
from launch.schema.plan import MemoryEstimate, Peak
from tests.builders import machine, plan, recipe_of

STRATEGY = plan(recipe_of(), machine(1)).strategy


def judged(gib: float, seconds: float | None, host_gib: float = 2, **strategy: Any) -> Judged:
    peak = Peak("backward", "mm", {"activations": int(gib * GIB)})
    memory = MemoryEstimate(0, 0, 0, peak=peak, host={"imports": int(host_gib * GIB)})
    time = TimeEstimate(seconds, seconds, 0, 0, 0, 0, 0, 16, "") if seconds else None
    return Judged(replace(STRATEGY, **strategy), memory, time, 20 * GIB, None)


def test_the_nearest_with_more_and_with_less_memory_are_named():
    chosen = judged(12, 2.0, activation_checkpointing=True, every_n_layers=2)
    every = judged(6, 2.5, activation_checkpointing=True)
    quarter = judged(15, 1.9, activation_checkpointing=True, every_n_layers=4)
    assert list(savings(chosen, [chosen, judged(18, 1.6), quarter, every])) == [
        "checkpointing 1 layer in 2 instead of checkpointing 1 layer in 4: 3.00 GiB less, 5%"
        " slower",
        "checkpointing 1 layer in 2 instead of checkpointing: 6.00 GiB more, 20% faster",
    ]


def test_host_ram_is_said_where_it_differs():
    both = {"activation_checkpointing": True, "activation_offloading": True}
    chosen = judged(5, 2.2, 3, **both)
    (line,) = savings(chosen, [chosen, judged(6, 2.0, activation_checkpointing=True)])
    assert line == (
        "activations on the host instead of activations on the device: 1.00 GiB less, 10% slower,"
        " 1.00 GiB more host RAM"
    )


def test_candidates_that_differ_in_two_ways_or_were_not_traced_say_nothing():
    chosen = judged(5, 2.2, num_output_chunks=8)
    two_ways = judged(9, 1.0, activation_checkpointing=True)
    assert list(savings(chosen, [chosen, two_ways, judged(7, None)])) == []
    assert list(savings(judged(5, None), [judged(7, 1.0)])) == []
