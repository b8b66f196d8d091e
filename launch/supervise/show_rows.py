"""Encode rows in a child process, as training encodes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from launch.base import environment
from launch.base.errors import ConfigError, DataError, LaunchError, ResourceError
from launch.base.text import shown
from launch.base.workspace import CODE
from launch.data.files import shards
from launch.data.token_cache import TokenCache
from launch.schema.shown_rows import ShownRows

ERRORS = {error.exit_code: error for error in (ConfigError, DataError, ResourceError)}
NUM_READ = 1000  # rows that are read for the counts of ShownRows
CHECKED_ROWS, CHECKED_SHARDS = 100, 8  # of a dry run


def encoded(
    tokens: TokenCache,
    files: Sequence[Path],
    num_rows: int,
    line: int | None = None,
    num_read: int = NUM_READ,
) -> ShownRows:
    """The first rows of files, or the row at a line; counts of the first `num_read` rows of each.

    Raises DataError and ResourceError as tokenising would."""
    argv = ["training.children.show_rows", *map(str, (num_rows, line or 0, num_read, *files))]
    done = subprocess.run(
        [sys.executable, "-P", "-m", *argv],
        input=TypeAdapter(TokenCache).dump_json(tokens),
        env=environment.passed(os.environ) | {"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        return TypeAdapter(ShownRows).validate_json(done.stdout)
    if done.returncode in ERRORS:
        raise ERRORS[done.returncode](done.stdout.decode())
    sys.stderr.write(shown(done.stderr.decode(errors="replace")))
    raise LaunchError(f"the child that encodes rows ended with {done.returncode}, see above")


def check(tokens: TokenCache) -> None:
    """Encode the first rows of the data, unless that was done before. Raises as encoded() does, and
    DataError for a small file of which no row would be trained.

    A tokenizer that is trained on the data has a template of ours, which takes every row, unless
    the recipe names another."""
    recipe, checked = tokens.recipe, tokens.folder.with_suffix(".checked")
    is_ours = not (recipe.tokenizer.path or recipe.model.path or recipe.tokenizer.chat_template)
    if is_ours or tokens.folder.exists() or checked.exists():
        return
    files = [file for name in recipe.data.paths for file in shards.of(name)[:CHECKED_SHARDS]]
    rows = encoded(tokens, files, 1, num_read=CHECKED_ROWS)
    is_all = rows.num_read < CHECKED_ROWS and len(files) == sum(
        len(shards.of(name)) for name in recipe.data.paths
    )
    if is_all and not rows.lengths:
        left_out = "; ".join(f"{count:,}: {why}" for why, count in rows.left_out.items())
        raise DataError(
            f"{', '.join(map(str, recipe.data.paths))}: no row has a target to train on"
            f" ({rows.num_read:,} read; {left_out}); check the columns and data.max_length"
        )
    checked.parent.mkdir(parents=True, exist_ok=True)
    checked.touch()
