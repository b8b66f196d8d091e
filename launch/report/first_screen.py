"""The first screen: a plan in at most 14 lines, of 100 columns on a terminal. plan_lines.py has
all of its rows."""

import textwrap
from collections.abc import Sequence
from datetime import datetime

from launch.base.text import COLUMNS, WHOLE
from launch.report import plan_lines
from launch.schema.machine import Machine
from launch.schema.plan import Change, Plan
from launch.schema.recipe import Recipe

LINES, _LABEL = 14, 13
SHOWN = (
    "model",
    "data",
    "sources",
    "licence",
    "tokens",
    "batch",
    "mode",
    "memory",
    "host RAM",
    "time",
)
_SHOWN_OF_A_CAUSE = 3  # changes; a preset makes a dozen
_VALUE_COLUMNS = 24  # width of a requested or effective value; a longer one is shortened


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
    facts = plan_lines.facts(recipe, machine, plan, now, finished_steps, columns)
    rows = {fact.label: fact.value for fact in facts if fact.label in SHOWN and not fact.group}
    screen = [
        _short(line, columns)
        for line in (
            f"plan for {recipe.name} on {machine.name}",
            *(f"  {label:<{_LABEL - 2}}{rows[label]}" for label in SHOWN if label in rows),
        )
    ]
    end = [line for label, text in below for line in labelled(label, text)]
    lines_left = max(LINES - len(screen) - len(end) - 1, 1)
    changes, num_hidden = _changes(plan.changes, lines_left, columns)
    screen += changes
    hidden = f"{num_hidden} more change{'' if num_hidden == 1 else 's'}, " if num_hidden else ""
    end = [*_with_label("more", [f"{source} {hidden}all settings and their reasons"]), *end]
    for note in plan_lines.notes(recipe, plan):
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
        f"  {'' if number else label:<{_LABEL - 2}}{line}" for number, line in enumerate(paragraph)
    ]


def _short(text: str, columns: int) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= columns:
        return text
    head = (columns - 3) // 2
    return f"{text[:head]}...{text[len(text) - (columns - 3 - head) :]}"


def _folded(label: str, text: str, columns: int) -> list[str]:
    """The text as lines of a paragraph with the label before the first."""
    return _with_label(label, textwrap.wrap(text, columns - _LABEL, break_on_hyphens=False))


def _changes(changes: Sequence[Change], most: int, columns: int) -> tuple[list[str], int]:
    """As many causes with their changes as `most` lines take, and the number of changes that are
    not shown."""
    causes: dict[str, list[Change]] = {}
    for change in changes:
        # the first clause of a reason is the cause; its others stand in the whole plan
        causes.setdefault(change.reason.partition(";")[0], []).append(change)
    # A preset makes the most changes, and comes last
    by_size = sorted(causes.items(), key=lambda item: len(item[1]))
    lines_each = max(most // max(len(by_size), 1), 1)
    width = lines_each * (columns - _LABEL) - 10 * (lines_each - 1)  # wrapping wastes some
    for count in range(len(by_size), 0, -1):
        texts = [_cause(cause, group, width) for cause, group in by_size[:count]]
        lines = [line for text, _ in texts for line in _folded("changed", text, columns)]
        if len(lines) <= most:
            return lines, len(changes) - sum(num_shown for _, num_shown in texts)
    return [], len(changes)


def _cause(cause: str, changes: Sequence[Change], columns: int) -> tuple[str, int]:
    """A text of at most `columns` with the first changes of a cause, and their number."""
    text, width = "", _VALUE_COLUMNS if columns < WHOLE // 2 else WHOLE
    if all(change.requested == change.effective for change in changes):  # a key by another name
        return _short(cause, columns), len(changes)
    for num_shown in range(min(len(changes), _SHOWN_OF_A_CAUSE), 0, -1):
        values = ", ".join(
            f"{change.key.rpartition('.')[2]} {_short(change.requested, width)} ->"
            f" {_short(change.effective, width)}"
            for change in changes[:num_shown]
        )
        num_left_out = len(changes) - num_shown
        text = f"{values}{f' and {num_left_out} more' if num_left_out else ''} ({cause})"
        if len(text) <= columns:
            return text, num_shown
    return _short(text, columns), 1
