"""What a run leaves: a model that learned, in an ordinary folder; a log that says how."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from launch.run_folder import sample_audit
from launch.run_folder import steps as run_folder_steps
from launch.run_folder.layout import RunDir
from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer as data_tokenizer
from training.data.batches import TokenRows


def trained(tmp_path, *words: str, **sections) -> subprocess.CompletedProcess[str]:
    done = builders.launch(
        tmp_path / "workspace", "run", str(builders.recipe(tmp_path, **sections)), *words
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def test_a_run_and_a_chat_leave_no_folder_of_compiled_code_at_a_name_that_others_can_take(finished):
    folder, _ = finished
    chat = [sys.executable, str(builders.CODE / "scripts/chat.py"), str(folder / "model"), "1: red"]
    env = builders.environment(folder / "workspace", TMPDIR=str(folder / "tmp"))
    done = subprocess.run(chat, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (own,) = (folder / "tmp").iterdir()
    assert (own.name, own.stat().st_mode & 0o777) == (f"lowmem-{os.geteuid()}", 0o700)
    assert (own / "inductor").is_dir()


def test_the_schedule_is_in_the_log_and_a_checkpoint_is_written_every_save_steps_across_epochs(
    finished,
):
    folder, _ = finished
    run = builders.only_run(folder / "workspace")
    rates = [event["learning_rate"] for event in builders.events(run)]
    assert rates[:5] == pytest.approx([0, 2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert rates[5:] == pytest.approx([1e-2 * (48 - step) / 44 for step in range(5, 48)])
    saved = sorted(path.name for path in run.glob("checkpoints/checkpoint-*"))
    assert saved == ["checkpoint-000035", "checkpoint-000042", "checkpoint-000048"]
    log = next((folder / "workspace/logs").glob("chat_trainer_tiny-*.log")).read_text()
    for words in (
        "loss ",
        "lr 1.000e-02",
        "s/step",
        "samples/s",
        "tokens/s",
        "held-out loss",
        "plan for tiny",
    ):
        assert words in log
    assert list(run.glob("tensorboard/events.out.tfevents.*"))
    assert "<svg" in (run / "report.html").read_text()


def test_a_response_that_does_not_fit_is_counted_and_the_end_token_is_learned(finished):
    folder, said = finished
    assert "45 rows" in said
    assert "2 left out (no target to train on)" in said
    run = RunDir(builders.only_run(folder / "workspace"))
    cache = Path(json.loads(run.tokens_file.read_text())["folder"]) / "train.arrow"
    tokenizer = AutoTokenizer.from_pretrained(cache.parent / "tokenizer")
    responses = {row["response"] for row in builders.rows(45)}
    for row in TokenRows(cache):
        targets = [label for label in row.labels.tolist() if label != -100]
        assert targets[-1] == tokenizer.eos_token_id
        assert row.input_ids[-len(targets) :].tolist() == targets
        assert tokenizer.decode(targets, skip_special_tokens=True) in responses


def test_what_was_measured_equals_what_was_predicted_for_model_states(finished):
    run = builders.only_run(finished[0] / "workspace")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    estimate = json.loads((run / "plan.json").read_text())["estimate"]
    for name in ("weights_bytes", "gradients_bytes"):
        assert outcome[name] == estimate[name]
    # scalar step counters
    assert outcome["optimizer_bytes"] == pytest.approx(estimate["optimizer_bytes"], abs=4 * 100)
    assert math.isfinite(outcome["loss"])
    assert outcome["host_pss_bytes"] > 100 << 20


def test_three_like_runs_correct_the_next_plan_by_what_they_took(finished, tmp_path):
    """The run is written down three times, as if it had been trained so often: alone on the
    machine, and beside others."""
    folder, _ = finished
    cache = tmp_path / "workspace/.cache"
    shutil.copytree(folder / "workspace/.cache", cache)
    (line,) = (cache / "ledger.jsonl").read_text().splitlines()
    entry = json.loads(line)
    took, predicted = (entry[side]["step_s"] for side in ("measured", "predicted"))
    assert 0 < entry["core_share"] <= 1
    plan = ("plan", str(folder / "tiny.yaml"), "--explain")
    before = builders.launch(cache.parent, *plan).stdout
    beside_others, after = (
        _planned_after(cache, plan, {**entry, "core_share": share}) for share in (0.5, 1.0)
    )
    assert "corrected x" not in beside_others
    assert "corrected x" not in before
    factor = took * entry["correction"] / predicted
    assert f"corrected x {factor:.3g}, the median of 3 runs of this model by cpu" in after
    assert re.search(r" s \([\d.]+ to [\d.]+\) predicted x 48 steps", after)
    found = json.loads(builders.launch(cache.parent, *plan[:2], "--json").stdout)
    slowdown = found["seconds_correction"]["slowdown"]  # other tests have the cores
    assert found["seconds_per_step"] == pytest.approx(took * slowdown)


def _planned_after(cache: Path, plan: Sequence[str], entry: Mapping[str, Any]) -> str:
    (cache / "ledger.jsonl").write_text(f"{json.dumps(entry)}\n" * 3)
    return builders.launch(cache.parent, *plan).stdout


def padding_by_the_data(run: RunDir) -> float:
    """Share of padding in the micro-batches of one rank, without those of the first two steps."""
    tokens = Path(json.loads(run.tokens_file.read_text())["folder"]) / "train.arrow"
    lengths = [len(row) for row in datasets.Dataset.from_file(str(tokens))["input_ids"]]
    size = run.read_plan().strategy.per_device_train_batch_size
    steady = [
        rows
        for step, rows in sample_audit.taken(run).items()
        if step > run_folder_steps.STEADY_FROM
    ]
    batches = [
        [lengths[row] for row in rows[at : at + size]]
        for rows in steady
        for at in range(0, len(rows), size)
    ]
    return 1 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)


@pytest.mark.modes
def test_a_run_is_compared_with_one_that_has_less_padding(finished, tmp_path):
    folder, _ = finished
    words = ["--name=grouped", "--data.group_by_length=true", f"--output_dir={tmp_path / 'model'}"]
    words += [
        "--training.per_device_train_batch_size=2",
        "--training.gradient_accumulation_steps=4",
        "--data.batch_by_tokens=false",  # as many rows in each micro-batch
    ]
    done = builders.launch(folder / "workspace", "run", str(folder / "tiny.yaml"), *words)
    assert done.returncode == 0, done.stderr + done.stdout
    compared = builders.launch(folder / "workspace", "compare", "tiny", "grouped")
    assert compared.returncode == 0, compared.stderr
    assert "differs: data.group_by_length: A False, B True\n" in compared.stdout
    assert "effective batch\n" in compared.stdout
    table = {
        line[:38].strip(): line[38:].split()
        for line in compared.stdout.splitlines()
        if line.startswith("  ")
    }
    for at, name in enumerate(("tiny", "grouped")):
        run = RunDir(builders.only_run(folder / "workspace", name))
        steady = builders.events(run.root)[run_folder_steps.STEADY_FROM :]
        assert len(steady) == 46
        rate = sum(step["tokens"] for step in steady) / sum(step["seconds"] for step in steady)
        assert float(table["non-padding tokens/s"][at].replace(",", "")) == pytest.approx(
            rate, abs=0.5
        )
        assert float(table["padding, of the tokens computed"][at][:-1]) == pytest.approx(
            100 * padding_by_the_data(run), abs=0.05
        )
        shares = (
            "wall time: busy with steps",
            "waiting for data",
            "evaluations",
            "saves, logs, steps that were lost",
        )
        assert sum(float(table[share][at][:-1]) for share in shares) == pytest.approx(100, abs=0.2)
        held_out = json.loads((run.attempts()[-1].outcome_file).read_text())["eval_loss"]
        assert table["held-out loss at 360 samples"][at] == f"{held_out:.4f}"
    padding = [float(share[:-1]) for share in table["padding, of the tokens computed"]]
    assert padding[1] < padding[0] / 2
    tokens = table["non-padding tokens of 360 samples"]
    assert tokens[0] == tokens[1]
    page = Path(compared.stdout.splitlines()[-1].removeprefix("page: "))
    assert page.read_text().count('class="curve"') == 3  # training loss, held-out loss, tokens/s


@pytest.mark.modes
def test_a_flipped_bit_in_the_tokenised_rows_is_not_trained_on(tmp_path):
    sections = {"training": {"max_steps": 2, "save_steps": 100}}
    trained(tmp_path, **sections)
    before = builders.weights(tmp_path / "model")
    (cache,) = (tmp_path / "workspace/.cache/tokens").glob("*/train.arrow")
    content = bytearray(cache.read_bytes())
    content[len(content) // 2] ^= 1
    cache.write_bytes(content)
    done = trained(tmp_path, "--resume", "never", **sections)
    assert "train.arrow was changed after it was written): tokenising again" in done.stdout
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in builders.weights(tmp_path / "model").items()
    )


@pytest.mark.modes
def test_lora_on_a_local_folder_leaves_an_adapter_and_touches_no_base_weight(finished, tmp_path):
    base = finished[0] / "model"
    before = {name: tensor.clone() for name, tensor in builders.weights(base).items()}
    recipe = builders.recipe(tmp_path, training={"max_steps": 3}, lora={"r": 4})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe), f"--model.path={base}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "model/adapter_model.safetensors").exists()
    assert not (tmp_path / "model/model.safetensors").exists()
    assert all(torch.equal(tensor, builders.weights(base)[name]) for name, tensor in before.items())
    chat = subprocess.run(
        [sys.executable, str(builders.CODE / "scripts/chat.py"), str(tmp_path / "model"), "1: red"],
        env=builders.environment(tmp_path / "workspace"),
        capture_output=True,
        text=True,
    )
    assert chat.returncode == 0, chat.stderr


@pytest.mark.modes
def test_a_base_model_without_a_chat_template_is_trained_exported_and_asked_with_one_line_a_turn(
    tmp_path,
):
    base, talk = (
        tmp_path / "base",
        [
            ("user", "1+1?"),
            ("assistant", "two"),
            ("user", "2+1?"),
            ("assistant", "three"),
        ],
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=600, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(base)
    made = data_tokenizer.train(
        (row["prompt"] for row in builders.rows(50)), TokenizerSection(), 600
    )
    made.chat_template = None
    made.save_pretrained(base)
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]}] * 16
    section = {
        "train_file": str(builders.write_parquet(tmp_path / "talks.parquet", rows)),
        "validation_file": None,
    }
    training = {"max_steps": 40, "learning_rate": 5e-3, "save_steps": 100}
    model = {"shape": None, "path": str(base)}
    trained(tmp_path, data=section, training=training, model=model)
    lines = "1+1?\ntwo<|end|>\n2+1?\nthree<|end|>"
    (cache,) = (tmp_path / "workspace/.cache/tokens").glob("*/train.arrow")
    exported = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = TokenRows(cache)[0]
    assert exported.decode(row.input_ids.tolist()) == lines
    assert (
        exported.decode([label for label in row.labels.tolist() if label != -100])
        == "two<|end|>three<|end|>"
    )
    assert exported.apply_chat_template(rows[0]["messages"], tokenize=False) == lines
    chat = subprocess.run(
        [sys.executable, str(builders.CODE / "scripts/chat.py"), str(tmp_path / "model"), "1+1?"],
        env=builders.environment(tmp_path / "workspace"),
        capture_output=True,
        text=True,
    )
    assert (chat.returncode, chat.stdout) == (0, "two\n"), chat.stderr


@pytest.mark.modes
def test_a_cold_start_traces_the_longest_rows_and_its_own_and_writes_one_plan(tmp_path):
    """Two steps do not come to the longest row: their micro-batches have another length."""
    traces = tmp_path / "traces"
    recipe = builders.recipe(tmp_path, training={"max_steps": 2, "warmup_steps": 0})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe), LOWMEM_TRACES=str(traces))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^tracing (\d+) step\(s\) of", done.stdout, re.MULTILINE) == ["1", "1"]
    assert len(list(traces.glob("*.json"))) == 2
    run = RunDir(builders.only_run(tmp_path / "workspace"))
    assert max(run.read_plan().lengths) < run.read_recipe().data.max_length
    assert done.stdout.count("plan for tiny on") == 1
    assert "planned again" not in done.stdout
    assert [attempt.number for attempt in run.attempts()] == [1]


@pytest.mark.modes
def test_the_pasted_dry_run_line_trains_and_once_its_run_is_complete_no_more(tmp_path):
    recipe = builders.recipe(tmp_path, training={"max_steps": 3, "save_steps": 100})
    dry = builders.launch(tmp_path / "workspace", "run", str(recipe), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    line = dry.stdout.strip().splitlines()[-1]

    def paste() -> str:
        shell = {"cwd": "/", "env": {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-c", line], **shell)
        assert done.returncode == 0, done.stderr
        return done.stdout

    paste()
    trained = (tmp_path / "model/model.safetensors").read_bytes()
    assert "is complete; to start over: --resume never" in paste()
    assert (tmp_path / "model/model.safetensors").read_bytes() == trained


@pytest.mark.modes
def test_a_t5_with_its_encoder_frozen_trains_only_the_decoder_and_loads_as_an_ordinary_folder(
    tmp_path,
):
    section = {"shape": "t5-tiny", "freeze": ["shared", "encoder"]}
    done = trained(tmp_path, model=section, training={"max_steps": 4, "warmup_steps": 0})
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    # inputs end as those of the training do
    assert tokenizer.decode(tokenizer("山 blue")["input_ids"]) == "山 blue<|end|>"
    torch.manual_seed(23333)
    before = AutoModelForSeq2SeqLM.from_config(model.config).state_dict()
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed
    assert all(
        name.startswith("decoder.block") or name == "decoder.final_layer_norm.weight"
        for name in changed
    )
    assert "361,472 parameters" in done.stdout


@pytest.mark.modes
def test_pretraining_on_text_lowers_the_held_out_loss(tmp_path):
    lines = "".join(
        f"the {word} is {word}\n" for word in ("stone", "river", "lamp") for _ in range(60)
    )
    (tmp_path / "corpus.txt").write_text(lines)
    files = {
        "train_file": str(tmp_path / "corpus.txt"),
        "validation_file": str(tmp_path / "corpus.txt"),
    }
    trained(
        tmp_path, task="pretrain", data=files, training={"max_steps": 30, "learning_rate": 5e-3}
    )
    steps = builders.events(builders.only_run(tmp_path / "workspace"))
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
