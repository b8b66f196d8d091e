"""Encode rows in a child process, as training encodes them."""

from collections.abc import Sequence
from pathlib import Path

from launch.base import files as base_files
from launch.base.errors import DataError
from launch.data.conversation import Sample, text_of
from launch.data.files import shards
from launch.data.rows import BadRows, Slice, samples_of
from launch.data.token_cache import TokenCache
from launch.data.worker import WORKER, EncodeRows
from launch.schema.rows import ShownRows

NUM_READ = 1000  # rows that are read for the counts of ShownRows
_CHECKED_ROWS, _CHECKED_SHARDS = 100, 8  # rows and shards that check() encodes at first
_ALL_ROWS = 1 << 30  # or as many as the child reads of a file
_TURN_TOKENS = 16  # most tokens of a template of ours around a message


def encoded(
    tokens: TokenCache,
    files: Sequence[Path],
    num_rows: int,
    line: int | None = None,
    num_read: int = NUM_READ,
) -> ShownRows:
    """The first rows of files, or the row at a line; counts of the first `num_read` rows of each.

    Raises DataError and ResourceError as tokenising would."""
    request = EncodeRows(tokens, num_rows, line, num_read, tuple(files))
    tokenizer = tokens.recipe.tokenizer.path or tokens.recipe.model.path
    of_folder = f" with the tokenizer of {tokenizer}" if tokenizer else ""
    reply = WORKER.reply(request, f"encodes the first rows{of_folder}")
    return base_files.adapter(ShownRows).validate_json(reply)


def check(tokens: TokenCache) -> None:
    """Encode the first rows of the data, unless that was done before. Raises as encoded() does, and
    DataError where no row would be trained.

    A tokenizer that is trained on the data has a template of ours, which takes every row, unless
    the recipe names another: then it is made only for rows that may all be left out."""
    recipe, checked = tokens.recipe, tokens.folder.with_suffix(".checked")
    is_ours = not (recipe.tokenizer.path or recipe.model.path or recipe.tokenizer.chat_template)
    if tokens.folder.exists() or checked.exists() or (is_ours and _is_trained(tokens)):
        return
    files = [
        file for name in recipe.data.paths for file in shards.list_shards(name)[:_CHECKED_SHARDS]
    ]
    rows = encoded(tokens, files, 1, num_read=_CHECKED_ROWS)
    if not rows.lengths:
        rows = encoded(tokens, files, 1, num_read=_ALL_ROWS)
    refuse_untrained(recipe.data.paths, rows)
    checked.parent.mkdir(parents=True, exist_ok=True)
    checked.touch()


def refuse_untrained(paths: Sequence[Path], rows: ShownRows) -> None:
    """Raise DataError if none of the rows that were read is trained."""
    if not rows.lengths:
        left_out = "".join(f"; {count:,}: {why}" for why, count in rows.left_out.items())
        raise DataError(
            f"{', '.join(map(str, paths))}: no row has a target to train on ({rows.num_read:,}"
            f" read{left_out}); check the columns and data.max_length"
        )


def _is_trained(tokens: TokenCache) -> bool:
    """True if one of the first rows is trained whatever the tokenizer: it fits, since a token has a
    byte at least."""
    data = tokens.recipe.data
    first = Slice(shards.list_shards(data.paths[0])[0])
    bad, own = BadRows(data.max_bad_rows), tokens.data_format.of_source(0)
    return any(
        len(text_of(sample).encode()) < data.max_length - _template_tokens(sample)
        for sample in samples_of(first, own, bad, _CHECKED_ROWS)
    )


def _template_tokens(sample: Sample) -> int:
    """The most tokens of a template of ours in a sample; more than a row has, if its last message
    may have no loss, or its text is a single token."""
    if isinstance(sample, str):
        return 2 if len(sample.split()) > 2 else _ALL_ROWS
    last = sample.messages[-1]
    is_answer = last["role"] == "assistant" and last.get("weight") != 0 and last["content"]
    return _TURN_TOKENS * len(sample.messages) if is_answer and is_answer.strip() else _ALL_ROWS
