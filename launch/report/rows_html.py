"""The section of the HTML report on the data that was trained."""

from __future__ import annotations

from launch.report import row_facts
from launch.report.page import escaped
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
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


def section(recipe: Recipe, plan: Plan, summary: ShownRows | None) -> str:
    """The facts of the files, and of the rows unless a version tokenised them that did not write
    them."""
    max_length = recipe.data.max_length
    facts = [
        ("trained", _counted(recipe.data.train_names, plan.rows)),
        ("held out", _held_out(recipe, plan)),
        ("columns", plan.data_format.reason),
    ]
    drawn = ""
    if summary is not None:
        facts += row_facts.facts(plan.data_format, summary, max_length)
        drawn = "".join(_row(row, max_length) for row in summary.rows)
        if any(row.has_escapes for row in summary.rows):
            drawn += f"<p>{escaped(row_facts.ESCAPES)}</p>"
        if drawn:
            drawn = f"<p>Tokens with a loss are <span class=tokens><b>green</b></span>.</p>{drawn}"
        drawn = _lengths(summary.lengths) + drawn
    rows = "".join(
        f"<tr><td>{escaped(label)}</td><td>{escaped(text)}</td></tr>"
        for label, text in facts
        if text
    )
    return f"<table class=facts>{rows}</table>{drawn}"


def _counted(name: str, rows: int | None) -> str:
    return name if rows is None else f"{name}: {rows:,} rows"


def _held_out(recipe: Recipe, plan: Plan) -> str:
    if recipe.data.validation_file:
        return recipe.data.validation_file
    held_out = plan.rows_held_out
    return f"{held_out:,} rows of the same (data.validation_size)" if held_out else "none"


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
        f"<b>{escaped(part.text)}</b>" if part.is_target else escaped(part.text)
        for part in row.parts
    )
    place = escaped(row_facts.heading(row, max_length))
    return f"<div class=place>{place}</div>" + (f"<pre class=tokens>{parts}</pre>" if parts else "")
