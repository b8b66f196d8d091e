"""The section of the HTML report on the rows that were trained."""

from __future__ import annotations

import html as markup

from launch.base.text import shown
from launch.report import row_facts
from launch.schema.plan import DataFormat
from launch.schema.shown_rows import ShownRow, ShownRows

STYLE = """
.facts td:first-child{white-space:nowrap;vertical-align:top;color:#52606d}
.facts td{overflow-wrap:anywhere}
.facts+figure{margin-top:1rem}
.lengths{margin:.5rem 0 1rem;font-size:.85rem;display:grid;grid-template-columns:auto 1fr auto;
  gap:.15rem .6rem;align-items:center;font-variant-numeric:tabular-nums}
.lengths span:nth-child(3n+1),.lengths span:nth-child(3n){text-align:right;color:#52606d}
.lengths i{display:block;height:.8rem;background:#2563eb;border-radius:.15rem;min-width:0}
.place{font-size:.85rem;color:#52606d;margin:1rem 0 .25rem;overflow-wrap:anywhere}
.tokens{overflow-wrap:anywhere;margin:0}
.tokens b{font-weight:normal;background:#d3f0dc;color:#14532d;border-radius:.15rem}
"""


def section(data_format: DataFormat, summary: ShownRows | None, max_length: int) -> str:
    """The section; "" if the rows were tokenised by a version that did not write them."""
    if summary is None:
        return ""
    facts = "".join(
        f"<tr><td>{markup.escape(label)}</td><td>{_escaped(text)}</td></tr>"
        for label, text in (
            ("columns", data_format.reason),
            *row_facts.facts(data_format, summary, max_length),
        )
    )
    rows = "".join(_row(row, max_length) for row in summary.rows)
    if any(row.has_escapes for row in summary.rows):
        rows += f"<p>{markup.escape(row_facts.ESCAPES)}</p>"
    legend = "<p>Tokens with a loss are <span class=tokens><b>green</b></span>.</p>" if rows else ""
    return (
        f"<h2>Rows</h2><table class=facts>{facts}</table>{_lengths(summary.lengths)}{legend}{rows}"
    )


def _lengths(lengths: list[int]) -> str:
    steps = row_facts.length_steps(lengths)
    most = max((count for _, _, count in steps), default=0)
    bars = "".join(
        f"<span>{begin:,}-{end:,}</span>"
        f"<span><i style='width:{100 * count / most:.1f}%'></i></span><span>{count:,}</span>"
        for begin, end, count in steps
    )
    caption = "<figcaption>rows by their length in tokens</figcaption>"
    return f"<figure>{caption}<div class=lengths>{bars}</div></figure>" if bars else ""


def _row(row: ShownRow, max_length: int) -> str:
    parts = "".join(
        f"<b>{_escaped(part.text)}</b>" if part.is_target else _escaped(part.text)
        for part in row.parts
    )
    place = _escaped(row_facts.heading(row, max_length))
    return f"<div class=place>{place}</div>" + (f"<pre class=tokens>{parts}</pre>" if parts else "")


def _escaped(text: str) -> str:
    return markup.escape(shown(text))
