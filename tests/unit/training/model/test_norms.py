"""RMS norms by PyTorch's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from training.levers import norms

pytestmark = pytest.mark.unit

TOKENS, WIDTH = 300, 256


def norm(dtype: torch.dtype = torch.float32, fused: bool = False) -> LlamaRMSNorm:
    torch.manual_seed(0)
    made = LlamaRMSNorm(WIDTH)
    torch.nn.init.normal_(made.weight, 1, 0.3)
    made.to(dtype)
    if fused:
        made.forward = partial(norms.fused_forward, made, made.forward)
    return made


def gradients(made: LlamaRMSNorm, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Of the weight and of the input, and the output."""
    torch.manual_seed(1)
    hidden = (3 * torch.randn(2, TOKENS, WIDTH)).to(torch.bfloat16).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = made(hidden)
    (out.float() * torch.randn(WIDTH)).sum().backward()
    assert hidden.grad is not None
    assert made.weight.grad is not None
    return {"weight": made.weight.grad, "input": hidden.grad, "out": out.detach()}


def off(values: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The distances to exact values, over their size."""
    return {
        name: float((value.float() - exact[name]).norm() / exact[name].norm())
        for name, value in values.items()
    }


def test_in_float32_they_are_those_of_transformers():
    plain, fused = (gradients(norm(fused=value), torch.float32) for value in (False, True))
    assert max(off(fused, plain).values()) < 1e-5


def test_in_bf16_they_are_as_near_to_float32():
    plain, fused = (
        gradients(norm(torch.bfloat16, fused=value), torch.bfloat16) for value in (False, True)
    )
    exact = gradients(norm(torch.bfloat16).float(), torch.float32)
    further = off(plain, exact)
    assert all(distance <= 1.2 * further[name] for name, distance in off(fused, exact).items())
    assert {value.dtype for value in fused.values()} == {torch.bfloat16}


def test_hidden_states_of_another_type_than_the_weight_keep_transformers_code():
    made, plain = norm(fused=True), norm()
    hidden = torch.randn(2, WIDTH).bfloat16()
    out = made(hidden)
    assert torch.equal(out, plain(hidden))
    assert out.dtype is torch.float32


def test_norms_that_compute_as_llamas_are_found_and_no_others():
    network = torch.nn.ModuleList(
        [LlamaRMSNorm(4), Qwen3RMSNorm(4), GemmaRMSNorm(4), torch.nn.LayerNorm(4)]
    )
    assert list(norms.norms(network)) == list(network)[:2]
