"""The lines of the guides for the A5000, the A6000 and the AMD card, word for word, on a tiny
model: real launches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import builders

TRAIN = str(builders.CODE / "scripts" / "train.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def run(folder: Path, *argv: str, **env: str) -> str:
    """What a line says that is typed in a folder that is not the checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = builders.environment(folder / "workspace", PYTHON=sys.executable, **env)
    done = subprocess.run(
        argv, env=variables, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def texts(folder: Path) -> Path:
    return write_jsonl(
        folder / "rows.jsonl", [{"text": row["prompt"]} for row in builders.rows(48)]
    )


@pytest.mark.modes
def test_the_amd_guides_wrapper_trains_as_its_variables_say(tmp_path):
    tiny = ["--model.shape=llama-tiny", f"--data.train_file={texts(tmp_path)}"]
    variables = {
        "BATCH_SIZE": "6",
        "GRADIENT_ACCUM": "4",
        "NUM_WORKERS": "1",
        "MAX_LENGTH": "8",
        "EPOCHS": "1",
    }
    checkpointing = {
        "ENABLE_GRAD_CKPT": "--gradient_checkpointing",
        "ENABLE_FP16": "",
        "OUTPUT_DIR": "out model",
    }
    said = run(
        tmp_path,
        str(builders.CODE / "run_single_gpu_optimized.sh"),
        *tiny,
        **variables,
        **checkpointing,
    )
    assert "BATCH_SIZE=6: training.per_device_train_batch_size=6" in said
    assert "6 per device x 4 accumulation x 1 process = 24 effective" in said
    run_dir = builders.only_run(tmp_path / "workspace", "single_gpu_optimized")
    strategy = json.loads((run_dir / "plan.json").read_text())["strategy"]
    assert (strategy["levers"]["every_n_layers"], strategy["mixed_precision"]) == (1, "no")
    assert strategy["dataloader_num_workers"] == 1
    assert [event["samples_seen"] for event in builders.events(run_dir)][:2] == [24, 48]
    assert (tmp_path / "out model/config.json").exists()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[Path, str]:
    """(folder, what was said) of the A6000 guide's pretraining by torchrun, typed in it."""
    folder = tmp_path_factory.mktemp("pretrained")
    words = [
        "--mode",
        "pretrain",
        "--model.shape=llama-tiny",
        f"--data.train_file={texts(folder)}",
    ]
    cut = [
        "--training.per_device_train_batch_size=3",
        "--training.max_steps=2",
        "--data.max_length=8",
    ]
    workers = ["--training.dataloader_num_workers=1", "--training.logging_steps=1"]
    return folder, run(folder, sys.executable, *TORCHRUN, TRAIN, *words, *cut, *workers)


@pytest.mark.modes
def test_the_a6000_guides_torchrun_line_is_one_training_of_two_ranks(pretrained):
    folder, said = pretrained
    assert len(re.findall(r"rank [01] of 2 on .*backend gloo \(torch.distributed\)", said)) == 2
    assert "3 per device x 4 accumulation x 2 processes = 24 effective" in said
    run_dir = builders.only_run(folder / "workspace", "minigpt_medium")
    assert [event["samples_seen"] for event in builders.events(run_dir)] == [24, 48]
    recipe = json.loads((run_dir / "recipe.json").read_text())
    assert recipe["training"]["dataloader_prefetch_factor"] == 4
    log = (folder / "workspace/logs/training.log").read_text()
    assert len(re.findall(r"  step [12]/2  epoch", log)) == 2


CONFIG = """\
model: {name_or_path: BASE}
data: {train_file: rows.jsonl, max_seq_length: 24}
training: {per_device_train_batch_size: 4, gradient_accumulation_steps: 3, max_steps: 4,
           learning_rate: 1e-2,
  optim: paged_adamw_8bit, eval_strategy: 'no', warmup_ratio: 0.1, output_dir: results/model}
lora: {r: 4, lora_alpha: 8}
quantization: {use_4bit: false}
environment: {gradient_checkpointing: true, dataloader_num_workers: 0, bf16: false}
logging: {log_dir: results/logs, logging_steps: 1}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model with its tokenizer in a folder, as a downloaded one is."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from launch.schema.model_sections import TokenizerSection
    from training.data import tokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base") / "a model"
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made = tokenizer.train((row["prompt"] for row in builders.rows(50)), TokenizerSection(), 600)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base) -> tuple[Path, str]:
    """(folder, what was said) of the A5000 guide's line, typed in it."""
    folder = tmp_path_factory.mktemp("adapted")
    talks = [
        [
            {"from": speaker, "value": row[part]}
            for row in builders.rows(2, seed)
            for speaker, part in PARTS
        ]
        for seed in range(24)
    ]
    write_jsonl(folder / "rows.jsonl", [{"conversations": talk} for talk in talks])
    (folder / "config").mkdir()
    (folder / "config/training_config.yaml").write_text(CONFIG.replace("BASE", f'"{base}"'))
    return folder, run(
        folder, sys.executable, TRAIN, "--config", "config/training_config.yaml", "--resume"
    )


@pytest.mark.modes
def test_the_a5000_guides_line_trains_an_adapter_and_leaves_the_guides_log(adapted):
    folder, said = adapted
    assert "training.warmup_ratio: training.warmup_steps=0.1" in said
    assert "4 per device x 3 accumulation x 1 process = 12 effective" in said
    assert (
        len(re.findall(r"  step \d/4  epoch", (folder / "results/logs/training.log").read_text()))
        == 4
    )
    assert [path.name for path in (folder / "results/model").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]


@pytest.mark.modes
def test_the_adapter_merges_into_its_base_and_tensorboard_finds_the_run(adapted, base):
    import torch
    from peft import PeftModel
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = adapted
    seen = EventMultiplexer()
    seen.AddRunsFromDirectory(str(folder / "results/logs"))
    seen.Reload()
    (name,) = seen.Runs()
    assert len(seen.Tensors(name, "train/loss")) == 4

    run_dir = builders.only_run(folder / "workspace", "lora_sft")
    run(folder, sys.executable, "-m", "launch", "merge", str(run_dir), "--out", "merged")
    tokens = torch.randint(5, 300, (2, 20))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        before = plain(tokens).logits
        trained = PeftModel.from_pretrained(plain, folder / "results/model").eval()(tokens).logits
        after = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()(tokens).logits
    torch.testing.assert_close(after, trained, rtol=1e-4, atol=1e-5)
    assert (before - trained).abs().max() > 1e-2  # the comparison can tell
    assert AutoTokenizer.from_pretrained(folder / "merged").chat_template
    again = subprocess.run(
        [sys.executable, "-m", "launch", "merge", str(run_dir), "--out", "merged"],
        env=builders.environment(folder / "workspace"),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 2
    assert "expected a new or empty folder" in again.stderr


PARTS = (("human", "prompt"), ("gpt", "response"))


@pytest.mark.modes
def test_before_and_after_of_the_amd_guide_are_one_training(tmp_path):
    found = {}
    for name in ("run_single_gpu", "run_single_gpu_optimized"):
        words = [
            f"--data.train_file={texts(tmp_path)}",
            "--data.validation_file=null",
            "--training.logging_steps=1",
        ]
        run(tmp_path / name, str(builders.CODE / f"{name}.sh"), *words, EPOCHS="3")
        recipe = name.removeprefix("run_")
        found[name] = [
            event["loss"]
            for event in builders.events(builders.only_run(tmp_path / name / "workspace", recipe))
        ]
    before, after = found.values()
    assert len(before) == 3
    assert before == pytest.approx(after, rel=1e-5)


@pytest.mark.modes
def test_sft_of_the_a6000_guide_starts_from_what_pretraining_left(pretrained, tmp_path):
    sft = (sys.executable, TRAIN, "--mode", "sft")
    said = run(tmp_path, *sft, f"--data.train_file={texts(tmp_path)}", "--dry-run")
    assert "training starts from random weights" in " ".join(said.split())
    folder, _ = pretrained
    pairs = write_jsonl(folder / "pairs.jsonl", [{"input": "1 + 1", "output": "2"}] * 8)
    common = ["--training.max_steps=2", "--data.validation_file=null"]
    run(folder, *sft, f"--data.train_file={pairs}", *common)
    workspace = folder / "workspace"
    logs = "".join(path.read_text("utf-8") for path in workspace.rglob("*sft*.log"))
    assert "changed the model of model.path_if_there is there" in " ".join(logs.split())
    assert (workspace / "model_save/minigpt_medium_sft/config.json").exists()


@pytest.mark.modes
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_a_dry_run_of_the_a6000_guide_prints_the_plan_and_trains_nothing(tmp_path, launcher):
    words = ["--mode", "pretrain", f"--data.train_file={texts(tmp_path)}", "--dry-run"]
    said = run(tmp_path, sys.executable, *launcher, TRAIN, *words)
    assert said.count("plan for minigpt_medium on ") == 1
    assert not list((tmp_path / "workspace").glob("runs/*/*/attempts/*/events.jsonl"))


def test_the_guides_import_prints_the_configuration():
    code = "from config.training_config import get_medium_config; get_medium_config()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=builders.CODE, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^parameters +58491392$", done.stdout, re.MULTILINE)
