"""Facts of the rows that a run trains, as `show` and the HTML report tell them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from launch.schema.plan import DataFormat
from launch.schema.rows import ShownRow, ShownRows

BARS = 8
FEWEST = 20  # rows of a histogram
ESCAPES = "A backslash before <|...|> or the like: text of the row that is no special token."
WAYS = {
    "marks": "the parts that the template marks with {% generation %}",
    "prefixes": "answers, found by the prompts before them",
    "characters": "answers, found by following their characters",
    "turns": "answers, a row for each: the template renders earlier answers differently, or ends"
    " them with no token of the vocabulary",
}


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
        WAYS[method] + (f" ({count:,} rows)" if count < total else "")
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
    if len(lengths) < FEWEST:
        return []
    width = -(-max(lengths) // BARS)
    counts = Counter((length - 1) // width for length in lengths)
    return [(i * width + 1, (i + 1) * width, counts[i]) for i in range(BARS)]


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
