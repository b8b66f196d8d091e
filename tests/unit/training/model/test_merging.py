"""A merged model is the adapter on its base, also where the adapter changes one of several weights
that are tied."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from launch.base.errors import ExportError
from launch.schema.model_sections import (
    LoraSection,
    ModelSection,
    QuantizationSection,
    TokenizerSection,
)
from launch.schema.plan import ModelSize
from training.children import merge
from training.compat.transformers_private import Network
from training.data import tokenizer
from training.model import build, four_bit, merging

LLAMA = {
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "tie_word_embeddings": True,
}
T5 = {
    **{"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "decoder_start_token_id": 0,
}
BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16),
    **{"vocab_size": 300, "max_position_embeddings": 64},
}
# model type -> config, its embeddings, a linear layer
TIED = {
    "qwen2": (LLAMA, "embed_tokens", "q_proj"),
    "gpt2": ({"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2}, "wte", "c_attn"),
    "t5": (T5, "embed_tokens", "q"),
    "bart": (BART, "embed_tokens", "q_proj"),
}
# what an adapter changes -> LoraConfig; E stands for the embeddings
KINDS: dict[str, dict[str, Any]] = {
    "embeddings": {"target_modules": ["E"]},
    "head": {"target_modules": ["lm_head"]},
    "a copy of the head": {"modules_to_save": ["lm_head"]},
    "rows of both": {"trainable_token_indices": [1, 2]},
    "no side": {},
}


def family(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def write_base(folder: Path, model_type: str) -> Any:
    config = AutoConfig.for_model(model_type, **TIED[model_type][0])
    torch.manual_seed(0)
    family(config).from_config(config).save_pretrained(folder)
    tokenizer.train(iter(["one two"]), TokenizerSection(), 300).save_pretrained(folder)
    return config


def with_values(network: Network) -> Network:
    """An adapter as if it had been trained."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


def write_adapter(base: Path, config: Any, folder: Path, kind: str) -> None:
    _, embeddings, linear = TIED[config.model_type]
    options = {**KINDS[kind], "target_modules": [linear, *KINDS[kind].get("target_modules", [])]}
    options["target_modules"] = [
        name.replace("E", embeddings) for name in options["target_modules"]
    ]
    network = get_peft_model(family(config).from_pretrained(base), LoraConfig(r=4, **options))
    with_values(network).save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", TIED)
def test_a_merged_folder_is_the_adapter_on_its_base(tmp_path, model_type, kind):
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    config = write_base(base, model_type)
    write_adapter(base, config, adapter, kind)
    words = tokenizer.load(base)
    adapted = PeftModel.from_pretrained(family(config).from_pretrained(base), adapter)
    expected = merging.logits(adapted, words)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        merge.merge(base, adapter, out)  # compares them too
    model = family(config).from_pretrained(out)
    assert torch.allclose(merging.logits(model, words), expected, atol=1e-5)
    written = json.loads((out / "config.json").read_text())
    if kind in ("rows of both", "no side"):
        assert written["tie_word_embeddings"]
    else:
        assert written["tie_word_embeddings"] is False
        assert not written.get("scale_decoder_outputs")


def test_logits_that_are_others_are_named_and_no_folder_is_written_for_them():
    logits = torch.tensor([1.0, -4.0])
    merging.check(logits + 3e-4, logits, "out")
    with pytest.raises(ExportError, match=r"^out: .* differ by 0\.05% .* at most 0\.01%, so no"):
        merging.check(logits + 2e-3, logits, "out")
    with pytest.raises(ExportError, match="differ by nan%"):
        merging.check(logits * float("nan"), logits, "out")


def test_an_adapter_on_the_embeddings_of_a_tied_model_in_4_bits_is_merged_into_them_alone():
    words = tokenizer.train(iter(["one two"]), TokenizerSection(), 300)
    size = ModelSize("tiny", {"model_type": "qwen2", **LLAMA, "hidden_size": 64}, 0, 0)
    section = ModelSection(shape="tiny")
    quantization = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    model = build.from_shape(section, size, quantization)
    targets = ("q_proj", "embed_tokens")
    adapted = with_values(build.with_lora(model, LoraSection(r=4), targets))
    expected = merging.logits(adapted, words)
    merged = merging.merged(adapted, partial(four_bit.merged, adapted, torch.float32))
    assert not merged.config.tie_word_embeddings
    assert torch.allclose(merging.logits(merged, words), expected, atol=1e-4)
