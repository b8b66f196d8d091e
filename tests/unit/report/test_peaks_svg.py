"""The picture of the candidates: bars in proportion, the budget across them, texts as texts."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from launch.plan import explain
from launch.predict.estimate import Judged
from launch.report import peaks_svg, run_end
from launch.schema.machine import GIB
from launch.schema.plan import Compared, MemoryEstimate, Peak
from launch.schema.result import RunResult
from tests.builders import machine, plan, recipe_of

SVG = "{http://www.w3.org/2000/svg}"
FITS = Compared("single_gpu x1", {"weights": 6 * GIB, "logits": 2 * GIB}, 10 * GIB, 1.5, "chosen")
MISSES = Compared(
    "<b>zero", {"weights": 6 * GIB, "input": 5 * GIB}, 10 * GIB, None, "does not fit: at least 11"
)


def bars(rows: list[Compared]) -> list[list[tuple[str, float]]]:
    """(colour, width) of each part of each bar."""
    rects = [
        (rect.get("y"), rect.get("fill") or "", float(rect.get("width") or 0))
        for rect in ElementTree.fromstring(peaks_svg.picture(rows)).iter(f"{SVG}rect")
        if rect.get("height") == str(peaks_svg.BAR)
    ]
    return [
        [(color, width) for at, color, width in rects if at == y]
        for y in dict.fromkeys(at for at, _, _ in rects)
    ]


def test_parts_are_as_wide_as_they_are_large():
    first, second = bars([FITS, MISSES])
    colors = peaks_svg.COLORS
    assert [color for color, _ in first] == [colors["weights"], colors["logits"]]
    assert [color for color, _ in second] == [colors["weights"], colors["other"]]
    gib = first[1][1] / 2
    widths = [width for _, width in (*first, *second)]
    assert widths == pytest.approx([6 * gib, 2 * gib, 6 * gib, 5 * gib], abs=0.2)


def test_the_budget_crosses_a_bar_that_exceeds_it():
    text = peaks_svg.picture([FITS, MISSES])
    (budget, *others) = (float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+v', text))
    ends = [peaks_svg.LEFT + sum(width for _, width in bar) for bar in bars([FITS, MISSES])]
    assert others == [budget]
    assert ends[0] < budget < ends[1]


def test_a_bar_far_beyond_the_budget_ends_at_the_edge():
    (bar,) = bars([replace(MISSES, device_parts={"weights": 90 * GIB, "activations": 9 * GIB})])
    assert sum(width for _, width in bar) == pytest.approx(peaks_svg.WIDTH - 2 * peaks_svg.LEFT)


def test_texts_are_escaped_and_a_bound_is_no_prediction():
    texts = ElementTree.fromstring(peaks_svg.picture([FITS, MISSES])).iter(f"{SVG}text")
    said = [text.text for text in texts]
    assert "<b>zero" in said
    assert "8.00 GiB, 1.5 s a step, chosen" in said
    assert "at least 11.00 GiB, does not fit" in said


def test_the_bytes_of_a_candidate_are_all_of_its_device():
    of_peak = Peak("forward", "", {"states": 7 * GIB, "activations": GIB})
    bound = MemoryEstimate(4 * GIB, GIB, 2 * GIB, peak=of_peak, outside_bytes=GIB)
    strategy = plan(recipe_of(), machine()).strategy
    row = explain.compared((Judged(strategy, bound, None, 20 * GIB, None), "chosen"))
    assert sum(row.device_parts.values()) == bound.device_bytes
    assert row.device_parts["weights"] == 4 * GIB


def test_the_page_of_a_run_has_the_picture():
    recipe, on = recipe_of(), machine()
    result = RunResult("/run", 1, None, 2.0, 1 << 30)
    planned = replace(plan(recipe, on), compared=(FITS, MISSES))
    assert "single_gpu x1</text>" in run_end.html(recipe, on, planned, result)
    assert "<figure" not in run_end.html(recipe, on, replace(planned, compared=()), result)
