"""An exported folder that is not the model that was trained is named, whatever differs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from launch.base.errors import ExportError
from launch.data.conversation import Conversation
from launch.data.token_cache import TokenCache
from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer
from training.data.encode import Encoder, EncoderSettings
from training.data.tokenise import TOKENIZER
from training.loop import export_check
from training.loop.export_check import Rows, Trained
from training.model import build

SAMPLES = [
    Conversation(
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
    )
    for row in builders.rows(12)
]
RECIPE = builders.recipe_of()
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder, its model and what was trained."""
    folder = tmp_path_factory.mktemp("exported")
    texts = (message["content"] for sample in SAMPLES for message in sample.messages)
    config = {"model_type": "llama"}
    made = tokenizer.train(texts, TokenizerSection(), 400, config)
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            tie_word_embeddings=True,
        )
    )
    build.set_special_tokens(network, made)
    network.save_pretrained(folder)
    made.save_pretrained(folder)
    rows = Rows(Encoder(made, EncoderSettings(False, "sft", 64)), SAMPLES, SAMPLES[:2])
    return (
        folder,
        network,
        Trained(
            rows,
            export_check.logits(network, rows.inputs, Accelerator(cpu=True)),
            torch.float32,
        ),
    )


def test_what_an_export_must_have_is_read_from_the_training(exported, tmp_path):
    folder, network, expected = exported
    file = builders.write_parquet(tmp_path / "train.parquet", builders.rows(12))
    recipe = builders.recipe_of(data={"train_file": str(file), "max_length": 64})
    (tmp_path / TOKENIZER).symlink_to(folder)
    size = builders.plan(recipe).shape
    start = SimpleNamespace(
        recipe=recipe, tokens=TokenCache(recipe, size, builders.DATA_FORMAT, {}, tmp_path)
    )
    trainer = SimpleNamespace(
        **{"accelerator": Accelerator(cpu=True), "model": network, "model_wrapped": network},
        args=SimpleNamespace(torch_compile=False),
    )
    found = export_check.trained(start, trainer, tmp_path, SAMPLES[:2])  # pyright: ignore
    assert found.dtype == torch.float32
    assert torch.equal(found.logits, expected.logits)
    assert found.rows.encoded == expected.rows.encoded


def checked(folder, exported, free_bytes=PLENTY):
    _, network, trained = exported
    return export_check.check(folder, RECIPE, Accelerator(cpu=True), network, trained, free_bytes)


@pytest.fixture
def copy(exported, tmp_path):
    for file in exported[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_model_that_was_trained_passes(exported):
    said = checked(exported[0], exported)
    assert said == (
        "ids of 12 rows, names and shapes of 20 weights, logits of a row (off by 0.0e+00 of the"
        " largest)"
    )


def test_logits_are_computed_without_a_cache_of_keys():
    class Model(torch.nn.Module):
        def forward(self, input_ids, use_cache=True):
            assert not use_cache, "takes memory that nothing reads"
            return SimpleNamespace(logits=input_ids[..., None])

    computed = export_check.logits(Model(), {"input_ids": [3, 4]}, Accelerator(cpu=True))
    assert computed.tolist() == [[3.0], [4.0]]


def test_a_copy_that_does_not_fit_is_checked_without_its_logits(exported, copy):
    said = checked(copy, exported, free_bytes=0)
    assert "the logits were not compared: a second copy of 0.0 GiB does not fit" in said
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"missing_keys.*model\.norm\.weight"):
        checked(copy, exported, free_bytes=0)


def test_a_changed_weight_is_found(exported, copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match="logits of a row differ"):
        checked(copy, exported)


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_config_that_computes_otherwise_is_found(exported, copy):
    def halve(config):
        config["rope_parameters"]["rope_theta"] = 100.0
        config.pop("rope_theta", None)

    edit(copy / "config.json", halve)
    with pytest.raises(ExportError, match="logits of a row differ"):
        checked(copy, exported)


def test_an_untied_head_is_found(exported, copy):
    edit(copy / "config.json", lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(ExportError, match=r"lm_head\.weight"):
        checked(copy, exported)


def test_other_ids_are_found_with_their_row(exported, copy):
    def join_words(content):
        content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}

    edit(copy / "tokenizer.json", join_words)
    with pytest.raises(ExportError, match=r"row \d+ has other ids than trained: \d+ instead of"):
        checked(copy, exported)


def test_another_template_is_found(exported, copy):
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ExportError, match="chat_template"):
        checked(copy, exported)


def test_an_end_token_that_generation_does_not_know_is_found(exported, copy):
    edit(copy / "generation_config.json", lambda config: config.update(eos_token_id=5))
    with pytest.raises(ExportError, match=r"generation_config.json does not name \['<\|end\|>'\]"):
        checked(copy, exported)


def test_an_end_token_of_answers_alone_is_found_too(exported, copy):
    """The tokenizer's own end token is named."""
    folder, _, trained = exported
    other = AutoTokenizer.from_pretrained(folder)
    other.add_tokens([AddedToken("<|stop|>", special=True)])
    other.chat_template = other.chat_template.replace(other.eos_token, "<|stop|>")
    other.save_pretrained(copy)
    rows = Rows(Encoder(other, EncoderSettings(False, "sft", 64)), SAMPLES, [])
    with pytest.raises(ExportError, match=r"does not name \['<\|stop\|>'\]"):
        checked(copy, (folder, exported[1], replace(trained, rows=rows)))


def test_a_tokenizer_that_cannot_be_loaded_is_named(exported, copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="its tokenizer cannot be loaded"):
        checked(copy, exported)
