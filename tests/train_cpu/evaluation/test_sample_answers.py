"""evaluation.sample_answers: greedy answers at each evaluation, which change nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests import builders

TRAINING = {"num_train_epochs": 10, "learning_rate": 0.01, "eval_steps": 15}
ROWS = {"data": {"max_length": 128}, "evaluation": {"sample_answers": 2, "max_new_tokens": 16}}


def answers(run: Path) -> list[dict[str, object]]:
    files = sorted(run.glob("attempts/*/answers.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.modes
def test_the_last_answers_are_those_of_the_exported_model_whose_weights_are_as_without(tmp_path):
    recipe = str(builders.recipe(tmp_path, "t5-tiny", training=TRAINING, **ROWS))
    done = builders.launch(tmp_path / "with", "run", recipe)
    assert done.returncode == 0, done.stderr + done.stdout
    run = builders.only_run(tmp_path / "with")
    written = answers(run)
    assert [record["step"] for record in written] == [15, 30, 45, 60]
    assert len({tuple(record["texts"]) for record in written}) > 1  # the model has learned
    questions = json.loads((run / "questions.json").read_text())["questions"]
    held_out = builders.rows(10, seed=1)
    assert {q["prompt"]: q["reference"] for q in questions}.items() <= {
        row["prompt"]: row["response"] for row in held_out
    }.items()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    for question, text in zip(questions, written[-1]["texts"], strict=True):
        ids = tokenizer(question["prompt"], add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([[*ids, tokenizer.eos_token_id]])
        output = model.generate(input_ids=inputs, max_new_tokens=16, do_sample=False)
        expected = tokenizer.decode(output[0], skip_special_tokens=True)
        assert expected.startswith(text) or text.startswith(expected)  # fewer tokens fit the rows
    page = (run / "report.html").read_text()
    assert "<h2>Sample answers</h2>" in page and "step 60" in page
    without = ["--evaluation.sample_answers=0", f"--output_dir={tmp_path / 'other'}"]
    done = builders.launch(tmp_path / "without", "run", recipe, *without)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not answers(builders.only_run(tmp_path / "without"))
    tensors = builders.weights(tmp_path / "other")
    for name, tensor in builders.weights(tmp_path / "model").items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.campaign
@pytest.mark.modes
def test_two_ranks_answer_alone_under_ddp_and_together_under_zero_3(tmp_path):
    training = {"eval_steps": 4, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    recipe = str(builders.recipe(tmp_path, training=training, **ROWS))
    for mode in ("multi_cpu", "deepspeed_zero3"):
        words = ["--launch.num_processes=2", f"--launch.mode={mode}"]
        output = f"--output_dir={tmp_path / mode}"
        done = builders.launch(tmp_path / f"w-{mode}", "run", recipe, *words, output)
        assert done.returncode == 0, done.stderr + done.stdout
        record, *_ = answers(builders.only_run(tmp_path / f"w-{mode}"))
        assert record["step"] == 4 and len(record["texts"]) == 2
