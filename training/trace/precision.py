"""The precision in which an engine computes a model that is recorded."""

from dataclasses import replace
from typing import Any

import torch

from launch.schema.plan import Strategy
from training.compat import accelerate_private, torch_private, transformers_private
from training.model import four_bit


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
    for _, parameter in four_bit.named_numbers(network):
        parameter.data = parameter.data.to(dtype)
    for module in _fsdp2_modules(network):
        module.register_forward_hook(_float32_output)
    return strategy


def _fsdp2_modules(network: transformers_private.Network) -> list[torch.nn.Module]:
    """The modules that Accelerate shards on their own: the layers, the embeddings, the final
    norm."""
    layer_classes = transformers_private.layer_classes(network)
    outer = [
        accelerate_private.final_norm(network),
        *(getattr(network, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")),
    ]
    layers = (module for module in network.modules() if type(module).__name__ in layer_classes)
    return [*layers, *(module for module in outer if module is not None)]


def _float32_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Cast each floating tensor of a module's output, as MixedPrecisionPolicy.output_dtype does."""
    return torch_private.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.float() if tensor.is_floating_point() else tensor,
        output,
    )
