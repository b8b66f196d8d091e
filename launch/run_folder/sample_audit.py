"""The rows that a run has trained, by step, as its ranks wrote them; compared with its epochs."""

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import CheckpointError, ConfigError
from launch.data import token_cache
from launch.run_folder import layout, manifest


def lines(run: layout.RunDir) -> list[str]:
    """A line for each epoch. Raises CheckpointError for a row that an epoch trained twice, and for
    one that does not exist."""
    used = run.read_tokens()
    counts = token_cache.counts(used.folder) if used else None
    if used is None or counts is None:
        raise ConfigError(
            f"{run.root}: found no run of ours with its tokenised rows; give a folder"
            " runs/<recipe>/<time>"
        )
    if "train" not in counts:
        return _of_a_stream(run)
    rows = counts["train"]["rows"]
    packed = counts["train"].get("documents")  # of rows that are packed sequences
    documents = _documents(used.folder, packed) if packed else None
    kind = "rows" if documents is None else "packed sequences"
    order = [row for _, taken_then in sorted(taken(run).items()) for row in taken_then]
    report = []
    for epoch, start in enumerate(range(0, len(order), rows), 1):
        times_by_row = Counter(order[start : start + rows])
        twice = [row for row, times in times_by_row.items() if times > 1]
        outside = [row for row in times_by_row if not 0 <= row < rows]
        if twice or outside:
            wrong = (
                f"row {twice[0]} {times_by_row[twice[0]]} times"
                if twice
                else f"row {outside[0]}, which there is not"
            )
            raise CheckpointError(
                f"{run.root}: epoch {epoch} has {wrong} ({len(twice)} of {rows} rows more than"
                " once)"
            )
        is_complete, num_rows = len(times_by_row) == rows, len(times_by_row)
        line = f"epoch {epoch}: {'all' if is_complete else num_rows} of {rows:,} {kind}, each once"
        if documents is not None:
            num_documents = sum(len(documents[row]) for row in times_by_row)
            line += f", and so {'all' if is_complete else num_documents} of {packed:,} rows"
        report.append(line)
    return report or ["no step has been recorded"]


def _of_a_stream(run: layout.RunDir) -> list[str]:
    """A stream's sequences are counted from the run's start: each step takes the next."""
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
            column += [range(len(documents)) for documents in chunks.to_pylist()]
    if numbers != list(range(count)):
        raise CheckpointError(
            f"{tokens}: its packed sequences do not hold {count:,} rows, each once"
        )
    return column


def taken(run: layout.RunDir) -> dict[int, list[int]]:
    """The rows of each optimizer step that counts: a resumed attempt drops what came after its
    checkpoint."""
    rows_by_step: dict[int, list[int]] = {}
    if continues := run.read_continues():
        earlier = taken(layout.RunDir(continues.checkpoint.parent.parent))
        last = manifest.step_of(continues.checkpoint)
        done = sorted(step for step in earlier if step <= last)
        # its steps are counted by its own batch: they come first, up to step 0
        rows_by_step = {i: earlier[step] for i, step in enumerate(done, 1 - len(done))}
    for attempt in run.attempts():
        if steps := _of_attempt(attempt):
            first = min(steps)
            rows_by_step = {n: rows for n, rows in rows_by_step.items() if n < first} | steps
    return rows_by_step


def _of_attempt(attempt: layout.AttemptDir) -> dict[int, list[int]]:
    rows_by_step: dict[int, list[int]] = {}
    for file in sorted(attempt.root.glob(f"ranks/*/{layout.SAMPLES}")):
        for step, rows in records(file):
            rows_by_step.setdefault(step, []).extend(rows)
    return rows_by_step


def records(file: Path) -> Iterator[tuple[int, list[int]]]:
    """(step, rows) of one rank; a last record that a kill has cut is left out."""
    try:
        content = files.regular_bytes(file)
    except OSError as error:
        raise files.damaged_file(file, str(error.strerror)) from error
    numbers = array("i", content[: len(content) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    start = 2
    # a negative number is of a damaged file
    while (
        start <= len(numbers)
        and numbers[start - 1] >= 0
        and (end := start + numbers[start - 1]) <= len(numbers)
    ):
        yield numbers[start - 2], numbers[start:end].tolist()
        start = end + 2
