"""The HTML page of a run."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence

from launch.base.text import size
from launch.report import peaks_svg, rows_html, svg
from launch.report.text import STATES, plan_lines, result_lines
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import HeldOut, RunResult, StepEvent
from launch.schema.shown_rows import ShownRows

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
  color:#1b2733;background:#fff}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.end{display:inline-block;padding:.1rem .6rem;border-radius:1rem;background:#e3f4e8;color:#14632d}
.end.bad{background:#fbe6e6;color:#8a1c1c}
table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;border-bottom:1px solid #e3e8ee;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}th.n{text-align:right}
pre{background:#f5f7fa;padding:1rem;white-space:pre-wrap;font-size:.85rem;line-height:1.4;border-radius:.4rem}
svg{width:100%;height:auto}.wide{overflow-x:auto}.wide svg{min-width:44rem}
figure{margin:0 0 1.5rem}figcaption{font-size:.9rem;color:#52606d}
@media(max-width:32rem){table{font-size:.85rem}td,th{padding:.3rem}svg g{font-size:20px}}
"""


def html(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    result: RunResult,
    events: Sequence[StepEvent],
    attempts: Sequence[tuple[str, str]] = (),
    evaluations: Sequence[HeldOut] = (),
    rows: ShownRows | None = None,
) -> str:
    """The run as a self-contained page: end, figures, attempts (strategy, end), curves, plan,
    rows."""
    ended = "complete" if result.failure is None else result.failure.cause
    summary = result.summary
    memory = _memory_rows(plan, result) if summary else []
    table = "".join(
        f"<tr><td>{name}</td><td class=n>{size(predicted) if predicted else 'not predicted'}</td>"
        f"<td class=n>{'not measured' if measured is None else size(measured)}</td>"
        f"<td class=n>{f'{measured / predicted - 1:+.2%}' if measured and predicted else ''}</td>"
        "</tr>"
        for name, predicted, measured in memory
    )
    figures = "".join(
        svg.figure(
            title,
            [svg.Line([(event.step, getattr(event, field) * scale) for event in events])],
            "step",
            from_zero,
        )
        for title, field, scale, from_zero in (
            ("loss per optimizer step", "loss", 1.0, False),
            ("learning rate", "learning_rate", 1.0, True),
            ("seconds per step", "seconds", 1.0, True),
            ("host RAM of the job, GiB", "host_pss_bytes", 1 / GIB, True),
        )
    )
    losses = svg.Line([(evaluation.step, evaluation.loss) for evaluation in evaluations])
    figures += svg.figure("loss on the held-out rows", [losses], "step", False)
    tried = "".join(
        f"<tr><td>{number}</td><td>{markup.escape(ran)}</td><td>{markup.escape(how)}</td></tr>"
        for number, (ran, how) in enumerate(attempts, 1)
    )
    plan_text = markup.escape("\n".join(plan_lines(recipe, machine, plan)))
    result_text = (
        markup.escape("\n".join(result_lines(recipe, machine, plan, result, ""))) if summary else ""
    )
    return (
        '<!doctype html><html lang="en"><meta'
        f' charset="utf-8"><title>{markup.escape(recipe.name)}</title><meta name="viewport"'
        f' content="width=device-width"><style>{STYLE}{rows_html.STYLE}</style>'
        f"<h1>{markup.escape(recipe.name)}</h1>"
        f'<p><span class="end{"" if result.failure is None else " bad"}">'
        f"{markup.escape(ended)}</span> {markup.escape(result.run_dir)}</p>"
        + (
            "<h2>Predicted beside measured</h2><table><tr><th></th><th class=n>predicted</th><th"
            f" class=n>measured</th><th class=n>error</th></tr>{table}</table>"
            if memory
            else ""
        )
        + (f"<h2>Attempts</h2><table>{tried}</table>" if len(attempts) > 1 else "")
        + (f"<h2>Curves</h2>{figures}" if figures else "")
        + rows_html.section(plan.data_format, rows, recipe.data.max_length)
        + f"<h2>Plan</h2><pre>{plan_text}</pre>"
        + peaks_svg.figure("predicted memory of a device at the peak of each plan", plan.compared)
        + (f"<h2>End</h2><pre>{result_text}</pre>" if result_text else "")
        + "</html>\n"
    )


def _memory_rows(plan: Plan, result: RunResult) -> list[tuple[str, int, int | None]]:
    """(name, predicted bytes or 0, measured bytes or None) of the memory that the run took."""
    estimate, summary = plan.estimate, result.summary
    states = [
        (f"{name} per process", getattr(estimate, f"{name}_bytes"), summary[f"{name}_bytes"])
        for name in (*STATES, "offloaded")
    ]
    rows = [
        (name, predicted, measured)
        for name, predicted, measured in states
        if measured or (measured is None and predicted)
    ]
    rows.append(("host RAM peak of the job (PSS)", estimate.host_bytes, result.host_peak_bytes))
    for kind in ("allocated", "reserved") if summary["vram_allocated_bytes"] else ():
        predicted = getattr(estimate, f"{kind}_bytes") if estimate.peak else 0
        rows.append((f"VRAM peak, {kind}", predicted, summary[f"vram_{kind}_bytes"]))
    return rows
