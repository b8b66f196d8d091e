"""Which rows a run has trained, in which step: read from what its ranks wrote, and held against its
epochs."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.base.errors import CheckpointError, ConfigError
from launch.data import token_cache, token_hashes
from launch.run_folder import layout, manifest
from launch.run_folder.layout import AttemptDir, RunDir


def lines(run: RunDir) -> list[str]:
    """How often each row was trained in each epoch. Raises CheckpointError when it is not once in
    each whole one."""
    used = run.read_tokens()
    counts = token_hashes.counts(used.folder) if used else None
    if used is None or counts is None:
        raise ConfigError(
            f"{run.root}: found no run of ours with its tokenised rows; give a folder"
            " runs/<recipe>/<time>"
        )
    if "train" not in counts:
        return _of_a_stream(run)
    rows = counts["train"]["rows"]
    documents = None
    if counts["train"].get("documents"):  # the rows are packed sequences
        documents = _documents(used.folder, counts["train"]["documents"])
    kind = "rows" if documents is None else "packed sequences"
    order = [row for _, taken_then in sorted(taken(run).items()) for row in taken_then]
    said = []
    for epoch, start in enumerate(range(0, len(order), rows), 1):
        found = Counter(order[start : start + rows])
        twice = [row for row, times in found.items() if times > 1]
        outside = [row for row in found if not 0 <= row < rows]
        if twice or outside:
            wrong = (
                f"row {twice[0]} {found[twice[0]]} times"
                if twice
                else f"row {outside[0]}, which there is not"
            )
            raise CheckpointError(
                f"{run.root}: epoch {epoch} has {wrong} ({len(twice)} of {rows} rows more than"
                " once)"
            )
        is_whole = len(found) == rows
        line = f"epoch {epoch}: {'all' if is_whole else len(found)} of {rows:,} {kind}, each once"
        if documents is not None:
            held = sum(len(documents[row]) for row in found)
            line += (
                f", and so {'all' if is_whole else held} of {counts['train']['documents']:,} rows"
            )
        said.append(line)
    return said or ["no step has been recorded"]


def _of_a_stream(run: RunDir) -> list[str]:
    """A stream's sequences are counted from the start of the run: each step takes those that
    follow."""
    order = sorted(row for rows in taken(run).values() for row in rows)
    if order != list(range(len(order))):
        raise CheckpointError(
            f"{run.root}: of the first {len(order):,} sequences some are missing or came twice"
        )
    return [f"stream: the first {len(order):,} packed sequences, each once"]


def _documents(tokens: Path, count: int) -> Any:
    """The numbers of the documents in each packed sequence. Raises CheckpointError when they are
    not 0..count-1."""
    import pyarrow as pa

    column, numbers = [], []
    for path in token_cache.token_files(tokens, "train"):
        with pa.memory_map(str(path)) as file:
            chunks = pa.ipc.open_stream(file).read_all().column("documents")
            before = len(numbers)  # each file counts its own
            numbers += sorted(
                before + number for chunk in chunks.chunks for number in chunk.flatten().to_pylist()
            )
            column += [range(len(held)) for held in chunks.to_pylist()]
    if numbers != list(range(count)):
        raise CheckpointError(
            f"{tokens}: its packed sequences do not hold {count:,} rows, each once"
        )
    return column


def taken(run: RunDir) -> dict[int, list[int]]:
    """The rows of each optimizer step that counts: a resumed attempt drops what came after its
    checkpoint."""
    found: dict[int, list[int]] = {}
    continues = run.read_continues()
    done = 0
    if continues:
        checkpoint = continues.checkpoint
        earlier = taken(RunDir(checkpoint.parent.parent))
        last = manifest.step_of(checkpoint)
        # its steps are counted by its own batch: they come first
        done = -sum(step <= last for step in earlier)
        found = {
            done + i: earlier[step]
            for i, step in enumerate(sorted(step for step in earlier if step <= last), 1)
        }
    for attempt in run.attempts():
        steps = _of_attempt(attempt)
        if steps:
            found = {step: rows for step, rows in found.items() if step < min(steps)} | steps
    return found


def _of_attempt(attempt: AttemptDir) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for file in sorted(attempt.root.glob(f"ranks/*/{layout.SAMPLES}")):
        for step, rows in _records(file):
            found.setdefault(step, []).extend(rows)
    return found


def _records(file: Path) -> Iterator[tuple[int, list[int]]]:
    """(step, rows) of one rank; a last record that a kill has cut is left out."""
    content = file.read_bytes()
    numbers = array("i", content[: len(content) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    at = 0
    while at + 2 <= len(numbers) and at + 2 + numbers[at + 1] <= len(numbers):
        step, count = numbers[at], numbers[at + 1]
        yield step, numbers[at + 2 : at + 2 + count].tolist()
        at += 2 + count
