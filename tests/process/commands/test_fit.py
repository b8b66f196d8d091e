"""`python -m launch fit`, and the page that is generated with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from launch.plan import fit
from launch.probe import described
from launch.probe.import_memory import ASSUMED_CUDA
from launch.report import fit_table
from scripts import render_fit
from tests import builders
from tests.process.forked_starts import launch

MACHINE = ("--gpu", "RTX 3090", "--ram", "64")


def test_the_table_of_three_cards_asks_for_as_many_micro_batches_as_its_lines_train():
    assert [
        f"tokens, {steps} of them" in fit_table.legend(cards)[0]
        for cards, steps in ((1, 4), (2, 4), (3, 3), (4, 4), (6, 6))
    ] == 5 * [True]
    recipe = fit.recipe_of("llama-tiny", "lora", 512, half=False, gpus=3)
    assert recipe.training.gradient_accumulation_steps == 1


def test_what_cannot_fit_is_not_traced_and_the_table_has_100_columns_on_a_terminal(tmp_path):
    argv = ("fit", "--gpu", "RTX 3090", "--ram", "16", "--model=llama3.1-70b")
    done = launch(tmp_path, *argv, LOWMEM_TRACES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].rstrip() == "1x RTX 3090, 16.00 GiB of RAM: what fits"
    legend = fit_table.legend(1)
    assert lines[-len(legend) :] == list(legend)
    program = [sys.executable, "-m", "launch", *argv]
    screen = builders.on_terminal(program, tmp_path, LOWMEM_TRACES=str(tmp_path))
    assert max(map(len, re.sub(r"\x1b\[\S*?[mK]|\r.*\r", "", screen).splitlines())) <= 100
    rows = [line for line in lines if "llama3.1-70b" in line]
    assert len(rows) == len(fit.METHODS)
    for row in rows:
        assert re.search(r" all  .*short by at least [\d,.]+ GiB (on the card|of host RAM) \(", row)
    assert "tracing" not in done.stderr
    assert "predicted, not measured" in done.stdout
    assert not list(tmp_path.glob("*.log"))


def test_progress_is_one_line_of_a_terminal_that_is_rewritten_and_none_of_a_pipe(tmp_path):
    argv = ("fit", *MACHINE, "--model=minigpt-medium", "--length=64")
    screen = builders.on_terminal(
        [sys.executable, "-m", "launch", *argv], tmp_path, LOWMEM_TRACES=str(tmp_path / "traces")
    )
    progress, table = screen.split("1x RTX 3090", 1)
    assert "\r\x1b[Ktracing 1 step(s) of minigpt-medium" in progress
    assert "\r\x1b[K3 of 3: minigpt-medium qlora 64\r\x1b[K" in progress
    assert "\n" not in progress and "tracing" not in table
    done = launch(tmp_path, *argv, LOWMEM_TRACES=str(tmp_path / "others"))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_no_question_of_memory_is_said_with_its_reason(tmp_path):
    argv = ("--model=gpt2-small", "--length=4096")
    done = launch(tmp_path, "fit", *MACHINE, *argv, LOWMEM_TRACES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("-   data.max_length 4096, but the model has 1024 positions") == 3


@pytest.mark.parametrize(
    ("card", "ram_gib", "model", "key"),
    [
        ("RTX 4090", 32, "qwen2.5-3b", r"--training\.optim=adamw_8bit \(single_gpu, "),
        (
            "RTX 3060",
            34,
            "qwen2.5-1.5b",
            r"--launch\.host_reserve_gib=1\.\d \(deepspeed_zero2_offl",
        ),
    ],
)
def test_a_reason_names_what_is_short_and_a_key_that_helps(card, ram_gib, model, key):
    machine = described.from_words(card, 1, ram_gib)
    traces = Path(os.environ["LOWMEM_TRACES"])
    (row,) = fit.fits(machine, ASSUMED_CUDA, traces, (model,), ("full",), (512,))
    assert row.chosen is None
    lacks = row.shortage.removeprefix("short by at least ")
    on_card, on_host = sorted(lacks.split(" or "), key=len)
    assert re.fullmatch(r"0\.\d\d GiB on the card \(single_gpu\)", on_card)
    assert re.fullmatch(r"[\d.]+ GiB of host RAM \(zero2_offload\)", on_host)
    assert re.match(key, row.fits_with)


def test_where_a_card_has_no_bf16_the_shortage_of_float32_weights_is_told(tmp_path):
    machine = described.from_words("T4", 1, 64)
    (row,) = fit.fits(machine, ASSUMED_CUDA, tmp_path, ("llama3.1-70b",), ("full",), (512,))
    assert row.shortage.startswith("short by at least ") and not row.refused


def test_a_table_says_that_a_card_without_bf16_computes_in_fp16(tmp_path):
    machine = described.from_words("T4", 1, 64)
    traces = Path(os.environ["LOWMEM_TRACES"])
    rows = [*fit.fits(machine, ASSUMED_CUDA, traces, ("qwen2.5-0.5b",), ("lora",), (512,))]
    assert fit_table.margin_line(rows).endswith(". fp16 autocast: this card has no bf16.")


@pytest.mark.modes
@pytest.mark.parametrize("method", fit.METHODS)
def test_the_line_of_a_row_makes_the_plan_that_the_row_shows(tmp_path, method):
    argv = (*MACHINE, "--model=minigpt-medium", "--length=512")
    done = launch(tmp_path, "fit", *argv, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = (row for row in json.loads(done.stdout)["fits"] if row["method"] == method)
    lines = launch(tmp_path, "fit", *argv, "--lines").stdout.splitlines()
    assert row["line"] in lines
    program, words = shlex.split(row["line"])[:4], shlex.split(row["line"])[4:]
    assert program == ["python", "-m", "launch", "run"]
    # rows of one length, no matter which, without held-out ones
    alike = (
        "--model.attn_implementation=sdpa",
        "--data.validation_file=null",
        "--data.batch_by_tokens=null",
    )
    planned = launch(tmp_path, "plan", *words, *alike, *MACHINE, "--rows-of=512", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    for key in ("mode", "per_device_train_batch_size", "gradient_accumulation_steps", "levers"):
        assert row["strategy"][key] == plan["strategy"][key]
    assert row["budget_bytes"] == plan["budget_bytes"]
    estimate = plan["estimate"]
    total = sum(estimate["peak"]["parts"].values()) + estimate["outside_bytes"]
    assert row["device_bytes"] == total + estimate["fragmentation_bytes"]
    batch = plan["strategy"]["per_device_train_batch_size"]
    tokens = 512 * batch * plan["strategy"]["gradient_accumulation_steps"]
    assert row["tokens_per_s"] == pytest.approx(tokens / plan["seconds_per_step"])
    least, most = row["tokens_per_s_range"]
    assert least < row["tokens_per_s"] < most


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
        rows = written.splitlines()[2:]  # and a blank line and the margin
        assert len(methods) + 2 <= len(rows) <= len(methods) * len(fit.LENGTHS) + 2
        assert [row for row in rows if row not in sections[card].splitlines()] == []
