"""The pages of runs in a real browser: no error in its console, nothing wider than the screen, and
values under the pointer; with 100,000 steps too, in a page of at most 3 MB."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.report import comparable, compare, run_end, run_figures
from launch.schema.machine import GIB
from launch.schema.plan import Change, Compared
from launch.schema.result import Answers, Failure, HeldOut, Question, RunResult, StepEvent
from launch.schema.rows import ShownPart, ShownRow, ShownRows
from tests import builders
from tests.daemons import browser

# a fixture is used by its name, as an argument of tests
from tests.unit.report.test_compare import trained, workspace  # noqa: F401

STEPS = 100_000
MOST_BYTES = 3_000_000
WIDTHS = (1280, 360)
WORD = "/a/folder/with_a_name_that_has_no_place_to_break/" * 3


def event(number: int, steps: int) -> StepEvent:
    return StepEvent(
        step=number,
        max_steps=steps,
        epoch=number / 1000,
        samples_seen=8 * number,
        tokens=800,
        samples=8,
        loss=8 / math.sqrt(number) + 0.3 * (number % 7 == 0),
        learning_rate=1e-3 * (1 - number / steps),
        grad_norm=1.0 + number % 5,
        seconds=0.25,
        vram_allocated_bytes=3 * GIB,
        vram_reserved_bytes=4 * GIB,
        vram_total_bytes=20 * GIB,
        host_pss_bytes=2 * GIB,
        time=1e9 + number / 4,
        data_seconds=0.01,
    )


def records(steps: int) -> dict[str, Any]:
    rows = ShownRows(
        rows=[ShownRow(f"{WORD}.jsonl:1", [ShownPart(WORD, True)], 9, 4)],
        num_read=40,
        lengths=list(range(1, 41)),
        template=WORD,
        left_out={},
        num_truncated=0,
        num_targets=100,
        methods={},
        contents={},
        bad=[],
    )
    return {
        "events": [event(number, steps) for number in range(1, steps + 1)],
        "evaluations": [
            HeldOut(step, 8 * step, 9 / math.sqrt(step), 3.0, 1e9)
            for step in range(steps // 10, steps + 1, steps // 10)
        ],
        "attempts": [(WORD, f"the GPU ran out of memory ({WORD})"), ("single_gpu x1", "complete")],
        "questions": [Question(WORD, "yes"), Question("<b>?", WORD)],
        "answers": [Answers(step, 8 * step, (WORD, "")) for step in range(1, 20)],
        "spent": [(use, 10.0) for use in run_figures.ORDER],
        "summary": rows,
        "repeat": [("The same again:", f"python -m launch run {WORD}")],
    }


def written(folder: Path, steps: int, failure: Failure | None = None) -> Path:
    """The page of a run on a card, with all that such a page can have."""
    recipe, on = builders.recipe_of(), builders.machine(1)
    plan = builders.plan(recipe, on)
    plan = replace(
        plan,
        changes=(Change("launch.mode", WORD, WORD, f"because of {WORD}"),),
        compared=tuple(
            Compared(f"single_gpu x{n}", {"weights": n * GIB}, 20 * GIB, 1.0, "chosen")
            for n in (1, 2)
        ),
    )
    summary = {
        **{f"{name}_bytes": 1 << 30 for name in ("weights", "gradients", "optimizer")},
        **{"offloaded_bytes": 0, "loss": 1.0, "eval_loss": 1.1, "step": steps},
        **{"vram_allocated_bytes": 3 * GIB, "vram_reserved_bytes": 4 * GIB},
        **{"exact_match_after": 0.5, "exact_match_before": 0.25, "bleu_after": 0.4},
        **{"train_seconds": 1.0, "model_dir": WORD, "bleu_before": 0.1},
        "phases": {"step": {"allocated_bytes": 3 * GIB, "reserved_bytes": 4 * GIB}},
    }
    code = failure.exit_code if failure else 0
    result = RunResult(WORD, code, failure, 60.0, 2 * GIB, {} if failure else summary)
    page = folder / "report.html"
    page.write_text(run_end.html(recipe, on, plan, result, **records(steps)), encoding="utf-8")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "failure", [None, Failure("device_oom", 12, f"out of memory: {WORD}", WORD, WORD, "step")]
)
def test_the_page_of_a_run_fits_the_screen_without_errors(tmp_path, width, failure):
    seen = browser.show(written(tmp_path, 60, failure), width, tmp_path)
    assert (seen.console, seen.width) == ([], width)
    assert seen.scroll_width <= width
    losses = seen.tips[0].splitlines()
    assert losses[0].startswith("step 3") and "training" in losses[0]  # of 60, in the middle
    assert "held out" in losses[1]
    assert len(seen.tips) == 6


def test_a_page_of_100_000_steps_is_small_and_keeps_its_spikes(tmp_path):
    page = written(tmp_path, STEPS)
    assert page.stat().st_size <= MOST_BYTES
    seen = browser.show(page, 360, tmp_path)
    assert (seen.console, seen.scroll_width <= 360) == ([], True)
    first = seen.tips[0].splitlines()[0]
    step, value = int(first.split()[1].strip(":").replace(",", "")), float(first.split()[-1])
    assert value == pytest.approx(event(step, STEPS).loss, rel=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_comparison_fits_the_screen_without_errors(workspace, tmp_path, width):  # noqa: F811
    sides = [comparable.read(trained(workspace, name)) for name in ("before", "after")]
    page = tmp_path / "compare.html"
    differs = [comparable.Difference(f"training.seed: A {WORD}, B {WORD}", blocks=True)]
    text = compare.html(*sides, differs, compare.figures(*sides))
    page.write_text(text, encoding="utf-8")
    seen = browser.show(page, width, tmp_path)
    assert (seen.console, seen.width) == ([], width)
    assert seen.scroll_width <= width
    assert [len(tip.splitlines()) for tip in seen.tips] == [2, 2, 2]


def test_a_console_with_an_error_and_a_page_that_is_too_wide_are_seen(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><div style='width:800px'>a</div><script>missing()</script>")
    seen = browser.show(page, 360, tmp_path)
    assert "missing is not defined" in seen.console[0]
    assert seen.scroll_width > seen.width == 360
