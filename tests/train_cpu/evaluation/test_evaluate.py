"""`evaluate`: the figures of a finished model are those that its run has logged."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import ResourceError
from launch.commands.model import evaluate
from launch.commands.model import finished as finished_models
from launch.schema.result import Evaluation
from tests import builders

TRAINING = {"num_train_epochs": 2, "learning_rate": 0.01, "eval_steps": 6}
ASKED = {"exact_match_rows": 10, "max_new_tokens": 12}


def run(folder: Path, shape: str = "llama-tiny", *words: str, **sections: Any) -> Path:
    sections = {"training": TRAINING, "evaluation": ASKED, **sections}
    recipe = builders.recipe(folder, shape, **sections)
    done = builders.launch(folder / "workspace", "run", str(recipe), *words)
    assert done.returncode == 0, done.stderr + done.stdout
    return builders.only_run(folder / "workspace")


def evaluated(workspace: Path, *words: object) -> dict[str, Any]:
    done = builders.launch(workspace, "evaluate", *map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.keys() == {field.name for field in fields(Evaluation)}
    return figures


def same_as_logged(run: Path, figures: dict[str, Any]) -> None:
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    assert figures["loss"] == pytest.approx(outcome["eval_loss"], abs=1e-6)
    assert figures["exact_match"] == outcome["exact_match_after"]
    assert figures["bleu"] == 100 * outcome["bleu_after"]


def test_a_run_is_evaluated_as_it_has_evaluated_itself(finished):
    folder, _ = finished
    run = builders.only_run(folder / "workspace")
    figures = evaluated(folder / "workspace", run, "--file", folder / "valid.parquet")
    same_as_logged(run, figures)
    assert figures["bleu"] > 0 and 0 < figures["rouge_l"] < 100
    assert (figures["rows"], figures["questions"], figures["notes"]) == (10, 10, [])
    assert 0 < figures["rows_at_once"] <= 10


def test_a_t5_is_evaluated_as_its_run_which_its_folder_names(tmp_path):
    asked = {**ASKED, "exact_match_rows": 500}
    trained = run(tmp_path, "t5-tiny", data={"max_length": 128}, evaluation=asked)
    scored = "evaluation.exact_match_rows 500: 10 are scored, all held-out rows with an answer"
    assert scored in (trained / "attempts/01/train.log").read_text()
    words = (tmp_path / "model", "--file", tmp_path / "valid.parquet")
    same_as_logged(trained, evaluated(tmp_path / "workspace", *words))


@pytest.mark.modes
def test_an_adapter_on_4_bits_is_evaluated_as_its_run_with_packed_rows(finished, tmp_path):
    base = shutil.copytree(finished[0] / "model", tmp_path / "base")
    (base / "lowmem.json").unlink()
    words = (f"--model.path={base}", "--lora.r=4", "--quantization.load_in_4bit=true")
    words += ("--data.packing=true", "--training.bf16=true", "--tokenizer.add_tokens=[<|new|>]")
    trained = run(tmp_path, "llama-tiny", *words)
    assert (tmp_path / "model/adapter_config.json").is_file()
    same_as_logged(
        trained, evaluated(tmp_path / "workspace", trained, "--file", tmp_path / "valid.parquet")
    )


def test_texts_have_a_loss_alone_and_each_row_that_does_not_fit_is_counted(finished):
    folder, _ = finished
    (folder / "base").mkdir()
    for file in (folder / "model").iterdir():  # a model of no run of ours
        if file.name != "lowmem.json":
            shutil.copy(file, folder / "base" / file.name)
    (folder / "base/chat_template.jinja").unlink()
    texts = folder / "texts.txt"
    texts.write_text("red blue\n\nstone river\n", encoding="utf-8")
    figures = evaluated(folder / "workspace", folder / "base", "--file", texts)
    assert (figures["rows"], figures["questions"], figures["exact_match"]) == (2, 0, None)
    (note,) = figures["notes"]
    assert note == f"{texts} holds texts, and no questions: the loss is all there is"
    rows = [("1: red", "blue " * 99), ("2: " + "red " * 99, "x"), ("3: red", "")]
    lines = [json.dumps({"q": prompt, "a": answer}) for prompt, answer in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    words = ("--data.prompt_column=q", "--data.response_column=a", "--data.max_length=32")
    figures = evaluated(
        folder / "workspace", folder / "base", "--file", folder / "rows.jsonl", *words
    )
    counted = (figures["rows"], figures["rows_truncated"], figures["rows_left_out"])
    assert counted == (3, 1, 2)
    without_template, truncated, left_out = figures["notes"]
    assert f"{folder / 'base'} has none: a line for each turn" in without_template
    assert "--tokenizer.chat_template=chatml" in without_template
    assert truncated.startswith("1 of 3 rows: longer than data.max_length 32")
    assert left_out.startswith("2 of 3 rows: no target within data.max_length 32")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "0 rows: the file is empty"),
        ('{"prompt": "red", "response": ""}', "no row has a target to train on (1 read"),
        ("garbage{", "rows.jsonl:1: is not JSON"),
        ('{"q": "red", "a": "blue"}', "add --data.prompt_column=q --data.response_column=a"),
        (None, "there is no such file"),
    ],
)
def test_a_file_that_cannot_be_evaluated_is_named_with_what_to_do(
    finished, tmp_path, content, expected
):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    words = (str(finished[0] / "model"), "--file", str(tmp_path / "rows.jsonl"))
    done = builders.launch(finished[0] / "workspace", "evaluate", *words)
    assert done.returncode == 4, done.stderr
    assert str(tmp_path / "rows.jsonl") in done.stderr and expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_fit_is_refused_with_the_sizes_before_it_is_loaded(finished):
    model = finished_models.find(finished[0] / "model")
    stored = (finished[0] / "model/model.safetensors").stat().st_size
    assert finished_models.weights_bytes(model) == pytest.approx(stored, rel=0.01)
    machine = builders.machine(host_available_bytes=100 << 10)
    with pytest.raises(
        ResourceError, match=r"its weights take 9\d\d.\d KiB, and 100.0 KiB of host"
    ):
        evaluate.free_bytes(model, machine)
    on_card = builders.machine(cards=(builders.gpu(free_bytes=100 << 10),))
    with pytest.raises(ResourceError, match=r"100.0 KiB on RTX 3080 are free"):
        evaluate.free_bytes(model, on_card)


def test_tasks_of_the_harness_are_given_to_its_program_or_to_be_installed(finished, tmp_path):
    folder = finished[0]
    words = ("evaluate", str(folder / "model"), "--tasks", "piqa,arc_easy")
    refused = builders.launch(folder / "workspace", *words, PATH="/usr/bin:/bin")
    assert refused.returncode == 3
    assert 'type python -m pip install "lm-eval[hf]"' in refused.stderr
    program = tmp_path / "lm_eval"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:])\nsys.exit(7)\n")
    program.chmod(0o755)
    done = builders.launch(folder / "workspace", *words, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 7
    arguments = f"pretrained={folder / 'model'},tokenizer={folder / 'model'},dtype=float32"
    assert done.stdout == f"--model hf --model_args {arguments} --tasks piqa,arc_easy\n"
