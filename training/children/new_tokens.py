"""Add tokens to a folder's tokenizer in memory, and print a NewTokens as JSON:
`python -m training.children.new_tokens FOLDER [TEMPLATE]` with a JSON list of tokens as its input.
A folder without a tokenizer is named instead. TEMPLATE is a value of tokenizer.chat_template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.base import processes
from launch.schema.result import NewTokens
from training.compat import without_torch


def new_tokens(folder: Path, template: str | None, tokens: list[str]) -> NewTokens:
    """The ids of tokens that a folder's tokenizer has, and would get. Raises DataError and
    ResourceError."""
    from training.data import tokenizer

    loaded = tokenizer.load(folder, template)
    before = loaded.get_vocab()
    there = {token: before[token] for token in tokens if token in before}
    ids = tokenizer.add_tokens(loaded, tokens)
    return NewTokens(
        size_before=max(before.values()) + 1,
        size=max(loaded.get_vocab().values()) + 1,
        ids=ids,
        there=there,
    )


def main(folder: str, template: str | None = None) -> int:
    without_torch.hide()
    return processes.reply(lambda: new_tokens(Path(folder), template, json.load(sys.stdin)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
