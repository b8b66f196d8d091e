"""Adapters of LoRA that are computed with their layer. PEFT makes three tensors as large as the
layer's output beside it: the adapter's output, the same scaled, and the sum; autograd makes two
gradients of the input, and their sum. Here the adapter's products are added to what the layer's
products have written, in the precision of autocast, and rounded once.

Weights and their gradients stay float32."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from launch.schema.levers import Levers
from training.model import four_bit

aten = torch.ops.aten


def apply(trainer: Any, levers: Levers) -> None:
    if levers.fused_adapters:
        fuse(trainer.model)


def fuse(network: torch.nn.Module) -> None:
    """Compute the adapters of linear layers with their layers."""
    from peft.tuners.lora import LoraLayer

    for parent in network.modules():
        fused = [
            _FusedForward(module)
            for module in parent.children()
            if isinstance(module, LoraLayer)
            and isinstance(module.get_base_layer(), torch.nn.Linear)
        ]
        if fused:
            parent.register_forward_pre_hook(partial(_cast_weights, fused))


def _cast_weights(fused: "Sequence[_FusedForward]", parent: torch.nn.Module, args: Any) -> None:
    """Cast the adapters' weights of all layers of a module at once."""
    weights = [weight for each in fused for weight in each.weights()]
    device, dtype = weights[0].device.type, weights[0].dtype
    narrow = torch.get_autocast_dtype(device)
    if not torch.is_autocast_enabled(device) or dtype is narrow:
        return
    with torch.no_grad():
        casts = [torch.empty_like(weight, dtype=narrow) for weight in weights]
        aten._foreach_copy_(casts, weights)
    for each, down, up in zip(fused, casts[::2], casts[1::2], strict=True):
        each.casts = down, up


class _FusedForward:
    """The forward method of a layer with an adapter, for products under autocast."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._plain = layer, layer.forward
        self.casts: tuple[torch.Tensor, torch.Tensor] | None = None  # for the next call
        layer.forward = self

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        (name,) = self._layer.active_adapters
        return self._layer.lora_A[name].weight, self._layer.lora_B[name].weight

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = self._layer
        is_fused = torch.is_autocast_enabled(hidden.device.type) and not layer.merged
        if layer.disable_adapters or not is_fused:
            return self._plain(hidden, *args, **kwargs)
        (scale,), weights = layer.scaling.values(), self.weights()
        narrow = torch.get_autocast_dtype(hidden.device.type)
        down, up = self.casts or [weight.detach().to(narrow) for weight in weights]
        self.casts = None
        base, hidden = layer.get_base_layer(), hidden.to(narrow)
        out: Any = _Fused.apply(hidden, *weights, down, up, base, scale)
        return out


class _Fused(torch.autograd.Function):
    """hidden (..., features), down (rank, features), up (outputs, rank), all of one type; and the
    weights that `down` and `up` are casts of."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        down_weight: torch.Tensor,
        up_weight: torch.Tensor,
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
        of_inner = _scaled_product(of_out, up, ctx.scale)
        of_down = of_inner.T @ hidden.flatten(0, -2)
        of_up = _scaled_product(of_out.T, inner, ctx.scale)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            rows = of_out @ four_bit.dequantized(ctx.base, of_out.dtype)
            torch.addmm(rows, of_inner, down, out=rows)
            of_hidden = rows.view_as(hidden)
        return of_hidden, of_down, of_up, None, None, None, None


def _scaled_product(rows: torch.Tensor, columns: torch.Tensor, scale: float) -> torch.Tensor:
    """The product times the scale, in one kernel: nothing is added where beta is 0."""
    return torch.addmm(rows.new_empty(()), rows, columns, beta=0, alpha=scale)
