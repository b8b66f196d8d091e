"""The rows of a batch of an evaluation, by the free memory."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from launch.base.errors import ResourceError
from training.children.evaluate import rows_at_once, token_bytes


def test_a_batch_takes_half_of_the_free_memory_and_a_row_that_does_not_fit_is_refused():
    assert rows_at_once(100, 1000, 50, "a.jsonl") == 5
    assert rows_at_once(100, 1000, 3, "a.jsonl") == 3
    assert rows_at_once(1, 1000, 500, "a.jsonl") == 64
    assert rows_at_once(900, 1000, 50, "a.jsonl") == 1
    with pytest.raises(
        ResourceError, match=r"a.jsonl: its longest row takes up to 2.0 KiB .*1.0 KiB"
    ):
        rows_at_once(2048, 1024, 50, "a.jsonl")


def test_a_token_is_counted_with_its_logits_and_its_keys_of_all_layers():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 300}
    config = LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)
    assert token_bytes(LlamaForCausalLM(config)) == 4 * (3 * 300 + 16 * (24 + 6))
