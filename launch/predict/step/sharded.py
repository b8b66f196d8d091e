"""Rewrite the step of one process as the step of one rank of DDP, ZeRO or FSDP2.

The log of a plain step has the allocations of the model. Each engine adds its buffers, holds parts
of the states, and frees gradients at another time.
"""

from typing import Literal

from launch.predict.step import fsdp2, zero
from launch.predict.step.rewrite_log import Landmarks, Rewriting, landmarks, ready
from launch.predict.step.streamed import stream
from launch.schema.plan import Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Log

Turn = Literal["first", "steady", "after evaluation"]  # position of a step in its run


def special_turns(strategy: Strategy) -> tuple[Turn, ...]:
    """The turns in which a card's rank has other blocks than in a steady step."""
    if strategy.device != "cuda":
        return ()
    if strategy.launch_mode.engine == "fsdp2":
        return ("after evaluation",)
    return ("first",) if strategy.launch_mode.zero_stage == 3 else ()


def shard_step(
    log: Log,
    recipe: Recipe,
    strategy: Strategy,
    tied: bool,
    bucket_elements: int,
    turn: Turn = "steady",
) -> Log:
    """The same step on one rank's device, from the log of a model that
    training.trace.stand_ins has cast.

    `tied`: the output layer is the input embedding. `bucket_elements`: the size of DeepSpeed's
    reduce bucket. Work is not changed. Blocks that outlive a step have the same numbers in each
    `turn`."""
    rewriting, marks = Rewriting(log), landmarks(log, tied)
    engine = strategy.launch_mode.engine
    if engine == "ddp":
        _ddp(rewriting, marks)
    elif engine == "fsdp2":
        fsdp2.rewrite(rewriting, marks, recipe, strategy, turn == "after evaluation")
    elif engine == "deepspeed":
        zero.rewrite(rewriting, marks, strategy, bucket_elements, turn == "first")
    return stream(rewriting.result(), strategy.levers)


def _ddp(rewriting: Rewriting, marks: Landmarks) -> None:
    """Add buckets as large as all gradients, for the whole run. In the backward that reduces, a
    complete gradient moves into its bucket and becomes a view of it. Source: torch reducer.cpp with
    gradient_as_bucket_view."""
    total = sum(gradient.bytes for gradient in marks.gradients)
    rewriting.born(total, "communication", "gradient buckets", 0)
    for gradient in marks.gradients:
        rewriting.change(gradient.block, kind="gradients")
        rewriting.dies(
            gradient.block, ready(rewriting.log, marks, gradient, len(marks.backwards) - 1)
        )
