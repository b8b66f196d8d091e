"""MLPs that compute a part of the tokens at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.levers import tiled_mlp

ROWS, LENGTH, WIDTH, INNER, PARTS = 2, 11, 6, 20, 4  # 22 tokens in parts of 6


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(hidden.shape))
        return self.down(self.dropout(self.up(hidden).relu()))


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden))


def layer(parts: int = 1, dropout: float = 0.0) -> Layer:
    torch.manual_seed(0)
    made = Layer(dropout)
    if parts > 1:
        tiled_mlp.tile(made, parts)
    return made


def gradients(made: Layer, run: Any = None, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Of each parameter, of the input, and the output. `run`: a function around the layer."""
    torch.manual_seed(1)
    hidden = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = (run or Layer.__call__)(made, hidden)
    out.float().square().sum().backward()
    found = {name: each.grad for name, each in made.named_parameters()}
    assert hidden.grad is not None
    return {**found, "input": hidden.grad, "out": out.detach()}


@pytest.mark.parametrize("parts", [2, 4, 22, 64])
def test_output_and_gradients_are_those_of_all_tokens_at_once(parts):
    torch.testing.assert_close(gradients(layer(parts)), gradients(layer()), rtol=1e-5, atol=1e-5)


def test_all_parts_are_small():
    made = layer(PARTS)
    gradients(made)
    assert set(made.mlp.shapes) == {(1, 6, WIDTH), (1, 4, WIDTH)}
    with torch.no_grad():
        made.mlp.shapes.clear()
        made(torch.randn(ROWS, LENGTH, WIDTH))
        made(torch.randn(1, 1, WIDTH))  # as when a text is written
    assert made.mlp.shapes == [(1, 6, WIDTH)] * 3 + [(1, 4, WIDTH), (1, 1, WIDTH)]


def test_a_checkpoint_around_the_layer_computes_the_mlp_twice_not_three_times():
    made = layer(PARTS)
    around = partial(checkpoint, use_reentrant=False)
    torch.testing.assert_close(gradients(made, around), gradients(layer()), rtol=1e-5, atol=1e-5)
    assert len(made.mlp.shapes) == 2 * PARTS


@pytest.mark.parametrize("around", [None, partial(checkpoint, use_reentrant=False)])
def test_backward_drops_what_forward_dropped(around):
    def in_parts(made: Layer, hidden: torch.Tensor) -> torch.Tensor:
        """The same, with all that autograd keeps."""
        tokens = made.norm(hidden).reshape(1, -1, WIDTH)
        out = torch.cat([made.mlp(part) for part in tokens.split(6, 1)], 1)
        return hidden + out.view(hidden.shape)

    expected = gradients(layer(dropout=0.5), in_parts)
    torch.testing.assert_close(
        gradients(layer(PARTS, dropout=0.5), around), expected, rtol=1e-5, atol=1e-5
    )


def test_random_numbers_of_later_layers_are_not_disturbed():
    made = layer(PARTS, dropout=0.5)
    out = made(torch.randn(ROWS, LENGTH, WIDTH))
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    out.sum().backward()
    assert torch.equal(torch.rand(3), expected)


def test_backward_computes_in_the_precision_of_forward():
    whole, parts = (gradients(layer(count), autocast=True) for count in (1, PARTS))
    plain = gradients(layer())
    for name, expected in whole.items():
        assert parts[name].dtype == expected.dtype
        scale = expected.abs().max().item()
        torch.testing.assert_close(parts[name], expected, rtol=0.02, atol=0.02 * scale, msg=name)
        if name != "input":
            assert not torch.equal(parts[name].float(), plain[name])


def test_frozen_weights_get_no_gradient():
    made = layer(PARTS)
    made.mlp.requires_grad_(False)
    found = gradients(made)
    assert found["mlp.up.weight"] is None
    expected = gradients(layer())
    for name in ("norm.weight", "input"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


def test_trained_weights_behind_frozen_layers_get_theirs():
    made, expected = layer(PARTS), gradients(layer())
    torch.manual_seed(1)
    with torch.no_grad():
        hidden = made.norm(torch.randn(ROWS, LENGTH, WIDTH))
        torch.manual_seed(1)
        rows = torch.randn(ROWS, LENGTH, WIDTH)
    (rows + made.mlp(hidden)).square().sum().backward()
    assert made.mlp.up.weight.grad is not None
    torch.testing.assert_close(
        made.mlp.up.weight.grad, expected["mlp.up.weight"], rtol=1e-5, atol=1e-5
    )


def test_a_mixture_of_experts_is_left_alone():
    made = layer()
    made.mlp.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    assert not list(tiled_mlp.mlps(made))
