"""Machines, models and recipes are recognised by what decides memory and speed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from launch.predict.history import cache_keys
from launch.schema.machine import GIB
from launch.schema.plan import ModelSize
from tests.builders import CODE, gpu, machine, recipe_of


def test_a_machine_is_known_again_whatever_is_free_and_whatever_it_is_called():
    before = machine(2)
    cards = tuple(
        replace(card, free_bytes=GIB, reason="NVML", driver="550.54.14") for card in before.gpus
    )
    facts = {
        "name": "gpu-node-7",
        "host_available_bytes": GIB,
        "disk_free_bytes": 1,
        "shm_bytes": 0,
        "cpu_reason": "x",
    }
    # another kernel keeps some MiB more
    facts["host_limit_bytes"] = before.host_limit_bytes - (90 << 20)
    assert cache_keys.machine_key(machine(cards=cards, **facts)) == cache_keys.machine_key(before)


@pytest.mark.parametrize(
    "other",
    [
        machine(),
        machine(1),
        machine(2, host_limit_bytes=32 * GIB),
        machine(2, cpu_count=4),
        machine(cards=(gpu(0), replace(gpu(1), driver="560"))),
        machine(cards=(gpu(0), gpu(1, total_bytes=10 * GIB))),
        machine(cards=(gpu(0), replace(gpu(1), name="RTX 3090"))),
    ],
)
def test_another_machine_has_another_key(other):
    assert cache_keys.machine_key(other) != cache_keys.machine_key(machine(2))


def test_a_model_is_known_by_its_content_not_by_its_name():
    shape = ModelSize("mini", {"model_type": "llama", "hidden_size": 64}, 1000, 1000)
    moved = replace(
        shape, name="/models/mini", config={**shape.config, "_name_or_path": "/models/mini"}
    )
    assert cache_keys.model_key(moved) == cache_keys.model_key(shape)
    assert cache_keys.model_key(replace(shape, trainable_parameters=10)) == cache_keys.model_key(
        shape
    )  # the recipe's freeze
    assert cache_keys.model_key(
        replace(shape, config={**shape.config, "hidden_size": 65})
    ) != cache_keys.model_key(shape)
    assert cache_keys.model_key(replace(shape, parameters=1001)) != cache_keys.model_key(shape)


@pytest.mark.parametrize(
    "sections",
    [
        {"name": "other", "output_dir": "/elsewhere"},
        {"model": {"shape": "llama-mini"}},
        {"model": {"shape": None, "path": "/models/mini"}},
        {"tokenizer": {"path": "/tokenizer"}},
        {"data": {"train_file": "/data/other.parquet", "max_train_samples": 9, "text_column": "t"}},
        {"training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}},
        {
            "training": {
                "learning_rate": 1e-3,
                "seed": 1,
                "save_steps": 9,
                "max_steps": 7,
                "num_train_epochs": 1,
            }
        },
        {"launch": {"nodes": 1, "main_process_port": 3000}},
    ],
)
def test_a_recipe_is_known_again_when_an_optimizer_step_feels_no_difference(sections):
    assert cache_keys.recipe_key(recipe_of(**sections)) == cache_keys.recipe_key(recipe_of())


@pytest.mark.parametrize(
    "sections",
    [
        {"task": "pretrain"},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"freeze": ["model.embed_tokens"]}},
        {"lora": {}},
        {"lora": {"r": 8}},
        {"tokenizer": {"vocab_size": 512}},
        {"data": {"max_length": 256}},
        {"training": {"gradient_accumulation_steps": 4}},
        {"training": {"bf16": True}},
        {"training": {"optim": "adafactor"}},
        {"training": {"activation_checkpointing": True}},
        {"training": {"torch_compile_mode": "max-autotune"}},  # only TrainingArguments knows it
        {"launch": {"mode": "cpu"}},
        {"launch": {"vram_fraction": 0.7}},
    ],
)
def test_a_recipe_whose_steps_differ_has_another_key(sections):
    assert cache_keys.recipe_key(recipe_of(**sections)) != cache_keys.recipe_key(recipe_of())


def test_keys_are_the_same_in_every_process():
    code = (
        "from launch.predict.history import cache_keys as keys; from tests.builders import machine,"
        " recipe_of"
    )
    code += "; print(keys.machine_key(machine(2)))"
    code += "; print(keys.recipe_key(recipe_of()))"
    argv = [sys.executable, "-P", "-c", code]
    env = {"PYTHONPATH": str(CODE), "PYTHONHASHSEED": "7"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [
        cache_keys.machine_key(machine(2)),
        cache_keys.recipe_key(recipe_of()),
    ]
