"""Trainings of lora.modules_to_save: plain PEFT loads what was trained, `merge` takes it, a killed
run goes on to the same weights, and every engine trains the same. And of adapters in bfloat16."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from launch.run_folder.layout import RunDir
from tests import builders
from tests.modes.test_added_tokens import ADDED, base_folder, held_out_loss, trained
from tests.modes.test_change_of_mode import start
from tests.train_cpu.test_resume import kill_after
from training.compat.transformers_private import Network
from training.data.batches import TokenRows

EVERY_EMBEDDING = {"lora.r": 4, "lora.modules_to_save": "[embed_tokens,model.norm]"}


def merged_by_launch(tmp_path: Path) -> Path:
    out = tmp_path / "merged"
    done = builders.launch(tmp_path, "merge", str(tmp_path / "model"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_copied_embeddings_grow_with_added_tokens_and_load_in_plain_peft(tmp_path, tied):
    base = base_folder(tmp_path / "base", tied)
    run = trained(tmp_path, base, **EVERY_EMBEDDING)
    names = load_file(tmp_path / "model/adapter_model.safetensors")
    in_heads = [name for name in names if "lm_head" in name]
    head = "weight" if tied else "token_adapter.trainable_tokens_delta"
    assert [name.partition("lm_head.")[2] for name in in_heads] == [head]
    loaded: Network = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    outcome = json.loads(run.attempts()[-1].outcome_file.read_text())
    loss = held_out_loss(loaded, tmp_path / "workspace")
    assert math.isclose(loss, outcome["eval_loss"], rel_tol=1e-4)
    estimate = run.read_plan().estimate
    assert outcome["weights_bytes"] == estimate.weights_bytes
    assert outcome["gradients_bytes"] == estimate.gradients_bytes
    ended = AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(ADDED[1])
    merged: Network = AutoModelForCausalLM.from_pretrained(merged_by_launch(tmp_path)).eval()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    rows = merged.model.embed_tokens.weight
    assert not torch.allclose(rows[ended], rows[:ended].mean(dim=0), atol=1e-3)  # it learned
    text = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(text).logits, merged(text).logits, atol=1e-5)


@pytest.mark.campaign
def test_a_killed_run_goes_on_to_the_same_copies_on_4_bit_weights(tmp_path):
    training = {"max_steps": 12, "save_steps": 2}
    lora = {"r": 4, "modules_to_save": ["lm_head", "norm"]}
    sections = {"training": training, "lora": lora, "quantization": {"load_in_4bit": True}}
    for name in ("straight", "killed"):
        recipe = builders.recipe(tmp_path / name, **sections)
        words = ["run", str(recipe)]
        if name == "killed":
            kill_after(tmp_path / name / "workspace", words, step=5)
        done = builders.launch(tmp_path / name / "workspace", *words)
        assert done.returncode == 0, done.stderr + done.stdout
        assert ("resuming from" in done.stdout) == (name == "killed")
    straight, killed = (
        load_file(tmp_path / name / "model/adapter/adapter_model.safetensors")
        for name in ("straight", "killed")
    )
    assert "base_model.model.lm_head.weight" in straight
    assert straight.keys() == killed.keys()
    assert all(torch.equal(tensor, killed[name]) for name, tensor in straight.items())
    run = builders.only_run(tmp_path / "straight/workspace")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    estimate = json.loads((run / "plan.json").read_text())["estimate"]
    assert outcome["weights_bytes"] == estimate["weights_bytes"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "straight/model").eval()
    loss = held_out_loss(exported, tmp_path / "straight/workspace")
    assert math.isclose(loss, outcome["eval_loss"], rel_tol=1e-4)


def test_the_output_head_of_a_t5_is_trained_apart_from_its_embeddings(tmp_path):
    base = base_folder(tmp_path / "base", tied=True)
    size = len(AutoTokenizer.from_pretrained(base))
    config = T5Config(
        **{"vocab_size": size, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
        **{"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    )
    T5ForConditionalGeneration(config).save_pretrained(base)
    lora = {"r": 4, "modules_to_save": ["lm_head", "layer_norm"]}
    model = {"shape": None, "path": str(base)}
    recipe = builders.recipe(tmp_path, model=model, lora=lora, training={"learning_rate": 5e-3})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stderr + done.stdout
    run = builders.only_run(tmp_path / "workspace")
    loaded: Network = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    (cache,) = (tmp_path / "workspace/.cache/tokens").glob("*/validation.arrow")
    total, count = 0.0, 0
    for row in TokenRows(cache):
        ids, labels = (torch.tensor([part.tolist()]) for part in (row.input_ids, row.labels))
        with torch.no_grad():
            targets = int((labels != -100).sum())
            total += loaded(input_ids=ids, labels=labels).loss.item() * targets
            count += targets
    measured = json.loads((run / "attempts/01/outcome.json").read_text())["eval_loss"]
    assert math.isclose(total / count, measured, rel_tol=1e-4)
    merged: Network = AutoModelForSeq2SeqLM.from_pretrained(merged_by_launch(tmp_path)).eval()
    assert not torch.allclose(merged.lm_head.weight, merged.shared.weight, atol=1e-3)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        text = {"input_ids": ids, "labels": ids}
        assert torch.allclose(loaded(**text).logits, merged(**text).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        pytest.param("multi_cpu", "no", marks=pytest.mark.campaign),
        pytest.param("deepspeed_zero2", "no", marks=pytest.mark.campaign),
        pytest.param("deepspeed_zero3", "no", marks=pytest.mark.campaign),
        pytest.param("deepspeed_zero3", "bf16", marks=pytest.mark.campaign),
        pytest.param("deepspeed_zero3_offload", "bf16", marks=pytest.mark.campaign),
        pytest.param("fsdp2", "no", marks=pytest.mark.campaign),
        pytest.param("fsdp2", "bf16", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_every_engine_trains_the_same_copies(tmp_path, mode, precision, tied):
    base = base_folder(tmp_path / "base", tied)
    words = ["--lora.r=4", "--lora.modules_to_save=[lm_head,norm]", "--training.max_steps=6"]
    words += ["--training.bf16=true"] if precision == "bf16" else []
    adapters = {}
    for name, ranks in (("cpu", 1), (mode, 2)):
        folder = tmp_path / name
        builders.recipe(folder, model={"shape": None, "path": str(base)})
        done = start(folder, name, ranks, *words)
        assert done.returncode == 0, done.stderr + done.stdout
        adapters[name] = load_file(folder / "model/adapter_model.safetensors")
    assert adapters["cpu"].keys() == adapters[mode].keys()
    near = {"no": 1e-5, "bf16": 5e-3}[precision]  # the learning rate is 1e-3
    for part, tensor in adapters["cpu"].items():
        assert torch.allclose(tensor.float(), adapters[mode][part].float(), atol=near), part
    outcome = json.loads((builders.only_run(folder / "h") / "attempts/01/outcome.json").read_text())
    estimate = json.loads((builders.only_run(folder / "h") / "plan.json").read_text())["estimate"]
    for states in ("weights_bytes", "offloaded_bytes"):
        assert outcome[states] == pytest.approx(estimate[states], rel=0.01, abs=2000)


@pytest.mark.campaign
@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_a_killed_run_goes_on_to_the_same_adapters_in_bfloat16(tmp_path, autocast):
    sections = {
        "model": {"dtype": "bfloat16"},
        "training": {"max_steps": 8, "save_steps": 2, "bf16": autocast},
        "lora": {"r": 4, "autocast_adapter_dtype": False},
    }
    for name in ("straight", "killed"):
        workspace = tmp_path / name / "workspace"
        words = ["run", str(builders.recipe(tmp_path / name, **sections))]
        if name == "killed":
            kill_after(workspace, words, step=5)
        done = builders.launch(workspace, *words)
        assert done.returncode == 0, done.stderr + done.stdout
        assert ("resuming from" in done.stdout) == (name == "killed")
        run = RunDir(builders.only_run(workspace))
        outcome = json.loads(run.attempts()[-1].outcome_file.read_text())
        estimate, size = run.read_plan().estimate, run.read_plan().shape
        assert outcome["weights_bytes"] == estimate.weights_bytes
        assert outcome["gradients_bytes"] == estimate.gradients_bytes == 2 * size.lora_parameters
        assert outcome["optimizer_bytes"] == pytest.approx(estimate.optimizer_bytes, rel=0.01)
    straight, killed = (
        load_file(tmp_path / name / "model/adapter/adapter_model.safetensors")
        for name in ("straight", "killed")
    )
    assert {part.dtype for part in straight.values()} == {torch.bfloat16}
    assert all(torch.equal(part, killed[name]) for name, part in straight.items())
