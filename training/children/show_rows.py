"""Encode some rows as training does, and print a ShownRows as JSON:
`python -m training.children.show_rows NUM_ROWS LINE NUM_READ FILE...` with a TokenCache as its
input. A mistake in the data is printed instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from launch.base import processes
from launch.base.errors import LaunchError
from launch.data import token_hashes
from launch.data.token_cache import TokenCache
from launch.schema.shown_rows import ShownRows
from training.compat import without_torch

if TYPE_CHECKING:
    from training.data.row_summary import RowSummary


def summary_of(
    tokens: TokenCache, num_rows: int, line: int | None, num_read: int, files: Sequence[Path]
) -> RowSummary:
    """The first rows of the files, or the row at a line. Raises DataError and ResourceError."""
    from training.data.row_summary import RowSummary

    summary = RowSummary(tokens, _tokenizer(tokens))
    for file in files:
        if line:
            summary.add_line(file, line)
        else:
            summary.add_first(file, num_read, num_rows)
    return summary


def _tokenizer(tokens: TokenCache) -> Any:
    """The tokenizer of the tokenised rows, if they are there, or the one that they would get."""
    from training.data import prepare, tokenise, tokenizer

    if tokens.folder.exists() and not token_hashes.fault(tokens.folder):
        return tokenizer.load(tokens.folder / tokenise.TOKENIZER)
    return prepare.tokenizer_of(tokens, partial(print, file=sys.stderr))


def main(argv: Sequence[str]) -> int:
    processes.settle_process()
    without_torch.hide()
    num_rows, line, num_read = map(int, argv[:3])
    try:
        processes.check_threads()
        tokens = TypeAdapter(TokenCache).validate_json(sys.stdin.buffer.read())
        files = [Path(file) for file in argv[3:]]
        shown = summary_of(tokens, num_rows, line or None, num_read, files).summary()
    except LaunchError as error:
        sys.stdout.buffer.write(str(error).encode())
        return error.exit_code
    sys.stdout.buffer.write(TypeAdapter(ShownRows).dump_json(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
