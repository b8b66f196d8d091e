"""Trainings that add tokens to a model folder: what is exported is what was trained, in plain
transformers and peft, and every engine grows the embeddings alike."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from launch.run_folder.layout import RunDir
from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer
from training.data.batches import TokenRows

ADDED = ["<|im_start|>", "<|im_end|>"]
CPUS = {"launch.num_processes": 2, "training.per_device_train_batch_size": 4}


def base_folder(path: Path, tied: bool) -> Path:
    """A small model whose embeddings have a row for each token, and no template."""
    made = tokenizer.train((row["prompt"] for row in builders.rows(50)), TokenizerSection(), 400)
    made.chat_template = None
    made.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def trained(tmp_path: Path, base: Path, **keys: object) -> RunDir:
    section = {"chat_template": "chatml", "add_tokens": [*ADDED, "<|end|>"]}
    training = {"max_steps": 8, "learning_rate": 5e-3, "save_steps": 4}
    model: dict[str, object] = {"shape": None, "path": str(base)}
    recipe = builders.recipe(tmp_path, model=model, tokenizer=section, training=training)
    flags = [f"--{key}={value}" for key, value in keys.items()]
    done = builders.launch(tmp_path / "workspace", "run", str(recipe), *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    return RunDir.all(tmp_path / "workspace/runs", "tiny")[0]


def held_out_loss(model: torch.nn.Module, workspace: Path) -> float:
    """The mean loss of all target tokens of the held-out rows."""
    (cache,) = (workspace / ".cache/tokens").glob("*/validation.arrow")
    total, count = 0.0, 0
    for row in TokenRows(cache):
        ids, labels = (torch.tensor([part.tolist()]) for part in (row.input_ids, row.labels))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
    return total / count


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_tokens_added_under_lora_are_trained_and_load_in_plain_peft(tmp_path, tied):
    base = base_folder(tmp_path / "base", tied)
    before = (base / "model.safetensors").read_bytes()
    run = trained(tmp_path, base, **{"lora.r": 4})
    assert (base / "model.safetensors").read_bytes() == before
    exported = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = exported.convert_tokens_to_ids(ADDED)
    assert min(ids) == LlamaConfig.from_pretrained(base).vocab_size
    weights = tmp_path / "model/adapter_model.safetensors"
    assert weights.stat().st_size < 60_000  # no embeddings, which take 90 kB each
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    measured = json.loads(run.attempts()[-1].outcome_file.read_text())["eval_loss"]
    assert math.isclose(held_out_loss(loaded, tmp_path / "workspace"), measured, rel_tol=1e-4)
    plan = run.read_plan()
    assert plan.shape.lora_parameters == loaded.get_nb_trainable_parameters()[1] - sum(
        tensor.numel()
        for name, tensor in loaded.named_parameters()
        if "lora_" not in name and "trainable_tokens" not in name
    )
    chat = [sys.executable, str(builders.CODE / "scripts/chat.py"), str(tmp_path / "model"), "red"]
    answered = subprocess.run(chat, capture_output=True, text=True)
    assert (answered.returncode, answered.stderr) == (0, "")
    out = tmp_path / "merged"
    done = builders.launch(tmp_path, "merge", str(tmp_path / "model"), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    text = torch.tensor([exported("<|im_start|>user\n1: red<|im_end|>").input_ids])
    with torch.no_grad():
        assert torch.allclose(loaded(text).logits, merged(text).logits, atol=1e-5)
    rows = merged.get_input_embeddings().weight
    assert not torch.allclose(rows[ids[0]], rows[: ids[0]].mean(dim=0), atol=1e-3)  # it learned


@pytest.mark.campaign
def test_every_engine_adds_the_same_rows_to_a_model_that_is_trained_whole(tmp_path):
    base, results = base_folder(tmp_path / "base", tied=False), {}
    for mode, keys in {"cpu": {}, "multi_cpu": CPUS, "deepspeed_zero3": CPUS}.items():
        trained(tmp_path / mode, base, **{"launch.mode": mode, **keys})
        results[mode] = builders.weights(tmp_path / mode / "model")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / mode / "model")
        assert len(exported.lm_head.weight) == exported.config.vocab_size
    for name, tensor in results["cpu"].items():
        for mode in ("multi_cpu", "deepspeed_zero3"):
            assert torch.allclose(results[mode][name], tensor, atol=1e-4), (mode, name)


@pytest.mark.campaign
def test_a_run_with_added_tokens_goes_on_under_another_engine(tmp_path):
    base = base_folder(tmp_path / "base", tied=True)
    trained(tmp_path, base, **{"lora.r": 4, "training.max_steps": 4})
    before = load_file(tmp_path / "model/adapter_model.safetensors")
    keys = {"launch.mode": "deepspeed_zero2", "resume.allow": "[schedule]", **CPUS}
    run = trained(tmp_path, base, **{"lora.r": 4, **keys})
    assert run.read_continues() is not None
    after = load_file(tmp_path / "model/adapter_model.safetensors")
    assert before.keys() == after.keys()
    (name,) = (name for name in after if "trainable_tokens_delta" in name)
    moved = (after[name] - before[name]).abs().max()
    assert 0 < moved < 0.03  # four steps of at most 5e-3: it did not begin anew
