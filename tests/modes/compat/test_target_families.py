"""Logits at targets alone, and in parts, in small models of types for which a plan takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from launch.data.rows import IGNORED
from tests.modes.compat.test_levers_of_families import AT_TARGETS
from training.data.batches import TARGET_TENSORS, targets
from training.levers.logits import LossHead, target_loss_sum
from training.trace import forward_facts

# Some of the types that have the lever since their models are asked for it
GAINED = (
    *("cohere2_moe", "ctrl", "doge", "ernie4_5_moe", "falcon", "glm4_moe", "gpt_neox_japanese"),
    *("lfm2", "llama4_text", "marian", "plbart", "qwen3_next", "rwkv", "vaultgemma"),
)
# Their forward() scales or caps logits, or adds a bias to them; with the values of SMALL
BY_POSITION = (
    *("bart", "blenderbot", "cohere", "cohere2", "cohere2_moe", "gemma2", "gemma3_text", "granite"),
    *("granitemoe", "marian", "mbart", "pegasus", "plbart", "vaultgemma"),
)
VOCABULARY, ROWS, LENGTH = 97, 3, 23
# values of a small model, of those keys that its config has
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **{"rotary_dim": 4, "sliding_window": 16, "attention_types": [[["global", "local"], 1]]},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0},
    # what some types do to logits
    **{"final_logit_softcapping": 5.0, "logits_scaling": 3.0, "logit_scale": 0.3},
    "layer_types": None,
}


def network(kind: str) -> Any:
    torch.manual_seed(0)
    keys = AutoConfig.for_model(kind)
    values = {key: value for key, value in SMALL.items() if _is_settable(keys, key)}
    if getattr(keys, "layer_types", None) is None:
        values.pop("layer_types", None)
    config = AutoConfig.for_model(kind, **values)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return family.from_config(config).eval()


def _is_settable(config: Any, key: str) -> bool:
    return hasattr(config, key) and not isinstance(getattr(type(config), key, None), property)


@pytest.mark.parametrize("kind", (*AT_TARGETS, *GAINED))
def test_the_loss_and_every_gradient_are_those_of_all_positions(kind: str) -> None:
    """At targets, and in parts too where forward() returns the head's result."""
    with torch.device("meta"):
        head_result = forward_facts.head_result(network(kind))
    assert head_result == ("by position" if kind in BY_POSITION else "unchanged")
    for num_chunks in (1, 4) if head_result == "unchanged" else (1,):
        check(kind, num_chunks)


def check(kind: str, num_chunks: int) -> None:
    random = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(5, VOCABULARY, (2, ROWS, LENGTH), generator=random).unbind()
    labels[:, :4], labels[1, 9:] = IGNORED, IGNORED
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    whole, at_targets = network(kind), network(kind)
    shift = not whole.config.is_encoder_decoder
    if not shift:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    expected = target_loss_sum(whole(**inputs).logits, labels, shift)
    expected.backward()
    head = LossHead(at_targets, num_chunks, shift)
    named = dict(zip(TARGET_TENSORS, targets(labels.numpy(), shift), strict=True))
    with head.for_loss(labels, named):
        logits = at_targets(**inputs).logits
        found = head.loss_sum(logits)
    found.backward()
    num_targets = len(named["target_ids"])
    assert logits.shape == ((1, num_targets, VOCABULARY) if num_chunks == 1 else ())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for (name, one), other in zip(
        whole.named_parameters(), at_targets.named_parameters(), strict=True
    ):
        if one.grad is None:
            assert other[1].grad is None, name
            continue
        torch.testing.assert_close(other[1].grad, one.grad, rtol=1e-3, atol=1e-4, msg=name)
