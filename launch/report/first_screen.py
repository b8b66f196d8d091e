"""The first screen: a plan in at most 14 lines, of 100 columns on a terminal. text.py has the full
plan."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from launch.base.text import COLUMNS, WHOLE, size
from launch.predict.budgets import host_budget_bytes
from launch.report.text import HOPELESS_S, batch, length_text, notes, time_text
from launch.schema.machine import Machine
from launch.schema.plan import Change, Plan
from launch.schema.recipe import Recipe

LINES, LABEL = 14, 13
NAME_COLUMNS = 36  # of a model; of a longer path its last part
SHOWN_OF_A_CAUSE = 3  # changes; a preset makes a dozen
VALUE_COLUMNS = 24  # of a requested or effective value; a longer one is shortened


def lines(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    now: datetime,
    finished_steps: int = 0,
    below: Sequence[tuple[str, str]] = (),
    source: str = "--explain shows",
    columns: int = COLUMNS,
) -> list[str]:
    """The plan in short. `below` are labels and texts of the last lines; `now` is local time;
    `source` tells where the full plan is; `columns`: longer lines are shortened or folded."""
    screen = [
        f"plan for {recipe.name} on {machine.name}",
        _line("model", _model(recipe, plan, columns)),
        _line("data", _data(recipe, plan)),
        *_sources(recipe, plan),
        *_loss(plan),
        _line("batch", batch(plan.strategy) + (" packed sequences" if plan.packing else "")),
        _line("mode", _mode(machine, plan)),
        _line("memory", _memory(plan)),
        _line("host RAM", _host_memory(recipe, machine, plan)),
        _line("time", _time(recipe, plan, now, finished_steps)),
    ]
    screen = [_short(line, columns) for line in screen]
    end = [line for label, text in below for line in labelled(label, text)]
    lines_left = max(LINES - len(screen) - len(end) - 1, 1)
    changes, num_hidden = _changes(plan.changes, lines_left, columns)
    screen += changes
    hidden = f"{num_hidden} more change{'' if num_hidden == 1 else 's'}, " if num_hidden else ""
    end.insert(0, _line("more", f"{source} {hidden}all settings and their reasons"))
    for note in notes(recipe, plan):
        folded = _folded("note", note, columns)
        if len(screen) + len(folded) + len(end) <= LINES:
            screen += folded
    return screen + end


def labelled(label: str, text: str) -> list[str]:
    """The text with the label before its first line; long lines stay whole, so that a command can
    be pasted."""
    return _with_label(label, text.splitlines())


def _with_label(label: str, paragraph: Sequence[str]) -> list[str]:
    return [
        f"  {'' if number else label:<{LABEL - 2}}{line}" for number, line in enumerate(paragraph)
    ]


def _line(label: str, text: str) -> str:
    return f"  {label:<{LABEL - 2}}{text}"


def _short(text: str, columns: int) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= columns:
        return text
    head = (columns - 3) // 2
    return f"{text[:head]}...{text[len(text) - (columns - 3 - head) :]}"


def _folded(label: str, text: str, columns: int) -> list[str]:
    """The text as lines of a paragraph with the label before the first."""
    return _with_label(label, textwrap.wrap(text, columns - LABEL, break_on_hyphens=False))


def _model(recipe: Recipe, plan: Plan, columns: int) -> str:
    model = plan.shape
    kind = "LoRA, " if recipe.lora else ""
    bits = ", weights in 4 bits" if recipe.quantized(plan.strategy.mixed_precision) else ""
    is_shown = len(model.name) <= NAME_COLUMNS or columns == WHOLE
    name = model.name if is_shown else Path(model.name).name
    return (
        f"{name}: {model.parameters:,} parameters, {kind}{model.trainable_parameters:,}"
        f" trained{bits}"
    )


def _data(recipe: Recipe, plan: Plan) -> str:
    rows = "rows are not counted" if plan.rows is None else f"{plan.rows:,} rows"
    if plan.rows_held_out:
        rows += f" and {plan.rows_held_out:,} held out"
    if plan.rows_left_out:
        rows += f" ({plan.rows_left_out:,} left out)"
    elif plan.counts_bad_rows(recipe):
        rows += " (bad rows included)"
    lengths = f"lengths are assumed: {length_text(plan)} tokens each"
    if plan.rows_of is not None:
        lengths = f"all {plan.rows_of:,} tokens long, as --rows-of says"
    if plan.padding and plan.padding.rows:
        mean = plan.padding.tokens / plan.padding.rows
        inputs = "inputs of " if plan.shape.is_encoder_decoder else ""
        lengths = f"{inputs}{mean:,.0f} tokens on average, at most {length_text(plan)}"
    count = len(recipe.data.sources)
    name = recipe.data.train_names if count == 1 else f"{count} sources"
    files = f" ({plan.data_format.num_files:,} files)" if plan.data_format.num_files > 1 else ""
    return f"{name}{files}: {rows}, {lengths}"


def _sources(recipe: Recipe, plan: Plan) -> list[str]:
    """A line on the rows of each of several sources."""
    named = zip(recipe.data.source_names, plan.sources, strict=False)
    rows = ", ".join(f"{name} {source.rows:,}" for name, source in named)
    return [_line("sources", f"rows an epoch: {rows}")] if len(plan.sources) > 1 else []


def _loss(plan: Plan) -> list[str]:
    """A line on the share of tokens with a loss, and the template, if one of them is known."""
    parts = [] if plan.target_share is None else [f"{plan.target_share:.0%} have a loss"]
    parts += [f"template {plan.data_format.template}"] if plan.data_format.template else []
    return [_line("tokens", ", ".join(parts))] if parts else []


def _mode(machine: Machine, plan: Plan) -> str:
    strategy = plan.strategy
    precision = {"no": "float32"}.get(strategy.mixed_precision, strategy.mixed_precision)
    device = f"{machine.cpu_count} CPU cores"
    if strategy.device == "cuda":
        counts = Counter(gpu.name for gpu in machine.gpus[: strategy.processes_per_machine])
        device = " + ".join(
            f"{count} x {name}" if count > 1 else name for name, count in counts.items()
        )
    if strategy.num_machines > 1:
        own = f"machine_rank {plan.rendezvous.machine_rank} of " if plan.rendezvous else ""
        device += f" ({own}{strategy.num_machines} machines)"
    backend = f"backend {strategy.backend}, " if strategy.backend else ""
    return f"{strategy.mode}, {backend}{precision}, {device}"


def _memory(plan: Plan) -> str:
    estimate = plan.estimate
    of_budget = f"of {size(plan.budget_bytes)} per process"
    if estimate.peak is None:
        return (
            f"model states {size(estimate.model_state_bytes)} {of_budget}; activations are not"
            " predicted"
        )
    return f"{size(estimate.device_bytes)} predicted {of_budget}, most in {estimate.peak.section}"


def _host_memory(recipe: Recipe, machine: Machine, plan: Plan) -> str:
    estimate, budget = plan.estimate, size(host_budget_bytes(recipe, machine))
    if not estimate.host:
        return f"not predicted; {budget} available"
    return f"{size(estimate.host_bytes)} predicted of {budget}, most in {estimate.host_phase}"


def _time(recipe: Recipe, plan: Plan, now: datetime, finished_steps: int) -> str:
    """Seconds a step, steps, hours and the end, as far as they are known before training."""
    text, seconds = time_text(recipe, plan, finished_steps)
    if seconds is None or seconds > HOPELESS_S:
        return text
    # minutes are rounded up: a start at 10:00 that takes 10 s ends at 10:01
    end = (now + timedelta(seconds=seconds + 59)).replace(second=0)
    day = "" if end.date() == now.date() else f"{end:%Y-%m-%d} "
    return f"{text}: ends about {day}{end:%H:%M}"


def _changes(changes: Sequence[Change], most: int, columns: int) -> tuple[list[str], int]:
    """As many causes with their changes as `most` lines take, and the number of changes that are
    not shown."""
    causes: dict[str, list[Change]] = {}
    for change in changes:
        # the first clause of a reason is the cause; its others stand in the whole plan
        causes.setdefault(change.reason.partition(";")[0], []).append(change)
    # what a preset changes comes last
    by_size = sorted(causes.items(), key=lambda item: len(item[1]))
    lines_each = max(most // max(len(by_size), 1), 1)
    width = lines_each * (columns - LABEL) - 10 * (lines_each - 1)  # wrapping wastes some
    for count in range(len(by_size), 0, -1):
        texts = [_cause(cause, group, width) for cause, group in by_size[:count]]
        lines = [line for text, _ in texts for line in _folded("changed", text, columns)]
        if len(lines) <= most:
            return lines, len(changes) - sum(num_shown for _, num_shown in texts)
    return [], len(changes)


def _cause(cause: str, changes: Sequence[Change], columns: int) -> tuple[str, int]:
    """A text of at most `columns` with the first changes of a cause, and their number."""
    text, width = "", VALUE_COLUMNS if columns < WHOLE // 2 else WHOLE
    if all(change.requested == change.effective for change in changes):  # a key by another name
        return _short(cause, columns), len(changes)
    for num_shown in range(min(len(changes), SHOWN_OF_A_CAUSE), 0, -1):
        values = ", ".join(
            f"{change.key.rpartition('.')[2]} {_short(change.requested, width)} ->"
            f" {_short(change.effective, width)}"
            for change in changes[:num_shown]
        )
        others = len(changes) - num_shown
        text = f"{values}{f' and {others} more' if others else ''} ({cause})"
        if len(text) <= columns:
            return text, num_shown
    return _short(text, columns), 1
