"""Curves keep their spikes, and their axes fit their values."""

from __future__ import annotations

import json
import math
import re
from html import unescape

import pytest

from launch.report import curves
from launch.report.curves import Line


def test_of_many_points_the_lowest_and_the_highest_of_each_bucket_stay_in_order():
    ys = [1.0] * 100_000
    ys[12_345], ys[12_346], ys[70_001] = 99.0, -5.0, math.nan
    points = curves.thinned(Line([*enumerate(ys)]))
    assert len(points) <= 2 * curves.BUCKETS
    assert (12_345, 99.0) in points and (12_346, -5.0) in points
    assert points == sorted(points) and all(math.isfinite(y) for _, y in points)
    assert curves.mean(Line([*enumerate([1.0] * 5)])) is None


def test_means_are_those_of_the_buckets():
    mean = curves.mean(Line([(n, float(n % 4)) for n in range(2000)]))
    assert mean and {y for _, y in mean.points} == {1.5} and mean.name == "mean of 4"


@pytest.mark.parametrize(
    ("ys", "is_switched"),
    [([8.0, 0.1], " checked"), ([8.0, 7.0], ""), ([8.0, 0.0], None), ([8.0, 8.0], None)],
)
def test_a_logarithmic_axis_is_there_for_positive_values_and_chosen_for_wide_ones(ys, is_switched):
    page = curves.figure("loss", [Line([*enumerate(ys, 1)], "A")], "step", False)
    switch = re.search(r'<input type="checkbox"( checked)?>', page)
    assert (switch and (switch[1] or "")) == is_switched
    assert page.count("<polyline") == (1 if is_switched is None else 2)
    data = re.search('data-values="(.*?)"', page)
    assert data is not None
    values = json.loads(unescape(data[1]))
    assert values == {"unit": "step", "lines": [["A", [1, 2], ys]]}


@pytest.mark.parametrize(
    "ys",
    [
        *([0.0, 1e-9], [-3.0, 4.0], [7.0, 7.0], [1e-8, 1e9], [0.0, 0.0], [123456.0, 123457.0]),
        *([5e-324, 5e-324], [0.0, 5e-324], [5e-324, 1.0], [-1.7e308, 1.7e308]),
    ],
)
def test_all_points_are_inside_of_the_drawing(ys):
    page = curves.figure("x", [Line([*enumerate(ys, 1)])], "step", True)
    for points in re.findall('points="(.*?)"', page):
        assert all(0 <= float(pair.split(",")[1]) <= curves.HEIGHT for pair in points.split())
    assert all(0 <= float(top) <= 100 for top in re.findall(r"top:(.*?)%", page))


def test_a_single_point_is_no_curve():
    assert curves.figure("x", [Line([(1, 2.0)])], "step", True) == ""
    assert curves.figure("x", [Line([(1, 2.0), (2, math.nan)])], "step", True) == ""
