"""Rewrite the step of one process as the step of one rank of DDP, ZeRO or FSDP2.

The log of a plain step has the allocations of the model. Each engine adds its buffers, holds parts
of the states, and frees gradients at another time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from launch.schema.plan import Strategy
from launch.schema.recipe import Recipe
from training.compat import accelerate_private, transformers_private
from training.compat.torch_private import tree_map_only
from training.compat.transformers_private import Network
from training.trace import sharded_fsdp2, sharded_zero
from training.trace.recorder import Log
from training.trace.rewrite_log import Landmarks, Rewriting, landmarks, ready

Turn = Literal["first", "steady", "after evaluation"]  # of a step in its run


def as_computed(network: torch.nn.Module, strategy: Strategy) -> Strategy:
    """Cast a model without weights to the precision in which the engine computes, and return the
    strategy for its trace.

    Under mixed precision DeepSpeed casts the whole model and leaves autocast out. FSDP2 gathers
    every parameter in that precision, inside autocast, and casts the outputs of its groups to
    float32 (setup.autocast_fsdp2). The other engines keep the parameters, and autocast casts.
    Source: deepspeed 0.19 engine.py _configure_distributed_model; accelerate 1.15
    fsdp2_prepare_model."""
    if strategy.mixed_precision == "no" or strategy.launch_mode.is_whole:
        return strategy
    dtype = torch.bfloat16 if strategy.mixed_precision == "bf16" else torch.float16
    if strategy.launch_mode.engine == "deepspeed":
        network.to(dtype)
        return replace(strategy, mixed_precision="no")
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in _fsdp2_modules(network):
        module.register_forward_hook(_float32_output)
    return strategy


def _fsdp2_modules(network: Network) -> list[torch.nn.Module]:
    """The modules that Accelerate shards on their own: the layers, the embeddings, the final
    norm."""
    layer_classes = transformers_private.layer_classes(network)
    outer = [accelerate_private.final_norm(network)]
    for end in ("input", "output"):
        outer.append(getattr(network, f"get_{end}_embeddings", lambda: None)())
    layers = (module for module in network.modules() if type(module).__name__ in layer_classes)
    return [*layers, *(module for module in outer if module is not None)]


def _float32_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Cast each floating tensor of a module's output, as MixedPrecisionPolicy.output_dtype does."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.float() if tensor.is_floating_point() else tensor,
        output,
    )


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
    """The same step on one rank's device, from the log of a model that as_computed() has cast.

    `tied`: the output layer is the input embedding. `bucket_elements`: the size of DeepSpeed's
    reduce bucket. Work is not changed. Blocks that outlive a step have the same numbers in each
    `turn`."""
    if strategy.launch_mode.engine not in ("ddp", "fsdp2", "deepspeed"):
        return log
    rewriting, marks = Rewriting(log), landmarks(log, tied)
    if strategy.launch_mode.engine == "ddp":
        _ddp(rewriting, marks)
    elif strategy.launch_mode.engine == "fsdp2":
        sharded_fsdp2.rewrite(rewriting, marks, recipe, strategy, turn == "after evaluation")
    else:
        sharded_zero.rewrite(rewriting, marks, strategy, bucket_elements, turn == "first")
    return rewriting.result()


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
