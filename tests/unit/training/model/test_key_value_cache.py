"""While a model trains, no part of it keeps keys and values of the tokens that it has read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.families import FAMILIES
from launch.schema.model_sections import ModelSection
from launch.schema.plan import ModelSize
from training.compat.transformers_private import Network
from training.model import build

SECTION = ModelSection(shape="x")


def to_train(family: str) -> Network:
    size = ModelSize(family, {**FAMILIES[family], "vocab_size": 64}, 0, 0)
    model = build.from_shape(SECTION, size, attention="eager")
    return build.prepare_to_train(model, SECTION, None, ())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_forward_keeps_no_keys_and_values(family):
    model = to_train(family)
    ids = torch.arange(1, 5)[None]
    pair = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    assert model(input_ids=ids, **pair).past_key_values is None


def test_a_t5_that_trains_still_generates_with_its_keys_and_values():
    ids = torch.arange(1, 5)[None]
    answer = to_train("t5").generate(ids, max_new_tokens=2, return_dict_in_generate=True)
    assert answer.past_key_values is not None


def test_the_traced_decoder_of_a_t5_keeps_none_either():
    traced = build.without_weights(SECTION, ModelSize("t5", dict(FAMILIES["t5"]), 0, 0), None, ())
    assert not traced.decoder.config.use_cache
