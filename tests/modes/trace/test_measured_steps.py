"""Whole trainings that were measured on cards, and their plans: memory (tests/data/gpu/
measured.json), and seconds of a step of one of each kind (tests/data/time_evidence)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import seconds_of_cards
from launch.data.worker import WORKER
from launch.schema.machine import CUDNN_LAST, GIB
from tests import builders

MEASURED = json.loads(
    (builders.CODE / "tests" / "data" / "gpu" / "measured.json").read_text(encoding="utf-8")
)
PEAKS = [step for step in MEASURED["steps"] if step["statistic"] == "peak allocated"]
DEVICES = [step for step in MEASURED["steps"] if step["statistic"] == "device (nvidia-smi)"]
AFTER_A_STEP = {
    step["id"].partition(":")[0]: step["measured_gib"]
    for step in MEASURED["steps"]
    if step["statistic"] == "allocated after a step, mean"
}


def machine(folder: Path, name: str, count: int, gib: float, architecture: str) -> Path:
    """A described machine with so many cards of this size, and much host RAM."""
    described = yaml.safe_load((builders.CODE / "configs/machines/h200.yaml").read_text())
    card = {
        **described["gpus"][0],
        "name": name,
        "total_gib": gib,
        "free_gib": gib - 0.5,
        "architecture": architecture,
    }
    described |= {
        "gpus": [{**card, "index": index} for index in range(count)],
        "host_limit_gib": 900.0,
        "host_available_gib": 800.0,
    }
    file = folder / "machine.yaml"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    return file


def planned(folder: Path, on: Path, *words: str, **environment: str) -> dict[str, Any]:
    """The plan of a training of text, as `plan --json` prints it, with transformers' and PEFT's own
    modules, as all were measured."""
    recipe = builders.recipe(folder, task="pretrain", launch={"exact_batch": True})
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content["data"] = {"train_file": str(folder / "rows.jsonl"), "max_length": 4096}
    (folder / "rows.jsonl").write_text('{"text": "some words"}\n' * 64, encoding="utf-8")
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
    modules = ["--training.fused_norms=false"]
    if any(word.startswith("--lora.") for word in words):
        modules.append("--lora.fused_adapters=false")
    done = builders.launch(
        *(folder, "plan", str(recipe), "--json", "--machine", str(on), *words, *modules),
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def planned_as_measured(folder: Path, step: dict[str, Any], **environment: str) -> dict[str, Any]:
    on = machine(folder, "NVIDIA A100-SXM4-80GB", int(step["machine"][-1]), 79.25, "8.0")
    base_model = folder / "base_model"
    base_model.mkdir()
    (base_model / "config.json").write_text(json.dumps(step["config"]), encoding="utf-8")
    settings = {"model.path": base_model} | {
        key.replace("gradient_checkpointing", "activation_checkpointing"): value
        for key, value in step["settings"].items()
    }
    flags = [f"--{key}={value}" for key, value in settings.items()]
    words = ("--training.optim=adamw_torch", "--model.dtype=bfloat16", "--data.packing=true")
    single = () if "launch.mode" in settings else ("--launch.mode=single_gpu",)
    return planned(folder, on, *flags, *words, *single, **environment)


@pytest.mark.parametrize("step", PEAKS, ids=lambda step: step["id"])
def test_a_step_takes_what_it_took_on_the_card(step, tmp_path):
    plan = planned_as_measured(tmp_path, step)
    assert plan["strategy"]["levers"]["num_output_chunks"] == 1
    for part in ("first_step", "step"):
        assert plan["phases"][part]["allocated_bytes"] / GIB == pytest.approx(
            step["measured_gib"], rel=5e-4
        )
    if after := step["also_measured"].get("after_allocated_gib"):
        assert plan["phases"]["save"]["allocated_bytes"] / GIB == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("step", DEVICES, ids=lambda step: step["id"])
def test_the_card_holds_what_nvidia_smi_showed(step, tmp_path):
    """The source's segments did not grow; its FSDP has flat parameters, ours does not."""
    plan = planned_as_measured(tmp_path, step, PYTORCH_ALLOC_CONF="expandable_segments:False")
    highest = max(plan["phases"][part]["device_bytes"] for part in ("first_step", "step"))
    within = 0.03 if step["machine"].endswith("x1") else 0.06
    assert highest / GIB == pytest.approx(step["measured_gib"], rel=within)


LORA = {
    "peft-full": (),
    "peft-lora32": ("--lora.r=32", "--lora.target_modules=[q_proj,v_proj]"),
    "peft-lora64": ("--lora.r=64", "--lora.target_modules=[q_proj,v_proj]"),
    "peft-loramlp10": ("--lora.r=10", "--lora.target_modules=[up_proj,down_proj,gate_proj]"),
}


def test_after_a_step_weights_gradients_and_states_are_there_and_the_logits_of_its_rows(tmp_path):
    """The source's loop holds gradients and logits until the next step. Its rows have another
    length in each step; the mean of their logits is the same in all four trainings."""
    assert LORA.keys() == AFTER_A_STEP.keys()
    on = machine(tmp_path, "NVIDIA L40S", 1, 47.7, "8.9")
    rests = {}
    for name, words in LORA.items():
        shape = ("--model.shape=llama3.2-3b", "--model.dtype=bfloat16", "--data.max_length=768")
        batch = ("--training.per_device_train_batch_size=1", "--launch.mode=single_gpu")
        plan = planned(tmp_path, on, *shape, *batch, *words)
        estimate = plan["estimate"]
        states = sum(estimate[f"{kind}_bytes"] for kind in ("weights", "gradients", "optimizer"))
        rests[name] = AFTER_A_STEP[name] - states / GIB
    # 4 rows of 128,256 scores of 2 bytes: 325 to 345 tokens, of at most 768
    assert all(0.31 < rest < 0.34 for rest in rests.values()), rests
    assert max(rests.values()) - min(rests.values()) < 0.01, rests


@pytest.mark.parametrize(
    "name",
    [
        "fsdpqlora-4090x2-lora7b-ddp",  # GeForce, two cards
        "qwen-7b-lora-2048",  # A100
        "qwen-1.8b-lora-512",  # A100, waits for its host
        "h200-c3-ours",  # QLoRA, computes all the time
        "h200-c3-ours-liger",
        "h200-c1-lowmem-grouped",  # all weights, waits for its host
        "h200-c2-lowmem-grouped-bf16",  # LoRA, waits for its host
        "nanogpt-gpt2-a100",
    ],
)
def test_seconds_are_within_a_quarter_of_what_was_measured(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CUDNN_LAST, "1")
    content = seconds_of_cards.read_evidence()
    rows = [row for row in content["rows"] if row["id"] == name]
    with WORKER:
        (row,) = seconds_of_cards.measured_rows({**content, "rows": rows}, name, tmp_path)
    assert 0.8 < row["ratio"] < 1.25
