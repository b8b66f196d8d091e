"""model.tie_word_embeddings: false on a folder whose config ties the head to the embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MT5Config, T5Config

from launch.base.errors import ConfigError
from launch.predict import parameters as predict_parameters
from launch.predict import trained_parameters
from launch.predict.models import model_config
from launch.schema.model_sections import ModelSection
from launch.schema.plan import ModelSize
from tests import builders
from tests.unit.predict.test_modules_to_save import batch, real_model
from training.model import build

CODE = builders.CODE


def folder_of(path: Path, name: str) -> Path:
    real_model(name).save_pretrained(path)
    return path


def section_of(folder: Path, tied: bool | None) -> ModelSection:
    return ModelSection(path=str(folder), tie_word_embeddings=tied)


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_an_untied_head_begins_as_the_embeddings_and_is_trained_and_saved_apart(name, tmp_path):
    folder = folder_of(tmp_path / "base", name)
    section = section_of(folder, False)
    config, shapes, _ = model_config.read(section, root=CODE, cache=builders.CACHE)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    network = build.from_folder(section, None, torch.device("cpu"))
    assert {key: tuple(part.shape) for key, part in network.named_parameters()} == shapes
    assert sum(part.numel() for part in network.parameters()) == (
        sum(part.numel() for part in plain.parameters()) + plain.lm_head.weight.numel()
    )
    counts = trained_parameters.count(
        shapes, (), None, predict_parameters.FAMILIES[config["model_type"]]
    )
    meta = build.without_weights(section, ModelSize("any", config, *counts), None, ())
    assert {key: part.shape for key, part in meta.named_parameters()} == {
        key: part.shape for key, part in network.named_parameters()
    }
    with torch.no_grad():  # the same function before the first step
        assert torch.equal(network(**batch(name)).logits, plain(**batch(name)).logits)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(**batch(name)).loss.backward()
    optimizer.step()
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    assert not torch.equal(head.weight, embedding.weight)
    network.eval().save_pretrained(tmp_path / "trained")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    assert (
        json.loads((tmp_path / "trained/config.json").read_text())["tie_word_embeddings"] is False
    )
    with torch.no_grad():
        assert torch.equal(loaded(**batch(name)).logits, network(**batch(name)).logits)
    again = build.from_folder(section_of(tmp_path / "trained", False), None, torch.device("cpu"))
    assert torch.equal(again.get_output_embeddings().weight, head.weight)  # nothing is overwritten


def test_a_key_that_says_what_the_config_says_changes_nothing(tmp_path):
    for name, tied in (("tied", True), ("llama", False)):
        folder = folder_of(tmp_path / name, name)
        plain, named = (
            model_config.read(section_of(folder, asked), root=CODE, cache=builders.CACHE)
            for asked in (None, tied)
        )
        assert named[1] == plain[1]
        network = build.from_folder(section_of(folder, tied), None, torch.device("cpu"))
        expected = AutoModelForCausalLM.from_pretrained(folder)
        for key, part in network.named_parameters():
            assert torch.equal(part, expected.get_parameter(key))


@pytest.mark.parametrize(
    ("name", "tied", "words"),
    [
        ("llama", True, "tie_word_embeddings: true, but .* has an output head of its own, which"),
        ("t5", False, "tie_word_embeddings: false, but .* is a t5; known for gpt2, llama, mistral"),
    ],
)
def test_heads_that_cannot_be_tied_or_untied_are_refused(name, tied, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        model_config.read(
            section_of(folder_of(tmp_path, name), tied), root=CODE, cache=builders.CACHE
        )


def test_an_adapter_on_a_folder_has_no_head_of_its_own():
    model = {"shape": None, "path": "/base", "tie_word_embeddings": False}
    with pytest.raises(
        ValueError, match="beside lora: an adapter is loaded on the folder as it is"
    ):
        builders.recipe_of(model=model, lora={"r": 4})


def test_a_named_model_is_built_tied_or_untied():
    for tied in (True, False):
        section = ModelSection(shape="qwen2-0.5b", tie_word_embeddings=tied)
        config, shapes, _ = model_config.read(section, root=CODE, cache=builders.CACHE)
        assert config["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in shapes) is not tied


@pytest.mark.parametrize("kind", [T5Config, MT5Config])
def test_a_head_that_the_weights_untie_is_counted(kind, tmp_path):
    """The files of google/flan-t5 and google/mt5 have a head of their own."""
    config = kind(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    weights = builders.weights(tmp_path)
    for head, is_tied in ((weights["shared.weight"], True), (weights["shared.weight"] + 1, False)):
        file = tmp_path / "model.safetensors"
        save_file({**weights, "lm_head.weight": head.clone()}, file, {"format": "pt"})
        _, shapes, _ = model_config.read(
            ModelSection(path=str(tmp_path)), root=CODE, cache=builders.CACHE
        )
        network = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert {key: tuple(part.shape) for key, part in network.named_parameters()} == shapes
        assert ("lm_head.weight" in shapes) is not is_tied
