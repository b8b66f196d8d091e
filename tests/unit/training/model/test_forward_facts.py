"""Facts on a model's forward pass are those of its modules and its operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from launch.predict.models.model_families import COMMITTED
from scripts import render_families
from training.trace import forward_facts

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def of_type(name: str, **values: Any) -> Any:
    config = AutoConfig.for_model(name, **values)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def llama(**values: Any) -> Any:
    return of_type("llama", **LLAMA, **values)


def with_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A Llama whose forward() changes the logits."""
    model = llama()
    unchanged = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = unchanged(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


def test_the_committed_facts_are_those_of_the_installed_transformers():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["transformers"]
    if version("transformers") not in committed:
        pytest.skip("of another version the child that builds the model says them")
    assert committed[version("transformers")] == render_families.forward_passes()


@pytest.mark.parametrize(
    ("change", "head"),
    [
        (lambda logits: logits, "unchanged"),
        (lambda logits: logits.contiguous(), "unchanged"),
        (lambda logits: logits / 3, "by position"),
        (lambda logits: torch.tanh(logits / 5) * 5, "by position"),
        (lambda logits: logits + torch.zeros(97, device="meta"), "by position"),
        (lambda logits: logits.to(torch.bfloat16), "by position"),
        (lambda logits: logits.div_(3), "by position"),
        (lambda logits: logits.cumsum(1), "other"),
        (lambda logits: logits.cumsum_(1), "other"),
        (lambda logits: (logits[:, :2].fill_(0), logits)[1], "other"),
        (lambda logits: logits.roll(1, 1), "other"),
        (lambda logits: logits.flip(1), "other"),
        (lambda logits: logits - logits.mean(1, keepdim=True), "other"),
        (lambda logits: logits * torch.zeros(logits.shape[1], 1, device="meta"), "other"),
        (lambda logits: logits[:, -1:], "other"),
        (lambda logits: logits.transpose(0, 1).transpose(0, 1), "other"),
        (lambda logits: torch.zeros_like(logits), "other"),
    ],
)
def test_the_way_from_the_head_to_the_logits_is_followed(change, head):
    assert forward_facts.head_result(with_logits(change)) == head


def test_a_head_that_is_not_called_once_with_all_positions_is_another_head():
    model = llama()
    without_the_last = model.lm_head.forward
    calls = torch.nn.Module.__call__

    class Head(torch.nn.Linear):
        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            return calls(self, hidden[:, :-1])

    model.lm_head.__class__ = Head
    assert forward_facts.head_result(model) == "other"
    assert model.lm_head.forward == without_the_last  # put back


def test_rows_are_flattened_where_attention_needs_no_more_than_the_starts_of_documents():
    assert forward_facts.flattened_attention(llama()) == (True, 0.0)
    assert forward_facts.flattened_attention(llama(attention_dropout=0.2)) == (True, 0.2)
    both_ways = llama()
    both_ways.model.layers[1].self_attn.is_causal = False
    with_convolution = llama()
    with_convolution.model.layers[0].shift = torch.nn.Conv1d(32, 32, 3)
    for model in (both_ways, with_convolution, of_type("t5", num_layers=2, d_model=32)):
        assert forward_facts.flattened_attention(model) == (False, 0.0)
    capped = of_type("gemma2", **LLAMA, head_dim=8, num_key_value_heads=2)
    assert not forward_facts.flattened_attention(capped)[0]
    # its mask alone has the window
    values = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4}
    for window, flattens in ((None, True), (16, False)):
        model = of_type("phimoe", **values, sliding_window=window)
        assert forward_facts.flattened_attention(model)[0] == flattens


def test_the_model_is_left_as_it_was():
    model = llama()
    before = model.training, model.dtype, model.config.to_dict()
    forward_facts.read(model)
    assert (model.training, model.dtype, model.config.to_dict()) == before


def test_a_layer_without_an_mlp_of_its_own_input_is_not_tiled():
    model = llama()
    assert forward_facts.tiles_mlp(model)
    model.model.layers[1].mlp.experts = torch.nn.ModuleList()
    assert not forward_facts.tiles_mlp(model)
