"""The result is told from what was measured, also where something was not."""

from __future__ import annotations

import pytest

from launch import report
from launch.schema import Failure, RunResult
from tests.builders import machine, plan, wish

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
        ({"exact_match_before": 0.25, "exact_match_after": 0.5}, "exact match 25.0 % before, 50.0 % after"),
        ({"exact_match_after": 0.5}, "exact match 50.0 % after"),  # continued from another run's checkpoint
        ({}, None),
    ],
)
def test_answers_are_told_as_far_as_they_were_scored(scores, words):
    recipe, on = wish(), machine()
    result = RunResult("/run", 0, None, 2.0, 1 << 30, {**SUMMARY, **scores})
    lines = report.result_lines(recipe, on, plan(recipe, on), result, "chat")
    answers = [line for line in lines if "answers" in line]
    assert answers == [] if words is None else words in answers[0]
    assert not any(line.strip() == "loss" for line in lines)
    assert "gradients not measured" in "\n".join(lines)
    page = report.html(recipe, on, plan(recipe, on), result, [], [("batch 8", "the GPU ran out <of> memory")] * 2)
    assert "complete" in page
    assert page.count("<td>batch 8</td><td>the GPU ran out &lt;of&gt; memory</td>") == 2


@pytest.mark.parametrize(("section", "words"), [("evaluation", ["  where  in evaluation at step 120"]), ("", [])])
def test_a_failure_says_in_which_section_it_came(section, words):
    recipe, on = wish(), machine()
    failure = Failure("device_oom", 12, "the GPU ran out of memory", "CUDA out of memory", "halve it", section)
    result = RunResult("/run", 12, failure, 2.0, 1 << 30, last_step=120)
    lines = report.result_lines(recipe, on, plan(recipe, on), result, "chat")
    assert [line for line in lines if line.startswith("  where")] == words
