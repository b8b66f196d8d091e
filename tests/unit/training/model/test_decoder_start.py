"""The token that answers of an encoder-decoder begin with: its config's, its type's, or none."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, T5Config, T5ForConditionalGeneration

from launch.base.errors import ConfigError
from launch.schema.model_sections import TokenizerSection
from training.data import tokenizer
from training.model import build
from training.trace.model_parts import model_parts

SMALL = {"vocab_size": 600, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16),
}


def test_a_t5_whose_config_names_no_start_begins_answers_with_the_padding_token():
    model = T5ForConditionalGeneration(T5Config(**SMALL))
    build.set_special_tokens(model, tokenizer.train(iter(["one two"]), TokenizerSection(), 400))
    assert model.config.decoder_start_token_id == 0
    assert model.generation_config.decoder_start_token_id == 0


@pytest.mark.parametrize(
    ("model_type", "values", "start"),
    [
        ("t5", {"decoder_start_token_id": 5}, 5),
        ("longt5", {}, 7),
        ("switch_transformers", {}, 7),
        ("mt5", {}, 0),
        ("bart", {}, 2),
        ("t5gemma", {}, 2),
    ],
)
def test_a_start_is_the_configs_or_the_one_that_transformers_uses(model_type, values, start):
    config = AutoConfig.for_model(model_type, **values)
    assert build.decoder_start(config, pad_token_id=7) == start


@pytest.mark.parametrize("model_type", ["bart"])
def test_a_type_whose_start_its_config_alone_can_say_is_refused_when_it_is_planned(model_type):
    config = {"model_type": model_type, "vocab_size": 64, **BART, "decoder_start_token_id": None}
    with pytest.raises(
        ConfigError, match=rf"a {model_type}, has no decoder_start_token_id.*add it"
    ):
        model_parts(config)
