"""Data files for tests: rows in every file type, and the format that is found in them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from launch.data import columns as data_columns
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
WRITERS = ["parquet", "jsonl", "ndjson", "json", "lines.json"]


def table(rows: list[dict]) -> pa.Table:
    """With the columns of all rows, not of the first alone."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({column: [row.get(column) for row in rows] for column in columns})


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(table(rows), path)
    elif name.endswith(".json") and not name.endswith("lines.json"):
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    else:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
    return path


def detect(path: Path, validation: Path | None = None, **columns: Any) -> DataFormat:
    section = DataSection(
        train_file=str(path), validation_file=str(validation) if validation else None, **columns
    )
    return data_columns.detect(section, path.parent)


def write_row(folder: Path, ending: str, rows: list[dict]) -> Path:
    """write(), and the file types that have another writer."""
    path = folder / f"data.{ending}"
    if ending == "tar":
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(rows, 1):
                content = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{number}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    elif ending == "arrow":
        content = table(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
            writer.write_table(content, max_chunksize=700)
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write(folder, path.name, rows)
    return path
