"""Code that a model folder brings is never run and never asked about, whichever command opens the
folder."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import builders
from tests.process import forked_starts

pytestmark = pytest.mark.process

CODE = """
import os
open(os.environ["PROOF"], "w").write("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "stranger"
class Model(LlamaForCausalLM): config_class = Config
class Cut(PreTrainedTokenizerFast): pass
"""
MAPPED = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class Payload:
    """A pickle of it writes the proof when it is opened."""

    def __reduce__(self):
        return os.system, ('echo ran > "$PROOF"',)


def write_folder(folder: Path, **config: object) -> Path:
    """A model folder that brings code.py, with weights that would do for a Llama."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "code.py").write_text(CODE)
    save_file(
        {"model.norm.weight": np.ones(16, np.float32)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def write_adapter(folder: Path, base: Path) -> Path:
    folder.mkdir(parents=True)
    named = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": 2,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(named))
    save_file(
        {"lora": np.ones(2, np.float32)}, folder / "adapter_model.safetensors", {"format": "pt"}
    )
    return folder


def start(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; a person who would answer every question with yes sits before
    it."""
    env = builders.environment(
        folder / "workspace", PROOF=str(folder / "proof"), HF_HOME=str(folder / "hf")
    )
    del env["HF_HUB_OFFLINE"]
    if argv[:2] == ("-m", "launch"):
        return forked_starts.start(argv[2:], env, text="y\n" * 20, folder=folder)
    argv = (sys.executable, *argv)
    return subprocess.run(
        argv, env=env, cwd=folder, input="y\n" * 20, capture_output=True, text=True, timeout=300
    )


def chat(folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    return start(folder, str(builders.CODE / "scripts/chat.py"), str(model))


def refused(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert not (folder / "proof").exists(), "code of the folder was run"
    assert done.returncode == 3, done.stderr + done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert "[y/N]" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_chat_does_not_run_the_code_of_a_folder(tmp_path):
    model = write_folder(tmp_path / "m", model_type="stranger", auto_map=MAPPED)
    refused(chat(tmp_path, model), tmp_path, str(model / "config.json"), "auto_map", "never run")


def test_chat_names_a_type_that_transformers_does_not_have(tmp_path):
    model = write_folder(tmp_path / "m", model_type="stranger")
    refused(
        chat(tmp_path, model), tmp_path, str(model / "config.json"), "stranger", "use a model_type"
    )


def test_chat_does_not_run_the_code_of_an_adapters_base(tmp_path):
    base = write_folder(tmp_path / "base", model_type="stranger", auto_map=MAPPED)
    refused(
        chat(tmp_path, write_adapter(tmp_path / "a", base)),
        tmp_path,
        str(base / "config.json"),
        "auto_map",
    )


def test_chat_looks_for_the_base_of_an_adapter_on_this_machine_alone(tmp_path):
    done = chat(tmp_path, write_adapter(tmp_path / "a", Path("somebody/model")))
    refused(done, tmp_path, "adapter_config.json", "somebody/model", "no model is there")


def test_chat_opens_no_pickle(tmp_path):
    model = write_folder(tmp_path / "m")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    refused(chat(tmp_path, model), tmp_path, "pytorch_model.bin", "only safetensors")


def test_chat_opens_no_pickle_of_an_adapter(tmp_path):
    adapter = write_adapter(tmp_path / "a", write_folder(tmp_path / "base"))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    refused(chat(tmp_path, adapter), tmp_path, "adapter_model.bin", "only safetensors")


def test_chat_names_a_folder_without_weights(tmp_path):
    model = write_folder(tmp_path / "m")
    (model / "model.safetensors").unlink()
    refused(chat(tmp_path, model), tmp_path, str(model), "no weights")


@pytest.mark.parametrize(
    ("config", "pickled", "words"),
    [
        ({"model_type": "stranger", "auto_map": MAPPED}, False, ("config.json", "auto_map")),
        ({"_attn_implementation": "somebody/kernel"}, False, ("config.json", "download code")),
        ({}, True, ("adapter_model.bin", "only safetensors")),
    ],
    ids=["auto_map", "kernel", "pickle"],
)
def test_merge_refuses_an_adapter_or_a_base_that_brings_code(tmp_path, config, pickled, words):
    adapter = write_adapter(tmp_path / "a", write_folder(tmp_path / "base", **config))
    if pickled:
        (adapter / "adapter_model.safetensors").unlink()
        (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    done = start(tmp_path, "-m", "launch", "merge", str(adapter), "--out", str(tmp_path / "out"))
    refused(done, tmp_path, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
def test_plan_and_run_refuse_a_model_that_brings_code_before_a_step_is_traced(tmp_path, command):
    model = write_folder(tmp_path / "m", model_type="stranger", auto_map=MAPPED)
    recipe = builders.recipe(tmp_path)
    refused(
        start(tmp_path, "-m", "launch", command, str(recipe), f"--model.path={model}"),
        tmp_path,
        "auto_map",
    )


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_tokenizer_that_alone_brings_code_is_refused_at_the_plan(tmp_path, command):
    brings = write_folder(tmp_path / "brings", model_type="stranger")
    (brings / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Cut", "code.Cut"]}})
    )
    shutil.copy(brings / "code.py", brings / "tokenization.py")
    recipe = builders.recipe(tmp_path)
    done = start(tmp_path, "-m", "launch", command, str(recipe), f"--tokenizer.path={brings}")
    refused(done, tmp_path, str(brings / "tokenizer_config.json"), "auto_map", "never run")
    assert "[y/N]" not in done.stdout + done.stderr
