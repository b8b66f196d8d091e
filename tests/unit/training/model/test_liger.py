"""Liger's kernels come into one model, and into no other model of the process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.levers import liger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def of_type(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES))


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(12).reshape(2, 6)).logits


def names(modules: list[Any]) -> set[str]:
    return {type(module).__name__ for module in modules}


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "qwen3_moe", "glm4", "olmo2", "phi3", "nemotron"]
)
def test_another_model_of_the_process_is_not_changed(name):
    other = of_type(name)
    python_module = sys.modules[type(other).__module__]
    shared, before = dict(vars(python_module)), logits(other)
    assert liger.patch(of_type(name), {})
    assert vars(python_module) == shared
    assert torch.equal(logits(other), before)
    assert torch.equal(logits(of_type(name)), before)


def test_the_switches_say_which_modules_are_changed():
    assert names(liger.patch(of_type("llama"), {})) == {
        "LlamaRMSNorm",
        "LlamaMLP",
        "LlamaAttention",
    }
    assert names(liger.patch(of_type("llama"), {"rope": False, "swiglu": False})) == {
        "LlamaRMSNorm"
    }


def test_the_experts_of_a_mixture_stay_those_of_transformers():
    model = of_type("qwen3_moe")
    assert names(liger.patch(model, {})) == {"Qwen3MoeRMSNorm", "Qwen3MoeAttention"}
    assert "Liger" not in repr(model.model.layers[0].mlp)
