"""Families that are not counted from their configs: planned, trained, resumed, exported, loaded by
plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer as data_tokenizer

pytestmark = pytest.mark.modes

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
BART = {
    "vocab_size": 2048,
    "d_model": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **{"bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2},
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**SMALL, "head_dim": 16},  # tied, no sdpa
    "phi3": SMALL,  # fused matrices
    "mixtral": {**SMALL, "num_local_experts": 4},  # experts have other names in files
    "gpt_neox": SMALL,  # its head has another name in files
    "bart": BART,
}
LORA = {"lora": {"r": 4}}
LONG = (("phi3", LORA), ("bart", {}), ("gemma2", {}), ("gpt_neox", {}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = (f"{row['prompt']} {row['response']}" for row in builders.rows(45))
    data_tokenizer.train(texts, TokenizerSection(), SMALL["vocab_size"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("mixtral", {}),
        # make families has these and all others
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in LONG),
    ],
)
def test_a_family_is_planned_trained_resumed_and_exported(family, sections, tokenizer, tmp_path):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config)
    source = tmp_path / "source"
    model.save_pretrained(source)
    for file in (*tokenizer.glob("*token*"), *tokenizer.glob("chat_template*")):
        shutil.copy(file, source)
    recipe = builders.recipe(tmp_path, training={"max_steps": 4, "save_steps": 2}, **sections)
    recipe.write_text(recipe.read_text().replace("shape: llama-tiny", f"path: {source}"))
    line = (tmp_path / "workspace", "run", str(recipe))
    done = builders.launch(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "workspace" / "runs" / "tiny").glob("2*")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["shape"]["parameters"] == sum(part.numel() for part in model.parameters())
    assert "allocated_bytes" in json.dumps(plan["phases"])
    weights = "adapter_model" if sections else "model"
    exported = (tmp_path / "model" / f"{weights}.safetensors").read_bytes()
    # cut off behind its first checkpoint
    shutil.rmtree(run / "checkpoints" / "checkpoint-000004")
    (run / "attempts" / "01" / "outcome.json").unlink()
    shutil.rmtree(tmp_path / "model")
    done = builders.launch(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model" / f"{weights}.safetensors").read_bytes() == exported
    if not sections:
        loaded = auto.from_pretrained(tmp_path / "model")
        assert [name for name, _ in loaded.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
