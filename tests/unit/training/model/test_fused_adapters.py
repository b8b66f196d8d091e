"""Adapters that are computed with their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from training.levers import adapters

pytestmark = pytest.mark.unit

aten = torch.ops.aten
ROWS, LENGTH, WIDTH, OUTPUTS = 3, 40, 128, 192


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, OUTPUTS)
        self.second = nn.Linear(OUTPUTS, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden).relu())


def net(dtype: torch.dtype = torch.bfloat16, fused: bool = True, **lora: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, lora_alpha=20, target_modules=["first", "second"], init_lora_weights=False, **lora
    )
    made = get_peft_model(Net().to(dtype), config)
    if fused:
        adapters.fuse(made)
    return made


def gradients(made: Any, is_narrow: bool = True, again: bool = False) -> Mapping[str, torch.Tensor]:
    """Of each adapter's weight and of the input, and the output."""
    torch.manual_seed(1)
    dtype = next(made.parameters()).dtype
    hidden = torch.randn(ROWS, LENGTH, WIDTH).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        out = checkpoint(made, hidden, use_reentrant=False) if again else made(hidden)
    out.float().square().mean().backward()
    trained = {
        name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None
    }
    assert hidden.grad is not None
    return {**trained, "input": hidden.grad, "out": out.detach()}


def off(values: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The mean distance to exact values, over their size."""
    assert values.keys() == exact.keys()
    shares = [
        float((value.float() - exact[name]).norm() / exact[name].norm())
        for name, value in values.items()
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}])
def test_output_and_gradients_are_as_near_to_float32_as_without(dtype, lora):
    exact = gradients(net(dtype, fused=False, **lora).float(), is_narrow=False)
    fused, plain = gradients(net(dtype, **lora)), gradients(net(dtype, fused=False, **lora))
    assert 0 < off(fused, exact) <= 1.05 * off(plain, exact) < 0.02
    assert {name: value.dtype for name, value in fused.items()} == {
        name: value.dtype for name, value in plain.items()
    }


def test_a_checkpoint_around_the_layers_changes_no_bit():
    fused, again = gradients(net()), gradients(net(), again=True)
    assert all(torch.equal(value, again[name]) for name, value in fused.items())


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_the_weights_of_a_module_are_cast_at_once_and_anew_in_each_forward_pass():
    made = net()
    with Operators() as operators:
        before = gradients(made)
    assert operators.calls[aten._foreach_copy_.default] == 1
    # the casts of 4 gradients, of the input, of the output, and of its gradient
    assert operators.calls[aten._to_copy.default] == 7
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.add_(0.1)
    assert not torch.equal(gradients(made)["out"], before["out"])


def test_a_layer_that_is_called_alone_casts_its_weights_itself():
    made, plain = net(), net(fused=False)
    hidden = torch.randn(LENGTH, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = (each.base_model.model.first(hidden) for each in (made, plain))
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_without_autocast_and_without_adapters_layers_compute_as_before():
    made, plain = net(torch.float32), net(torch.float32, fused=False)
    hidden = torch.randn(ROWS, LENGTH, WIDTH)
    assert torch.equal(made(hidden), plain(hidden))
    with torch.autocast("cpu", torch.bfloat16), made.disable_adapter(), plain.disable_adapter():
        assert torch.equal(made(hidden), plain(hidden))
    made.merge_adapter()
    plain.merge_adapter()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(hidden), plain(hidden))
