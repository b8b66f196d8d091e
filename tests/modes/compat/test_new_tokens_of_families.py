"""Embeddings of families that no table names grow by the tokens that a recipe adds."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.predict.models import test_new_tokens
from tests.unit.predict.models.test_new_tokens import read_model, recipe_of
from training.data import tokenizer
from training.model import build

own_tokenizer = test_new_tokens.folder


@pytest.mark.parametrize(
    "family",
    [
        "falcon",
        *(
            pytest.param(family, marks=pytest.mark.campaign)
            for family in ("opt", "gpt_neox", "gemma", "phi")
        ),
    ],
)
def test_embeddings_of_a_family_of_which_only_the_weights_are_known_grow(
    own_tokenizer, tmp_path, family
):
    path, made = tmp_path / family, tokenizer.load(own_tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    feed_forward = "ffn_dim" if family in ("opt", "falcon") else "intermediate_size"
    config = AutoConfig.for_model(family, vocab_size=len(made), **sizes, **{feed_forward: 48})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    made.save_pretrained(path)
    read = read_model(recipe_of(path, "<a>", "<b>"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    build.grow_vocabulary(model, len(made) + 2)
    # by shape: a GPT-NeoX file calls its output head embed_out
    built = sorted(tuple(tensor.shape) for tensor in model.parameters())
    assert sorted(read.parameters.values()) == built
    assert read.config["vocab_size"] == model.config.vocab_size == len(made) + 2
