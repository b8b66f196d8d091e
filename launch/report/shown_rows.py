"""Text of rows as they will be trained."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from launch.base.text import encodable, shown
from launch.data import sources
from launch.report import row_facts
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat
from launch.schema.rows import ShownRow, ShownRows

_TARGET_STYLE = "bold green"
_MARKS = "⟦⟧"  # around tokens with a loss, without colours
_BAR_WIDTH = 40
COUNTED = ("rows", "tokens")  # facts of many rows


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
    formats = [sources.format_of(data, data_format, file) for file in files]
    facts = row_facts.facts(data_format, summary, max_length)
    for label, text in (
        *(
            ("data", f"{file}: {data_format_of_file.reason}")
            for file, data_format_of_file in zip(files, formats, strict=True)
        ),
        *((label, text) for label, text in facts if not is_one_row or label not in COUNTED),
        *(("", encodable(line, encoding)) for line in _histogram(summary.lengths)),
    ):
        yield Text(shown(f"{label:<10} {text}"))
    for row in summary.rows:
        yield Text("")
        yield Text(shown(row_facts.heading(row, max_length)), style="dim" if colours else "")
        if row.parts:
            yield _row(row, colours, encodable(_MARKS, encoding))
    if any(row.has_escapes for row in summary.rows):
        yield Text("")
        yield Text(row_facts.ESCAPES)


def _histogram(lengths: list[int]) -> Iterator[str]:
    """Rows by their length."""
    steps = row_facts.length_steps(lengths)
    most = max((count for _, _, count in steps), default=0)
    digits = len(f"{steps[-1][1]:,}") if steps else 0
    for begin, end, count in steps:
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        yield f"{begin:>{digits},}-{end:<{digits},} {bar} {count:,}"


def _row(row: ShownRow, colours: bool, marks: str) -> Text:
    style, begin, end = (_TARGET_STYLE, "", "") if colours else ("", *marks)
    text = Text()
    for part in row.parts:
        plain = shown(part.text)
        if part.is_target:
            text.append(f"{begin}{plain}{end}", style)
        else:
            text.append(plain)
    return text
