"""Curves over a common axis: self-contained SVG between labels that keep their size on any screen,
with a switch to a logarithmic axis and the values under the pointer (page.SCRIPT)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from launch.report import page

WIDTH, HEIGHT = 1000, 300  # size of the drawing, which is stretched to its place
BUCKETS = 500  # intervals of a line with more points: each keeps its lowest and its highest point
_DOTS = 40  # a line of at most as many points shows each
_LOG_FROM = 10.0  # highest / lowest value from which the axis is logarithmic at first
LEAST, _MOST = 1e-300, 1e300  # limits of an axis: a value nearer 0 or farther is drawn at its end
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points in the order of x, with a name, colour and width."""

    points: Sequence[Point]
    name: str = ""
    color: str = "#2563eb"
    width: float = 1.8


@dataclass(frozen=True)
class _Axis:
    """The vertical axis: its ends, its ticks, and the share of its height at which a value is."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool

    def share(self, value: float) -> float:
        """From 0, at the top, to 1."""
        low, high = (math.log(end) if self.is_log else end for end in (self.low, self.high))
        share = (high - (math.log(value) if self.is_log else value)) / ((high - low) or 1.0)
        return min(max(share, 0.0), 1.0)


def figure(title: str, lines: Sequence[Line], unit: str, from_zero: bool) -> str:
    """The lines with their axes; "" where they have no two finite points. x counts `unit`s."""
    drawn = [(line, points) for line in lines if (points := thinned(line))]
    xs, ys = ([point[axis] for _, points in drawn for point in points] for axis in (0, 1))
    if len(xs) < 2:
        return ""
    x0, span = min(xs), (max(xs) - min(xs)) or 1.0
    axes = [_linear(min(ys), max(ys), from_zero)]
    if min(ys) > LEAST and max(ys) > min(ys):
        axes.append(_logarithmic(min(ys), max(ys)))
    starts_log = len(axes) == 2 and not from_zero and max(ys) / min(ys) >= _LOG_FROM

    def places(axis: _Axis, points: Sequence[Point]) -> list[str]:
        return [f"{(x - x0) / span * WIDTH:.1f},{axis.share(y) * HEIGHT:.1f}" for x, y in points]

    values = {
        "unit": unit,
        "lines": [
            [line.name, [_short(x) for x, _ in points], [_short(y) for _, y in points]]
            for line, points in drawn
        ],
    }
    return page.render(
        "curve.html",
        title=title,
        values=json.dumps(values, separators=(",", ":")),
        lines=drawn,
        axes=axes,
        starts_log=starts_log,
        places=places,
        number=_number,
        unit=unit,
        x0=x0,
        x1=x0 + span,
        width=WIDTH,
        height=HEIGHT,
        most_dots=_DOTS,
    )


def _linear(low: float, high: float, from_zero: bool) -> _Axis:
    low = min(low, 0.0) if from_zero else low
    low, high = max(low, -_MOST), min(high, _MOST)
    spread = next(size for size in (high - low, abs(high), 1.0) if size > LEAST)
    step = 10.0 ** math.floor(math.log10(spread / 3))
    step *= next((factor for factor in (1, 2, 5) if spread / (factor * step) <= 5), 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(number * step for number in range(first, last + 1))
    return _Axis(ticks[0], ticks[-1], ticks, False)


def _logarithmic(low: float, high: float) -> _Axis:
    """Ticks at 1, 2 and 5, fewer where there are many powers of ten; the ends of the values where
    there are hardly any."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 6)
    factors = (1, 2, 5) if len(decades) <= 3 else (1, 3) if len(decades) <= 5 else (1,)
    ticks = [
        factor * 10.0**decade
        for decade in decades[::every]
        for factor in factors
        if low <= factor * 10.0**decade <= high
    ]
    return _Axis(low, high, tuple(ticks if len(ticks) > 1 else (low, high)), True)


def thinned(line: Line) -> list[Point]:
    """The finite points; of many, the lowest and the highest of each bucket, so that no spike is
    lost."""
    points = _finite_points(line)
    if len(points) <= 2 * BUCKETS:
        return points
    return [
        extreme
        for part in _buckets(points)
        for extreme in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    ]


def mean(line: Line) -> Line | None:
    """The means of the buckets of a line that is thinned; None for a line that is not."""
    points = _finite_points(line)
    if len(points) <= 2 * BUCKETS:
        return None
    parts = _buckets(points)
    means = [(part[len(part) // 2][0], sum(y for _, y in part) / len(part)) for part in parts]
    return Line(means, f"mean of {len(parts[0]):,}")


def _finite_points(line: Line) -> list[Point]:
    return [point for point in line.points if math.isfinite(point[1])]


def _buckets(points: Sequence[Point]) -> list[Sequence[Point]]:
    size = math.ceil(len(points) / BUCKETS)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _short(value: float) -> float | int:
    """A value with five digits, for the page."""
    return int(value) if value == int(value) else float(f"{value:.5g}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
