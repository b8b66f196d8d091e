"""The result is told from what was measured, also where something was not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.report import plan_lines, run_end
from launch.schema.result import Failure, HeldOut, RunResult
from launch.schema.rows import ShownPart, ShownRow, ShownRows
from tests.builders import machine, plan, recipe_of

SUMMARY = {
    "step": 3,
    "train_seconds": 1.0,
    "model_dir": "/out",
    "loss": None,
    "eval_loss": None,
    "weights_bytes": 10,
    "gradients_bytes": None,
    "optimizer_bytes": 20,
    "offloaded_bytes": 0,
    "vram_allocated_bytes": 0,
}


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {"exact_match_before": 0.25, "exact_match_after": 0.5},
            "exact match 25.0 % before, 50.0 % after",
        ),
        # continued from another run's checkpoint
        ({"exact_match_after": 0.5}, "exact match 50.0 % after"),
        ({}, None),
    ],
)
def test_answers_are_told_as_far_as_they_were_scored(scores, words):
    recipe, on = recipe_of(), machine()
    result = RunResult("/run", 0, None, 2.0, 1 << 30, {**SUMMARY, **scores})
    lines = run_end.result_lines(recipe, on, plan(recipe, on), result, ["chat"])
    answers = [line for line in lines if "answers" in line]
    assert answers == [] if words is None else words in answers[0]
    assert not any(line.strip() == "loss" for line in lines)
    assert "gradients not measured" in "\n".join(lines)
    told = [("batch 8", "the GPU ran out <of> memory")] * 2
    held_out = [HeldOut(step, 8 * step, 3.0 - step, 0.1, 1.0) for step in (1, 2)]
    made = plan(recipe, on)
    page = run_end.html(recipe, on, made, result, evaluations=held_out, attempts=told)
    assert "complete" in page
    assert "  chat " not in page
    assert "held out</span>" in page
    assert page.count("<td>batch 8</td><td>the GPU ran out &lt;of&gt; memory</td>") == 2


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        (None, "done: 3 steps in 1 s (2 s in all)"),
        ("/run/checkpoints/checkpoint-2", "done: 3 steps, those since checkpoint-2 in 1 s (2 s in"),
    ],
)
def test_the_seconds_of_a_run_that_went_on_are_of_the_steps_since_its_checkpoint(begun, words):
    recipe, on = recipe_of(), machine()
    result = RunResult("/run", 0, None, 2.0, 1 << 30, {**SUMMARY, "resumed_from": begun})
    assert run_end.result_lines(recipe, on, plan(recipe, on), result, ["chat"])[0].startswith(words)


def test_the_page_shows_rows_with_their_loss_and_escapes_their_texts():
    recipe, on = recipe_of(), machine()
    result = RunResult("/run", 0, None, 2.0, 1 << 30, SUMMARY)
    parts = [ShownPart("<script>a</script>", False), ShownPart("<b>\x1b[31myes", True)]
    rows = ShownRows(
        template="of </td>a folder",
        rows=[
            ShownRow("a.jsonl:1", parts, 9, 4, is_truncated=True, has_escapes=True),
            ShownRow("a.jsonl:2", [], left_out="no answer in it has a loss"),
        ],
        num_read=40,
        left_out={"no answer in it has a loss": 1},
        num_truncated=3,
        num_targets=100,
        lengths=list(range(1, 41)),
        methods={"marks": 40},
        contents={"user messages": 40},
        bad=["a.jsonl:3: is not <JSON>"],
        num_bad=7,
    )
    page = run_end.html(recipe, on, plan(recipe, on), result, summary=rows)
    section = page.partition("<h2>Data</h2>")[2].partition("<summary>Plan")[0]
    assert "&lt;script&gt;a&lt;/script&gt;<b>&lt;b&gt;" in section
    assert page.count("<script>") == 1 and "<script>a" not in page  # the page's own
    assert "\x1b" not in page and "of &lt;/td&gt;a folder" in section
    assert "a.jsonl:1: 9 tokens, 4 with a loss, truncated at" in section
    assert "a.jsonl:2: left out, no answer in it has a loss" in section
    assert "the first 40 were read, 1 left out (no answer" in section
    assert "7 bad rows left out" in section and "a.jsonl:3: is not &lt;JSON&gt;" in section
    assert section.count('<i style="width:100.0%">') == 8
    assert "A backslash before" in section
    without = run_end.html(recipe, on, plan(recipe, on), result)
    assert "class=tokens" not in without and "train.parquet" in without


def test_the_loss_of_the_exported_weights_is_told():
    recipe, on = recipe_of(), machine()
    summary = {**SUMMARY, "exported_step": 10, "exported_eval_loss": 7.5923}
    lines = run_end.result_lines(
        recipe, on, plan(recipe, on), RunResult("/run", 0, None, 2.0, 1 << 30, summary), ()
    )
    assert any("7.5923 on them at step 10, whose weights these are" in line for line in lines)


def test_columns_that_are_not_read_have_a_line_in_the_plan():
    recipe, on = recipe_of(), machine()
    made = plan(recipe, on)
    noted = replace(
        made,
        data_format=replace(made.data_format, notes=("columns that are not read: url, score",)),
    )
    assert "             columns that are not read: url, score" in plan_lines.full_text(
        recipe, on, noted
    )


def test_a_constant_rate_has_no_warm_up():
    recipe, on = (
        recipe_of(training={"lr_scheduler_type": "constant", "warmup_steps": 100, "max_steps": 3}),
        machine(),
    )
    words = "\n".join(plan_lines.full_text(recipe, on, plan(recipe, on)))
    assert "constant, no warm-up, max_length" in words
    assert "training.warmup_steps 100 has no effect" in words
    assert "never reaches" not in words


def test_a_step_of_warm_up_alone_learns_nothing_and_plan_and_report_say_so():
    on, words = machine(), "whose learning rate is 0, so that nothing is learned"
    for warmup, says_so in ((0.03, True), (1, True), (0, False)):
        recipe = recipe_of(training={"max_steps": 1, "warmup_steps": warmup})
        made = plan(recipe, on)
        result = RunResult("/run", 0, None, 2.0, 1 << 30, SUMMARY)
        end = run_end.result_lines(recipe, on, made, result, ())
        for told in (plan_lines.full_text(recipe, on, made), end):
            assert any(words in line for line in told) == says_so


@pytest.mark.parametrize(
    ("lora", "rate", "is_low"),
    [({"r": 8}, 3e-5, True), ({"r": 8}, 1e-4, False), (None, 3e-5, False)],
    ids=str,
)
def test_a_low_rate_for_lora_has_a_line_in_the_plan_and_stays(lora, rate, is_low):
    recipe, on = recipe_of(lora=lora, training={"learning_rate": rate}), machine()
    words = "\n".join(plan_lines.full_text(recipe, on, plan(recipe, on)))
    low = "training.learning_rate 3e-05 is low for LoRA, which usually takes about 0.0002"
    assert (low in words) == is_low
    assert f"rate {rate:g}" in words


@pytest.mark.parametrize(
    ("section", "words"), [("evaluation", ["  where  in evaluation at step 120"]), ("", [])]
)
def test_a_failure_says_in_which_section_it_came(section, words):
    recipe, on = recipe_of(), machine()
    failure = Failure(
        "device_oom", 12, "the GPU ran out of memory", "CUDA out of memory", "halve it", section
    )
    result = RunResult("/run", 12, failure, 2.0, 1 << 30, last_step=120)
    lines = run_end.result_lines(recipe, on, plan(recipe, on), result, ["chat"])
    assert [line for line in lines if line.startswith("  where")] == words
