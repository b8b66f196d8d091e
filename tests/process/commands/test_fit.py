"""`python -m launch fit`, and the page that is generated with it."""

from __future__ import annotations

import json
import re
import sys

import pytest

from launch.plan import fit
from launch.report import fit_table
from scripts import render_fit
from tests import builders
from tests.builders import launch

MACHINE = ("--gpu", "RTX 3090", "--ram", "64")


def test_what_cannot_fit_is_not_traced_and_the_table_has_100_columns_on_a_terminal(tmp_path):
    argv = ("fit", *MACHINE, "--model=llama3.1-70b")
    done = launch(tmp_path, *argv, LOWMEM_TRACES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-len(fit_table.LEGEND) :] == list(fit_table.LEGEND)
    program = [sys.executable, "-m", "launch", *argv]
    screen = builders.on_terminal(program, tmp_path, LOWMEM_TRACES=str(tmp_path))
    assert max(map(len, re.sub(r"\x1b\[\S*?m|\r.*\r", "", screen).splitlines())) <= 100
    assert sum("llama3.1-70b" in line for line in lines) == len(fit.METHODS)
    assert "tracing" not in done.stderr
    assert "predicted, not measured" in done.stdout
    assert not list(tmp_path.glob("*.log"))


def test_what_is_no_question_of_memory_is_said_with_its_reason(tmp_path):
    argv = ("--model=gpt2-small", "--length=4096")
    done = launch(tmp_path, "fit", *MACHINE, *argv, LOWMEM_TRACES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "No question of memory: gpt2-small full at 4,096 tokens, gpt2-small LoRA" in said
    assert said.count("but the model has 1024 positions") == 1


@pytest.mark.modes
def test_a_training_that_fits_is_what_the_plan_of_its_recipe_says(tmp_path):
    argv = (*MACHINE, "--model=minigpt-medium", "--length=512", "--json")
    done = launch(tmp_path, "fit", *argv)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout)["fits"]}
    assert [rows[method]["fits"] for method in fit.METHODS] == [True] * 3
    recipe = fit.recipe_of("minigpt-medium", "lora", 512, half=False)
    sections = recipe.model_dump(mode="json", exclude_defaults=True)
    file = builders.recipe(
        tmp_path / "recipe",
        "minigpt-medium",
        model=sections["model"] | {"attn_implementation": "sdpa"},
        lora=sections["lora"],
        data={"max_length": 512, "validation_file": None},
        training=sections["training"] | {"save_steps": 500, "logging_steps": 10},
    )
    planned = launch(tmp_path, "plan", str(file), *MACHINE, "--rows-of=512", "--json")
    assert planned.returncode == 0, planned.stderr
    plan, row = json.loads(planned.stdout), rows["lora"]
    for key in ("mode", "per_device_train_batch_size", "levers"):
        assert row["strategy"][key] == plan["strategy"][key]
    assert row["budget_bytes"] == plan["budget_bytes"]
    estimate = plan["estimate"]
    total = sum(estimate["peak"]["parts"].values()) + estimate["outside_bytes"]
    assert row["device_bytes"] == total + estimate["fragmentation_bytes"]
    tokens = 512 * plan["strategy"]["per_device_train_batch_size"] * 4
    assert row["tokens_per_s"] == pytest.approx(tokens / plan["seconds_per_step"])


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--gpu", "RTX 3091", "--ram", "64"), 2, "no such card in configs/cards.yaml"),
        ((*MACHINE, "--model=qwen2.5-8b"), 2, "no such shape in configs/models; nearest: qwen2.5"),
        ((*MACHINE, "--length=0"), 2, "--length 0: expected tokens from 8"),
        (("sft",), 2, "fit: sft was not expected"),
        (("--machine", str(builders.CODE / "configs/machines/cpu.yaml")), 3, "there is no GPU"),
    ],
)
def test_a_mistake_is_a_line(tmp_path, argv, code, said):
    done = launch(tmp_path, "fit", *argv)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert said in done.stderr


@pytest.mark.modes
def test_the_page_is_what_its_generator_writes(monkeypatch):
    """Text and legend, and of a card the rows of the smallest and of the largest model."""
    text = render_fit.FILE.read_text(encoding="utf-8")
    sections = render_fit.sections_of(text)
    assert render_fit.page(sections) == text
    monkeypatch.setenv("LOWMEM_TRACES", builders.TRACES["LOWMEM_TRACES"])
    card = next(gpu for gpu in render_fit.CARDS if gpu in sections)
    for model, methods in (
        (render_fit.MODELS[0], ("qlora",)),
        (render_fit.MODELS[-1], fit.METHODS),
    ):
        written = render_fit.fit_table.markdown(render_fit.answers(card, (model,), methods))
        rows = written.splitlines()[2:]
        assert len(rows) == len(methods)
        assert [row for row in rows if row not in sections[card].splitlines()] == []
