"""Lines over a common axis, drawn as self-contained SVG."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 800, 200, 70, 10, 10, 24
MOST_POINTS = 600  # of a line


@dataclass(frozen=True)
class Line:
    """Points (x, y) in the order of x, with colour and width."""

    points: Sequence[tuple[float, float]]
    color: str = "#2563eb"
    width: float = 1.8


def figure(title: str, lines: Sequence[Line], unit: str, from_zero: bool) -> str:
    """The lines with their axes' ends written out; "" where none has two finite points. x counts
    `unit`s."""
    drawn = [(line, points) for line in lines if len(points := _thinned(line.points)) > 1]
    if not drawn:
        return ""
    xs, ys = ([point[axis] for _, points in drawn for point in points] for axis in (0, 1))
    x0, x1, y1 = min(xs), max(xs), max(ys)
    y0 = 0.0 if from_zero else min(ys)
    span_x, span_y = max(x1 - x0, 1), (y1 - y0) or 1.0
    right, base = WIDTH - RIGHT, HEIGHT - BOTTOM

    def path(points: Sequence[tuple[float, float]]) -> str:
        wide, high = (right - LEFT) / span_x, (base - TOP) / span_y
        return " ".join(
            f"{LEFT + (x - x0) * wide:.1f},{TOP + (y1 - y) * high:.1f}" for x, y in points
        )

    polylines = "".join(
        f'<polyline points="{path(points)}" fill="none" stroke="{line.color}"'
        f' stroke-width="{line.width}" stroke-linejoin="round"/>'
        for line, points in drawn
    )
    return (
        f'<figure><figcaption>{markup.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH}'
        f' {HEIGHT}" role="img"><path d="M{LEFT} {TOP}V{base}H{right}" fill="none"'
        f' stroke="#9aa5b1"/>{polylines}<g font-size="12" fill="#52606d" text-anchor="end"><text'
        f' x="{LEFT - 6}" y="{TOP + 6}">{_number(y1)}</text><text x="{LEFT - 6}"'
        f' y="{base}">{_number(y0)}</text></g><g font-size="12" fill="#52606d"><text x="{LEFT}"'
        f' y="{HEIGHT - 6}">{unit} {x0:,.0f}</text><text x="{right}" y="{HEIGHT - 6}"'
        f' text-anchor="end">{unit} {x1:,.0f}</text></g></svg></figure>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, len(points) // MOST_POINTS)
    return [(x, y) for x, y in [*points[:-1:step], *points[-1:]] if math.isfinite(y)]
