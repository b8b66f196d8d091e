"""Rows as they will be trained, and facts of them, as `show` and the HTML report tell them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from launch.base.text import encodable, shown
from launch.data import sources
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat
from launch.schema.rows import ShownRow, ShownRows

_TARGET_STYLE = "bold green"
_MARKS = "⟦⟧"  # around tokens with a loss, without colours
_BAR_WIDTH = 40
_COUNTED = ("rows", "tokens")  # facts of many rows
_BARS = 8
_FEWEST = 20  # rows of a histogram
ESCAPES = "A backslash before <|...|> or the like: text of the row that is no special token."
_WAYS = {
    "marks": "the parts that the template marks with {% generation %}",
    "prefixes": "answers, found by the prompts before them",
    "characters": "answers, found by following their characters",
    "turns": "answers, a row for each: the template renders earlier answers differently, or ends"
    " them with no token of the vocabulary",
}


def lines(
    data: DataSection,
    data_format: DataFormat,
    files: Sequence[Path],
    summary: ShownRows,
    colours: bool,
    is_one_row: bool = False,
    encoding: str = "utf-8",
) -> Iterator[Text]:
    """The rows of files, with the targets in colour or in brackets, below the counts, for a
    terminal of an encoding."""
    max_length = data.max_length
    for label, text in (
        *(
            ("data", f"{file}: {sources.format_of(data, data_format, file).reason}")
            for file in files
        ),
        *(
            (label, text)
            for label, text in facts(data_format, summary, max_length)
            if not is_one_row or label not in _COUNTED
        ),
        *(("", encodable(line, encoding)) for line in _histogram(summary.lengths)),
    ):
        yield Text(shown(f"{label:<10} {text}"))
    for row in summary.rows:
        yield Text("")
        yield Text(shown(heading(row, max_length)), style="dim" if colours else "")
        if row.parts:
            yield _row(row, colours, encodable(_MARKS, encoding))
    if any(row.has_escapes for row in summary.rows):
        yield Text("")
        yield Text(ESCAPES)


def _histogram(lengths: list[int]) -> Iterator[str]:
    """Rows by their length."""
    steps = length_steps(lengths)
    most = max((count for _, _, count in steps), default=0)
    digits = len(f"{steps[-1][1]:,}") if steps else 0
    for begin, end, count in steps:
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        yield f"{begin:>{digits},}-{end:<{digits},} {bar} {count:,}"


def _row(row: ShownRow, colours: bool, marks: str) -> Text:
    style, begin, end = (_TARGET_STYLE, "", "") if colours else ("", *marks)
    return Text.assemble(
        *(
            (f"{begin}{shown(part.text)}{end}", style) if part.is_target else shown(part.text)
            for part in row.parts
        )
    )


# ---- facts
# ---------------------------------------------------------------------------


def facts(
    data_format: DataFormat, summary: ShownRows, max_length: int
) -> Iterator[tuple[str, str]]:
    """(label, text) of the columns, the template, and counts of the rows that were read."""
    for label, text in (
        *(("", note) for note in data_format.notes),
        ("template", summary.template),
        ("loss on", _loss(summary)),
        ("rows", _rows(summary, max_length)),
        ("messages", ", ".join(f"{count:,} {name}" for name, count in summary.contents.items())),
        *(("bad row", error) for error in summary.bad[:3]),
        ("tokens", _tokens(summary)),
    ):
        if text:
            yield label, text


def _loss(summary: ShownRows) -> str:
    total = sum(summary.methods.values())
    return "; ".join(
        _WAYS[method] + (f" ({count:,} rows)" if count < total else "")
        for method, count in summary.methods.items()
    )


def _rows(summary: ShownRows, max_length: int) -> str:
    first = f"the first {summary.num_read:,} were read"
    files = f"{summary.num_read:,} of {summary.num_files} files were read"
    counts = [
        (summary.num_held_out, "of them are held out (data.validation_size)"),
        *((count, f"left out ({reason})") for reason, count in summary.left_out.items()),
        (summary.num_truncated, f"truncated at data.max_length {max_length}"),
        (summary.num_bad, "bad rows left out"),
    ]
    parts = [f"{count:,} {what}" for count, what in counts if count]
    return ", ".join([first if summary.num_files == 1 else files, *parts])


def _tokens(summary: ShownRows) -> str:
    if not summary.lengths:
        return "none: no row is trained"
    total = sum(summary.lengths)
    return (
        f"{total / len(summary.lengths):.0f} a row on average, longest {max(summary.lengths):,};"
        f" {summary.num_targets / total:.0%} have a loss"
    )


def length_steps(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first length, last length, rows) of steps of equal width; [] for few rows."""
    if len(lengths) < _FEWEST:
        return []
    width = -(-max(lengths) // _BARS)
    counts = Counter((length - 1) // width for length in lengths)
    return [(i * width + 1, (i + 1) * width, counts[i]) for i in range(_BARS)]


def heading(row: ShownRow, max_length: int) -> str:
    """The place of a row, its tokens, or the reason for which it is left out."""
    place = row.place
    if row.is_held_out:
        place += " (held out)"
    elif row.times != 1:
        place += f" ({row.times} times an epoch)" if row.times else " (not trained: weight)"
    if not row.parts:
        return f"{place}: left out, {row.left_out}"
    truncated = f", truncated at {max_length:,}" if row.is_truncated else ""
    return f"{place}: {row.num_tokens:,} tokens, {row.num_targets:,} with a loss{truncated}"
