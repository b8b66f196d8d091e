"""MLPs that compute a part of the tokens at a time, in small models of every type for which a plan
may take that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.modes.compat.test_levers_of_families import AT_TARGETS, TILED
from tests.modes.compat.test_target_families import LENGTH, ROWS, VOCABULARY, network
from training.levers import tiled_mlp
from training.trace import forward_facts

# Some of the types that have the lever since their models are asked for it
GAINED = (
    *("cwm", "diffllama", "doge", "falcon", "granite_swa", "internlm3"),
    *("nanochat", "qwen3_5_text", "vaultgemma"),
)
# Mixtures of experts, and types whose MLP is no module or adds to another input
WHOLE = set(AT_TARGETS) - set(TILED)


def without_dropout(kind: str) -> Any:
    made = network(kind)
    for module in made.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made


def loss_and_gradients(model: Any, checkpointing: bool) -> tuple[torch.Tensor, list[Any]]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=random)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = model(**inputs).logits.float().reshape(-1, VOCABULARY)
    loss = functional.cross_entropy(logits, ids.reshape(-1))
    loss.backward()
    return loss, list(model.named_parameters())


@pytest.mark.parametrize("kind", (*TILED, *GAINED))
def test_the_loss_and_every_gradient_are_those_of_all_tokens_at_once(kind: str) -> None:
    expected, gradients = loss_and_gradients(without_dropout(kind), False)
    assert forward_facts.tiles_mlp(network(kind))
    for checkpointing in (False, True):
        in_parts = without_dropout(kind)
        tiled_mlp.tile(in_parts, 4)
        loss, found = loss_and_gradients(in_parts, checkpointing)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for (name, one), (_, other) in zip(gradients, found, strict=True):
            if one.grad is None:
                assert other.grad is None, name
                continue
            highest = one.grad.abs().max().item()
            torch.testing.assert_close(
                other.grad, one.grad, rtol=1e-5, atol=1e-5 * highest, msg=name
            )


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_other_types_have_no_such_mlp_in_each_layer(kind: str) -> None:
    assert not forward_facts.tiles_mlp(network(kind))
