"""RMS norms by PyTorch's kernel, which reads the hidden states once, computes in float32 and rounds
once. The modules of transformers cast them to float32, and write each part of the norm."""

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch

from launch.schema.levers import Levers

aten = torch.ops.aten


def apply(trainer: Any, levers: Levers) -> None:
    if levers.fused_norms:
        for norm in norms(trainer.model):
            norm.forward = partial(fused_forward, norm, norm.forward)


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


def fused_forward(
    norm: Any, plain: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """The forward method of a norm, `plain` before. The kernel takes hidden states of the weight's
    type."""
    if hidden.dtype is not norm.weight.dtype:
        return plain(hidden)
    return aten._fused_rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)[0]
