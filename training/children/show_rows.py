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
from launch.data import token_hashes
from launch.data.token_cache import TokenCache
from launch.schema.rows import ShownRows
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


def _shown(argv: Sequence[str]) -> ShownRows:
    processes.check_threads()
    num_rows, line, num_read = map(int, argv[:3])
    tokens = TypeAdapter(TokenCache).validate_json(sys.stdin.buffer.read())
    files = [Path(file) for file in argv[3:]]
    return summary_of(tokens, num_rows, line or None, num_read, files).summary()


if __name__ == "__main__":
    without_torch.hide()
    sys.exit(processes.reply(partial(_shown, sys.argv[1:])))
