"""The memory at the peak of each candidate that a plan compared, drawn as self-contained SVG."""

import html as markup
from collections import Counter
from collections.abc import Mapping, Sequence

from launch.base.text import size
from launch.schema.plan import Compared

WIDTH, LEFT, ROW, BAR, _TOP, LINE = 840, 10, 44, 16, 14, 18
# uses in the order of a bar, with colours that colour-blind people tell apart (Okabe and Ito)
COLORS = {
    "weights": "#0072b2",
    "optimizer": "#e69f00",
    "gradients": "#009e73",
    "activations": "#d55e00",
    "logits": "#cc79a7",
    "temporaries": "#56b4e9",
    "communication": "#f0e442",
    "other": "#8a8a8a",
    "reserved above it": "#c9d1d9",
    "context and communicators": "#5f6b7a",
    "margin": "#e3e8ee",
}
_OVER = 1.6  # times the budget: longer bars end there
LETTER = 6.9  # mean width at 12 px


def picture(rows: Sequence[Compared]) -> str:
    """A bar for each candidate, and the budget as a line, on white."""
    parts = [_by_use(row.device_parts) for row in rows]
    budget = max(row.budget_bytes for row in rows)
    widest = max(sum(uses.values()) for uses in parts)
    scale = (WIDTH - 2 * LEFT) / max(min(widest, _OVER * budget), 1.02 * budget)
    legend, top = _legend([use for use in COLORS if any(use in uses for uses in parts)])
    bars = "".join(
        _row(row, uses, top + number * ROW, scale)
        for number, (row, uses) in enumerate(zip(rows, parts, strict=True))
    )
    height, x = top + len(rows) * ROW + 24, LEFT + budget * scale
    line = (  # across the bars, not their texts
        "".join(
            f'<path d="M{x:.1f} {top + number * ROW + LINE - 3}v{BAR + 6}" stroke="#b00020"'
            ' stroke-width="2"/>'
            for number in range(len(rows))
        )
        + f'<text x="{x:.1f}" y="{height - 6}" fill="#b00020"'
        f' text-anchor="{"end" if x > WIDTH / 2 else "start"}">budget {size(budget)}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        ' font-family="system-ui,sans-serif" font-size="12" fill="#1b2733"><rect width="100%"'
        f' height="100%" fill="#fff"/>{legend}{bars}{line}</svg>'
    )


def _by_use(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the uses that have a colour, in the order of a bar."""
    uses: Counter[str] = Counter()
    for name, part in parts.items():
        uses[name if name in COLORS else "other"] += part
    return {use: uses[use] for use in COLORS if uses[use]}


def _row(row: Compared, uses: Mapping[str, int], y: float, scale: float) -> str:
    seconds = "" if row.seconds_per_step is None else f"{row.seconds_per_step:.3g} s a step, "
    verdict = row.verdict.partition(":")[0] if "does not fit" in row.verdict else row.verdict
    least = "at least " if "at least" in row.verdict else ""
    right = f"{least}{size(sum(uses.values()))}, {seconds}{verdict}"
    weight = ' font-weight="600"' if row.verdict == "chosen" else ""
    rects, x = "", float(LEFT)
    for use, part in uses.items():
        width = min(part * scale, WIDTH - LEFT - x)
        rects += (
            f'<rect x="{x:.1f}" y="{y + LINE:.1f}" width="{max(width, 0):.1f}" height="{BAR}"'
            f' fill="{COLORS[use]}"><title>{use}: {size(part)}</title></rect>'
        )
        x += width
    return (
        f'<text x="{LEFT}" y="{y + 13:.1f}"{weight}>{markup.escape(row.name)}</text><text'
        f' x="{WIDTH - LEFT}" y="{y + 13:.1f}" text-anchor="end"{weight}>'
        f"{markup.escape(right)}</text>{rects}"
    )


def _legend(uses: Sequence[str]) -> tuple[str, float]:
    """A coloured square and a name for each use, in as many lines as they need; and where they
    end."""
    drawn, x, y = "", float(LEFT), float(_TOP)
    for use in uses:
        width = 18 + LETTER * len(use) + 14
        if x + width > WIDTH - LEFT:
            x, y = float(LEFT), y + LINE
        drawn += (
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{COLORS[use]}"/><text'
            f' x="{x + 18:.1f}" y="{y:.1f}">{use}</text>'
        )
        x += width
    return drawn, y + LINE
