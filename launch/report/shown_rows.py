"""Text of rows as they will be trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from launch.base.text import shown
from launch.predict.estimate import PlanContext
from launch.schema.shown_rows import ShownRow, ShownRows

TARGET_STYLE = "bold green"
BEGIN, END = "⟦", "⟧"  # around tokens with a loss, without colours
BARS, BAR_WIDTH = 8, 40
ESCAPES = "A backslash before <|...|> or the like: text of the row that is no special token."
FEWEST = 20  # rows of a histogram


def lines(
    context: PlanContext, file: Path, summary: ShownRows, colours: bool, is_one_row: bool = False
) -> Iterator[Text]:
    """The rows, with the targets in colour or in brackets, below the counts."""
    data_format, max_length = context.data_format, context.recipe.data.max_length
    for head, value in (
        ("data", f"{file}: {data_format.reason}"),
        *(("", note) for note in data_format.notes),
        ("template", summary.template),
        ("loss on", _loss(summary)),
        ("rows", "" if is_one_row else _rows(summary, max_length)),
        ("messages", ", ".join(f"{count:,} {name}" for name, count in summary.contents.items())),
        *(("bad row", error) for error in summary.bad[:3]),
        ("tokens", "" if is_one_row else _tokens(summary)),
        *(("", line) for line in _histogram(summary.lengths)),
    ):
        if value:
            yield Text(shown(f"{head:<10} {value}"))
    for row in summary.rows:
        yield Text("")
        yield Text(shown(_heading(row, max_length)), style="dim" if colours else "")
        if row.parts:
            yield _row(row, colours)
    if any(row.has_escapes for row in summary.rows):
        yield Text("")
        yield Text(ESCAPES)


def _loss(summary: ShownRows) -> str:
    ways = {
        "marks": "the parts that the template marks with {% generation %}",
        "prefixes": "answers, found by the prompts before them",
        "characters": "answers, found by following their characters",
        "turns": "answers, a row for each: the template renders earlier answers differently",
    }
    total = sum(summary.methods.values())
    return "; ".join(
        ways[method] + (f" ({count:,} rows)" if count < total else "")
        for method, count in summary.methods.items()
    )


def _rows(summary: ShownRows, max_length: int) -> str:
    parts = [f"the first {summary.num_read:,} were read"]
    parts += [f"{count:,} left out ({reason})" for reason, count in summary.left_out.items()]
    if summary.num_truncated:
        parts.append(f"{summary.num_truncated:,} truncated at data.max_length {max_length}")
    return ", ".join(parts)


def _tokens(summary: ShownRows) -> str:
    if not summary.lengths:
        return "none: no row is trained"
    total = sum(summary.lengths)
    return (
        f"{total / len(summary.lengths):.0f} a row on average, longest {max(summary.lengths):,};"
        f" {summary.num_targets / total:.0%} have a loss"
    )


def _histogram(lengths: list[int]) -> Iterator[str]:
    """Rows by their length, in steps of equal width."""
    if len(lengths) < FEWEST:
        return
    width = -(-max(lengths) // BARS)
    counts = [0] * BARS
    for length in lengths:
        counts[(length - 1) // width] += 1
    digits = len(f"{BARS * width:,}")
    for i, count in enumerate(counts):
        bar = "█" * round(BAR_WIDTH * count / max(counts)) or ("▏" if count else "")
        begin, end = f"{i * width + 1:,}", f"{(i + 1) * width:,}"
        yield f"{begin:>{digits}}-{end:<{digits}} {bar} {count:,}"


def _heading(row: ShownRow, max_length: int) -> str:
    if not row.parts:
        return f"{row.place}: left out, {row.left_out}"
    truncated = f", truncated at {max_length:,}" if row.is_truncated else ""
    return f"{row.place}: {row.num_tokens:,} tokens, {row.num_targets:,} with a loss{truncated}"


def _row(row: ShownRow, colours: bool) -> Text:
    text = Text()
    for part in row.parts:
        plain = shown(part.text)
        if not part.is_target:
            text.append(plain)
        elif colours:
            text.append(plain, style=TARGET_STYLE)
        else:
            text.append(f"{BEGIN}{plain}{END}")
    return text
