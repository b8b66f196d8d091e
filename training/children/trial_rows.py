"""Write a token cache of the longest rows of another, for trials.

Usage: `python -m training.children.trial_rows TOKENS FOLDER ROWS`."""

import shutil
import sys
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from launch.data import token_cache
from training.data import stored_rows

_SHORTER = 4  # each row at a multiple of this loses a token, so that batches are padded


def main(tokens: Path, folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "validation"):
        if files := token_cache.token_files(tokens, part):
            write_rows(files, folder / f"{part}.arrow", count)
    shutil.copytree(tokens / "tokenizer", folder / "tokenizer")
    shutil.copyfile(tokens / token_cache.TOKENS_READY, folder / token_cache.TOKENS_READY)
    token_cache.write_hashes(folder)


def write_rows(sources: list[Path], target: Path, count: int) -> None:
    """Write `count` rows: by turns the row with the longest input and the row with the longest
    labels."""
    table = stored_rows.mapped(sources)
    # A decoder's labels are as long as its input: both are the same row
    indices = stored_rows.lengths(table).argmax(axis=0).tolist()
    rows = [row for index in indices for row in stored_rows.read(table.slice(index, 1))]
    written = [
        _without_a_token(row) if number % _SHORTER == 0 else row
        for number, row in enumerate(islice(cycle(rows), count))
    ]
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_batch(stored_rows.batch(written, table.schema))


def _without_a_token(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The row without its first token, which is no target of a decoder."""
    is_pair = len(row["input_ids"]) != len(row["labels"])  # T5: source and target
    shorter = {
        "input_ids": row["input_ids"][1:] if len(row["input_ids"]) > 1 else row["input_ids"],
        "labels": row["labels"][0 if is_pair else 1 :],
    }
    if "lengths" in row:  # of packed documents, each of two tokens or more
        shorter["lengths"] = np.array([row["lengths"][0] - 1, *row["lengths"][1:]])
    return {**row, **shorter}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
