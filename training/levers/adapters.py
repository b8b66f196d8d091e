"""Adapters of LoRA that are computed with their layer. PEFT makes three tensors as large as the
layer's output beside it: the adapter's output, the same scaled, and the sum; autograd makes two
gradients of the input, and their sum. Here the adapter's products are added to what the layer's
products have written, in the precision of autocast, and rounded once.

Weights and their gradients stay float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from launch.schema.levers import Levers
from training.model import four_bit


def apply(trainer: Any, levers: Levers) -> None:
    if levers.fused_adapters:
        fuse(trainer.model)


def fuse(network: torch.nn.Module) -> None:
    """Compute the adapters of linear layers with their layers."""
    from peft.tuners.lora import LoraLayer

    for module in network.modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), torch.nn.Linear):
            module.forward = FusedForward(module)


class FusedForward:
    """The forward method of a layer with an adapter, for products under autocast."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._plain = layer, layer.forward

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = self._layer
        is_fused = torch.is_autocast_enabled(hidden.device.type) and not layer.merged
        if layer.disable_adapters or not is_fused:
            return self._plain(hidden, *args, **kwargs)
        (name,) = layer.active_adapters
        narrow = torch.get_autocast_dtype(hidden.device.type)
        down, up = layer.lora_A[name].weight.to(narrow), layer.lora_B[name].weight.to(narrow)
        base = layer.get_base_layer()
        out: Any = _Fused.apply(hidden.to(narrow), down, up, base, layer.scaling[name])
        return out


class _Fused(torch.autograd.Function):
    """hidden (..., features), down (rank, features), up (outputs, rank), all of one type."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        base: torch.nn.Linear,
        scale: float,
    ) -> torch.Tensor:
        out, inner = base(hidden), hidden.flatten(0, -2) @ down.T
        rows = out.view(-1, out.size(-1))
        torch.addmm(rows, inner, up.T, alpha=scale, out=rows)
        ctx.save_for_backward(hidden, inner, down, up)
        ctx.base, ctx.scale = base, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, inner, down, up = ctx.saved_tensors
        of_out = gradients[0].flatten(0, -2)
        of_inner = (of_out @ up).mul_(ctx.scale)
        of_down, of_up = of_inner.T @ hidden.flatten(0, -2), (of_out.T @ inner).mul_(ctx.scale)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            rows = of_out @ four_bit.dequantized(ctx.base.weight, of_out.dtype)
            torch.addmm(rows, of_inner, down, out=rows)
            of_hidden = rows.view_as(hidden)
        return of_hidden, of_down, of_up, None, None
