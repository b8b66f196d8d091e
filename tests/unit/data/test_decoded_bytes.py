"""Small files that decode to more than the memory are refused; reading them takes little of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import DataError
from launch.base.workspace import CODE
from launch.data.rows import read_samples
from launch.schema.plan import DataFormat

MIB = 1 << 20
READ = """
import resource, sys
from pathlib import Path
from launch.base.errors import DataError
from launch.data.rows import read_samples
from launch.schema.plan import DataFormat
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
error = ""
try:
    for _ in read_samples(Path(sys.argv[1]), DataFormat("text", {"text": "text"}, sys.argv[2], "")):
        pass
except DataError as raised:
    error = str(raised)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def text_format(file_type: str) -> DataFormat:
    return DataFormat("text", {"text": "text"}, file_type, "")  # pyright: ignore


def read_aside(path: Path, file_type: str) -> tuple[int, str]:
    """(MiB that reading the file took, its error)."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), file_type],
        env={"PYTHONPATH": str(CODE)},
        capture_output=True,
        text=True,
        check=True,
    )
    taken_mib, _, error = done.stdout.strip().partition(" ")
    return int(taken_mib) // 1024, error


def repeated(num_rows: int, text_bytes: int, is_typed: bool = True) -> pa.Table:
    """A column of one text, in a dictionary."""
    texts = pa.array(["a" * text_bytes])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, "int32"), texts)
    return pa.table({"text": column if is_typed else column.cast("string")})


def test_a_dictionary_of_gigabytes_is_refused_with_its_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="zstd") as w:
        w.write_table(repeated(1, 10, is_typed=False))
        w.write_table(repeated(60, 5 * MIB, is_typed=False))
    assert path.stat().st_size < 4096
    taken_mib, error = read_aside(path, "parquet")
    assert "a.parquet: row group 2: rows 2 to " in error
    assert "decode to " in error and " from 5,24" in error and "shorten or remove" in error
    assert taken_mib < 700


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_a_dictionary_of_the_schema_is_counted_before_it_is_decoded(tmp_path, name):
    path, table = tmp_path / f"a.{name}", repeated(1000, 5 * MIB)  # 5 GB
    if name == "parquet":
        pq.write_table(table, path, compression="zstd")
        assert path.stat().st_size < 1024
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    taken_mib, error = read_aside(path, name)
    group = "row group 1" if name == "parquet" else "batch 1"
    assert f"a.{name}: {group}: rows 1 to " in error
    assert taken_mib < 200


def test_lists_that_repeat_a_long_text_are_refused(tmp_path):
    content = pa.array(["a" * (MIB // 2)] * 300)
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 150), content], ["role", "content"]
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 150, 300], "int32"), turns)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": lists}), path, compression="zstd")
    message = r"row group 1: rows 1 to 2 decode to 157,288,\d\d\d bytes from 52"
    with pytest.raises(DataError, match=message):
        list(read_samples(path, DataFormat("messages", {"messages": "messages"}, "parquet", "")))


def test_rows_with_one_system_prompt_are_read_as_before(tmp_path):
    texts = ["You are helpful. " * 500, *(f"{i} " * 2000 for i in range(20))]
    rows = [texts[i % len(texts)] for i in range(5000)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows}), path, row_group_size=1700)
    assert list(read_samples(path, text_format("parquet"))) == rows


def test_long_rows_without_a_dictionary_are_read_in_pieces(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(repeated(60, 4 * MIB), path, use_dictionary=False, compression="zstd")
    taken_mib, error = read_aside(path, "parquet")
    assert error == ""
    assert taken_mib < 600


def test_a_row_over_the_limit_is_refused_where_others_are_short(tmp_path):
    rows = ["a"] * 10 + ["b" * (65 * MIB)] + ["c"] * 10
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"row group 1: row 11 decodes to 68,157,4\d\d bytes, over"):
        list(read_samples(path, text_format("parquet")))


def packed(path: Path, start: bytes, row: bytes, count: int, end: bytes = b"") -> None:
    """Write a file of equal rows, packed as its ending says."""
    kind = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), kind) as file:
        file.write(start)
        for _ in range(count // 64):
            file.write(row * 64)
        file.write(end)


@pytest.mark.parametrize(
    ("name", "file_type", "start", "separator", "place"),
    [
        ("a.json.zst", "json", b"[", b",", r"a\.json\.zst:\d+\)"),
        ("a.jsonl.zst", "jsonl", b"", b"\n", r"a\.jsonl\.zst:\d+\)"),
    ],
)
def test_a_packed_file_of_very_many_bytes_is_refused(
    tmp_path, name, file_type, start, separator, place
):
    path = tmp_path / name
    row = json.dumps({"text": "a" * 100_000}).encode() + separator
    packed(path, start, row, 20_000)  # 2 GB
    assert path.stat().st_size < 250_000
    taken_mib, error = read_aside(path, file_type)
    size = f"{path.stat().st_size:,}"
    assert f"{name}: its {size} bytes unpack to more than 268,435,456; is it damaged?" in error
    assert taken_mib < 100


def test_the_elements_of_a_long_array_are_not_in_memory_together(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as file:
        file.write("[\n")
        for i in range(1500):
            file.write(json.dumps({"text": f"{i} " + "a" * 100_000}) + ",\n")
        file.write('{"text": "last"}\n]')
    taken_mib, error = read_aside(path, "json")
    assert error == ""
    assert taken_mib < 60
    samples = list(read_samples(path, text_format("json")))
    assert len(samples) == 1501 and str(samples[1499]).startswith("1499 a")


def test_a_mistake_far_into_an_array_is_named_by_its_line_and_column(tmp_path):
    path = tmp_path / "a.json"
    good = "".join(json.dumps({"text": "a" * 9_000}) + ",\n" for _ in range(300))
    path.write_text(f'[{good}  {{"text": b}}]')
    with pytest.raises(DataError, match=r"a\.json:301: is not JSON \(Expecting value at.* 12\)"):
        list(read_samples(path, text_format("json")))
    path.write_text("[" + good.replace("\n", " ") + '{"text": b}]')
    column = 1 + len(good) + len('{"text": b')
    with pytest.raises(DataError, match=rf"a\.json:1: is not JSON .* character {column}\)"):
        list(read_samples(path, text_format("json")))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_wrong_byte_far_into_one_line_is_named(tmp_path, name):
    text = b'[{"text": "' + "ö".encode() * 700_000 + b'\xff"}]'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    with pytest.raises(DataError, match=rf"{name}:1:{text.index(0xFF)}: this byte is not UTF-8"):
        list(read_samples(tmp_path / name, text_format("json")))


def test_blanks_behind_an_array_are_read_in_chunks(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.write(b'[{"text": "a"}]')
        for _ in range(200):
            file.write(b" " * MIB)
    taken_mib, error = read_aside(path, "json")
    assert error == ""
    assert taken_mib < 20
