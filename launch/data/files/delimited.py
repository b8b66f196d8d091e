"""Read CSV and TSV files: a header, then rows of as many cells, which may hold quoted newlines."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.base.errors import DataError
from launch.data.files import shards

DELIMITERS = {"csv": ",", "tsv": "\t"}


def read(
    path: Path, file_type: str, decode: Callable[[int, bytes], str]
) -> Iterator[tuple[int, dict[str, str] | DataError]]:
    """(number of its first line, row, or the error of a row of another width) of each row.

    Raises DataError for a header or quotes that leave the rows after them unclear."""
    csv.field_size_limit(shards.MAX_ROW_BYTES)
    start = number = row_bytes = 0

    def lines() -> Iterator[str]:
        nonlocal number, row_bytes
        with shards.opened(path) as file:
            while raw := file.readline(shards.MAX_ROW_BYTES):
                number, row_bytes = number + 1, row_bytes + len(raw)
                if row_bytes > shards.MAX_ROW_BYTES:
                    raise DataError(
                        f"{path}:{start + 1}: a row longer than {shards.MAX_ROW_BYTES >> 20} MiB;"
                        " is a quote missing?"
                    )
                yield decode(number, raw)

    header: list[str] | None = None
    rows = csv.reader(lines(), delimiter=DELIMITERS[file_type], strict=True)
    while True:
        start, row_bytes = number, 0
        try:
            cells = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{start + 1}: cannot be read as {file_type.upper()} ({error}); quote each"
                ' cell that holds a quote, a delimiter or a line end, and write a quote in it as ""'
            ) from error
        if cells is None:
            return
        if not any(cells) and len(cells) < 2:  # a blank line
            continue
        if header is None:
            header = cells
            if twice := [name for name, count in Counter(cells).items() if count > 1]:
                raise DataError(f"{path}:{start + 1}: two columns have the name {twice[0]!r}")
        elif len(cells) != len(header):
            yield (
                start + 1,
                DataError(
                    f"{path}:{start + 1}: found {len(cells)} cells, expected {len(header)} as in"
                    " the header; mend or remove the row"
                ),
            )
        else:
            yield start + 1, dict(zip(header, cells, strict=True))
