"""RMS norms by PyTorch's kernel, which reads the hidden states once, computes in float32 and rounds
once. The modules of transformers cast them to float32, and write each part of the norm."""

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from launch.schema.levers import Levers

aten = torch.ops.aten


def apply(trainer: Any, levers: Levers) -> None:
    if levers.fused_norms:
        for norm in norms(trainer.model):
            norm.forward = FusedForward(norm)


def norms(network: torch.nn.Module) -> Iterator[Any]:
    """The norms that compute as Llama's does: of a weight, and of nothing that is added to it."""
    # here, so that ranks of other models do without these 15 MB
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    code = _instructions(LlamaRMSNorm.forward.__code__)
    for module in network.modules():
        if _instructions(getattr(type(module).forward, "__code__", None)) == code:
            yield module


def _instructions(code: CodeType | None) -> tuple[Any, ...]:
    return (code.co_code, code.co_consts, code.co_names) if code else ()


class FusedForward:
    """The forward method of a norm. The kernel takes hidden states of the weight's type."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._plain = norm, norm.forward

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._norm.weight
        if hidden.dtype is not weight.dtype:
            return self._plain(hidden)
        eps = self._norm.variance_epsilon
        return aten._fused_rms_norm(hidden, hidden.shape[-1:], weight, eps)[0]
