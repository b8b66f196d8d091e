"""The first sections of a run's page: result, end, changes, predicted beside measured, time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.base.text import duration, size
from launch.report.page import escaped
from launch.report.text import STATES, ended
from launch.report.time_spent import Spent
from launch.schema.machine import Machine
from launch.schema.phases import DeviceMemory
from launch.schema.plan import Change, Plan
from launch.schema.recipe import Recipe
from launch.schema.result import HeldOut, RunResult, StepEvent

STEADY_FROM = 2  # steps that are slower than the rest
STYLE = """
.end{display:inline-block;padding:.1rem .6rem;border-radius:1rem;background:#e3f4e8;color:#14632d}
.end.bad{background:#fbe6e6;color:#8a1c1c}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;
  margin:1rem 0}
.tiles div{background:#f5f7fa;border-radius:.4rem;padding:.5rem .8rem}
.tiles b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums;line-height:1.3}
.tiles span{display:block;font-size:.85rem;color:#52606d}
.bars{display:grid;grid-template-columns:1fr auto;gap:0 .8rem;margin:.5rem 0 1rem;
  font-variant-numeric:tabular-nums}
.bars h3{grid-column:1/-1;font-size:1rem;margin:.8rem 0 .2rem}
.bars .name{margin-top:.4rem}.bars .error{margin-top:.4rem;text-align:right;color:#52606d}
.bars .bar{grid-column:1/-1;display:grid;grid-template-columns:1fr 11.5rem;gap:.6rem;
  align-items:center;font-size:.85rem;color:#52606d}
.bars i{display:block;height:.7rem;border-radius:.15rem;background:#0072b2}
.bars i.measured{background:#e69f00}
.bars i.lost{background:#d55e00}
@media(max-width:32rem){.bars .bar{grid-template-columns:1fr 9.6rem}}
"""


@dataclass(frozen=True)
class Pair:
    """A predicted figure beside the measured one, in bytes; None: not predicted, not measured."""

    name: str
    predicted: int | None
    measured: int | None


def tiles(
    machine: Machine,
    plan: Plan,
    result: RunResult,
    events: Sequence[StepEvent],
    evaluations: Sequence[HeldOut],
    seconds: float,
) -> str:
    """The result in figures; `seconds` are those of all attempts."""
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><span>{escaped(label)}</span><b>{escaped(value)}</b><span>{escaped(note)}"
            "</span></div>"
            for label, value, note in _figures(machine, plan, result, events, evaluations, seconds)
        )
        + "</div>"
    )


def _figures(
    machine: Machine,
    plan: Plan,
    result: RunResult,
    events: Sequence[StepEvent],
    evaluations: Sequence[HeldOut],
    seconds: float,
) -> Iterator[tuple[str, str, str]]:
    """(label, value, note) of each figure that there is."""
    summary = result.summary
    for label, score, unit in (("exact match", "exact_match", " %"), ("BLEU", "bleu", "")):
        after, before = summary.get(f"{score}_after"), summary.get(f"{score}_before")
        if after is not None:
            note = "of held-out answers" if before is None else f"{100 * before:.1f}{unit} before"
            yield label, f"{100 * after:.1f}{unit}", note
    if evaluations:
        last, lowest = evaluations[-1], min(evaluations, key=lambda score: score.loss)
        exported = summary.get("exported_step")
        shown = next((score for score in evaluations if score.step == exported), last)
        note = f"at step {shown.step:,}"
        if lowest.loss < shown.loss:
            note += f"; lowest {lowest.loss:.4f} at step {lowest.step:,}"
        yield "held-out loss", f"{shown.loss:.4f}", note
    if events:
        last = events[-1]
        yield "training loss", f"{last.loss:.4f}", f"of step {last.step:,}"
        steady = events[STEADY_FROM:] or events
        busy = sum(step.seconds for step in steady)
        if busy:
            tokens = sum(step.tokens for step in steady)
            yield "tokens/s", f"{tokens / busy:,.0f}", f"{busy / len(steady):.3g} s a step"
        yield (
            "steps",
            f"{last.step:,}",
            f"of {last.max_steps:,}; {last.samples_seen:,}"
            f" {'packed sequences' if plan.packing else 'samples'}",
        )
    count = plan.strategy.num_processes
    if plan.strategy.device == "cuda":
        device = f"{seconds * count / 3600:.3g} GPU-hours on {count} x {machine.gpus[0].name}"
    else:
        device = f"on {machine.cpu_count} CPUs"
    yield "time", duration(seconds), f"{seconds / 3600:.3g} h in all; {device}"


def why_it_ended(recipe: Recipe, result: RunResult) -> str:
    failure = result.failure
    if failure is None:
        return f"<p>{escaped(ended(recipe, result.summary))}</p>"
    facts = (
        ("cause", failure.cause),
        ("where", f"in {failure.section} at step {result.last_step:,}" if failure.section else ""),
        ("proof", failure.proof),
        ("what to do", failure.fix),
        ("note", result.note),
    )
    return f"<table class=facts>{_rows(fact for fact in facts if fact[1])}</table>"


def _rows(rows: Iterator[tuple[str, str]]) -> str:
    return "".join(f"<tr><td>{escaped(a)}</td><td>{escaped(b)}</td></tr>" for a, b in rows)


def what_was_changed(changes: Sequence[Change], attempts: Sequence[tuple[str, str]]) -> str:
    """Settings that ran otherwise than they were asked for, by reason; and the attempts, if there
    were several."""
    causes = dict.fromkeys(change.reason for change in changes)
    items = "".join(
        f"<li>{escaped(reason)}<br>"
        + "<br>".join(
            f"<code>{escaped(change.key)}</code> {escaped(change.requested)} →"
            f" {escaped(change.effective)}"
            for change in changes
            if change.reason == reason
        )
        + "</li>"
        for reason in causes
    )
    text = f"<ul>{items}</ul>" if items else "<p>Nothing: all settings ran as asked.</p>"
    if len(attempts) > 1:
        rows = "".join(
            f"<tr><td>{number}</td><td>{escaped(ran)}</td><td>{escaped(how)}</td></tr>"
            for number, (ran, how) in enumerate(attempts, 1)
        )
        text += f"<table><tr><th>attempt</th><th>ran with</th><th>ended</th></tr>{rows}</table>"
    return text


def predicted_beside_measured(plan: Plan, result: RunResult, events: Sequence[StepEvent]) -> str:
    """Bars of memory by category, then by phase, and of the time of a step."""
    groups = [
        ("by category", list(_by_category(plan, result.summary))),
        ("by phase, a rank's device (reserved)", list(_by_device_phase(plan, result.summary))),
        ("by phase, host RAM of the job", list(_by_host_phase(plan, result, events))),
    ]
    drawn = "".join(_group(title, pairs, size) for title, pairs in groups if pairs)
    steady = [step.seconds for step in events[STEADY_FROM:]]
    if steady or plan.seconds_per_step:
        predicted = None if plan.seconds_per_step is None else int(1e6 * plan.seconds_per_step)
        pair = Pair("a step", predicted, int(1e6 * statistics.median(steady)) if steady else None)
        drawn += _group("seconds (median)", [pair], lambda us: f"{us / 1e6:.3g} s")
    return f'<div class="bars">{drawn}</div>' if drawn else ""


def _group(title: str, pairs: Sequence[Pair], text: Any) -> str:
    most = max(
        (value or 0 for pair in pairs for value in (pair.predicted, pair.measured)), default=0
    )
    drawn = f"<h3>{escaped(title)}</h3>"
    for pair in pairs:
        error = "not measured" if pair.measured is None else "not predicted"
        if pair.measured and pair.predicted:
            error = f"{pair.measured / pair.predicted - 1:+.1%}"
        drawn += f'<span class="name">{escaped(pair.name)}</span><span class="error">{error}</span>'
        for kind, value in (("predicted", pair.predicted), ("measured", pair.measured)):
            if value is None:
                continue
            width, label = 100 * value / (most or 1), f"{text(value)} {kind}"
            drawn += (
                f'<span class="bar"><i class="{kind}" style="width:{width:.1f}%"></i>'
                f"<span>{label}</span></span>"
            )
    return drawn


def _by_category(plan: Plan, summary: Mapping[str, Any]) -> Iterator[Pair]:
    estimate = plan.estimate
    for name in (*STATES, "offloaded"):
        predicted, measured = getattr(estimate, f"{name}_bytes"), summary.get(f"{name}_bytes")
        if measured or predicted:
            yield Pair(f"{name} of a rank", predicted, measured)
    if summary.get("vram_allocated_bytes"):
        for kind in ("allocated", "reserved"):
            predicted = getattr(estimate, f"{kind}_bytes") if estimate.peak else None
            yield Pair(f"VRAM peak, {kind}", predicted, summary[f"vram_{kind}_bytes"])


def _by_device_phase(plan: Plan, summary: Mapping[str, Any]) -> Iterator[Pair]:
    if plan.strategy.device != "cuda":
        return
    measured = summary.get("phases") or {}
    for phase in (*vars(plan.phases), "generation"):
        memory: DeviceMemory | None = getattr(plan.phases, phase, None)
        peak = measured.get(phase)
        if memory or peak:
            yield Pair(
                phase.replace("_", " "),
                memory.reserved_bytes if memory else None,
                peak["reserved_bytes"] if peak else None,
            )


def _by_host_phase(plan: Plan, result: RunResult, events: Sequence[StepEvent]) -> Iterator[Pair]:
    """Of the parts of a run, host RAM is measured in steps, and over all parts at its peak."""
    of_steps = max((step.host_pss_bytes for step in events), default=0) or None
    for phase, memory in vars(plan.host).items():
        if memory:
            measured = of_steps if phase == "step" else None
            yield Pair(phase.replace("_", " "), memory.bytes, measured)
    if plan.estimate.host_bytes or result.host_peak_bytes:
        predicted = plan.estimate.host_bytes or None
        yield Pair("peak of all", predicted, result.host_peak_bytes or None)


def time_lost(spent: Sequence[Spent]) -> str:
    """A bar for each use of the attempts' time; those that are not training in another colour."""
    total = sum(part.seconds for part in spent)
    if not total:
        return ""
    most = max(part.seconds for part in spent)
    drawn = "".join(
        f'<span class="name">{escaped(part.name)}</span><span class="error">'
        f'{part.seconds / total:.1%}</span><span class="bar"><i class="'
        f'{"" if part.is_training else "lost"}" style="width:{100 * part.seconds / most:.1f}%">'
        f"</i><span>{duration(part.seconds)}</span></span>"
        for part in spent
    )
    return f'<div class="bars">{drawn}</div>'
