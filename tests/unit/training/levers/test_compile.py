"""Compiled layers compute what they computed, for batches of any length in a few graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.compat import levers_private
from training.levers.compile import compile_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
# (rows, length, is padded): the first make all graphs, then lengths change and nothing else
BATCHES = [(3, 20, False), (3, 31, True), (3, 12, False), (3, 11, True), (1, 22, False)]
BATCHES += [(2 + number % 3, 9 + 5 * number, number % 2 == 0) for number in range(12)]


def network(kind: str) -> Any:
    torch.manual_seed(0)
    sliding = {"sliding_window": 16} if kind == "gemma3_text" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sliding)).train()


def losses(model: Any) -> tuple[list[torch.Tensor], list[int]]:
    """The losses of all batches, whose gradients add up, and the graphs after each."""
    found, graphs, drawn = [], [], random.Random(1)
    for rows, length, is_padded in BATCHES:
        ids = torch.tensor([[drawn.randrange(1, 64) for _ in range(length)] for _ in range(rows)])
        mask = torch.ones_like(ids)
        mask[0, length - 5 :] = 1 - int(is_padded)
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
        graphs.append(levers_private.compiled().graphs)
    return found, graphs


@pytest.mark.parametrize(
    ("kind", "checkpoints"),
    [("llama", False), ("gemma3_text", True)],
    ids=["llama-kept", "gemma3_text-recomputed"],
)
def test_losses_and_gradients_are_those_of_layers_as_they_are(kind, checkpoints):
    plain, compiled = network(kind), network(kind)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if checkpoints:
        compiled.gradient_checkpointing_enable({"use_reentrant": False})
    compile_layers(compiled, "aot_eager")
    expected, _ = losses(plain)
    found, graphs = losses(compiled)
    assert list(map(float, found)) == pytest.approx(list(map(float, expected)), rel=1e-6)
    assert [*compiled.state_dict()] == [*plain.state_dict()], "no name is another"
    gradients = {name: weight.grad for name, weight in compiled.named_parameters()}
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5)
    kinds_of_layers = 2 if kind == "gemma3_text" else 1
    assert graphs[4] == graphs[-1] <= 4 * kinds_of_layers
    assert levers_private.compiled()[1:] == (0, 0)


def test_code_that_meets_too_many_kinds_of_inputs_is_counted():
    class Layer(torch.nn.Module):
        def forward(self, tensor: torch.Tensor, times: float) -> torch.Tensor:
            return (tensor * times).relu()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = Layer()
    layer.compile(dynamic=False, backend="eager")
    for number in range(12):
        layer(torch.ones(2 + number), 1.0)
    assert levers_private.compiled().eager == 1
