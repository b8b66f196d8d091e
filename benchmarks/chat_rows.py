"""Random chat rows with the lengths of real ones, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CHARACTERS = np.arange(0x4E00, 0x4E00 + 400, dtype="<u4")


def write_rows(path: Path, count: int) -> None:
    """prompt and response columns, 10,000 rows in memory at a time; the first rows are the same for
    any count."""
    rng = np.random.default_rng(7)
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="zstd") as writer:
        for at in range(0, count, 10_000):
            size = min(10_000, count - at)
            columns = [_texts(rng, size, mean) for mean in (40, 166)]
            writer.write_table(pa.table(columns, schema=schema))


def _texts(rng: np.random.Generator, size: int, mean: int) -> list[str]:
    lengths = 1 + rng.gamma(4, (mean - 1) / 4, size).astype(int)
    ends = np.cumsum(lengths)
    text = rng.choice(CHARACTERS, int(ends[-1])).tobytes().decode("utf-32-le")
    return [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def make_tokenizer(rows: Path, folder: Path) -> None:
    """The product's own: a token is a character or a byte of a rare one."""
    from launch.schema.model_sections import TokenizerSection
    from training.data import tokenizer

    table = pq.read_table(rows)
    texts = (text for name in table.column_names for text in table.column(name).to_pylist())
    tokenizer.train(texts, TokenizerSection(split="character"), 1024).save_pretrained(folder)
