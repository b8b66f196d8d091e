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
from launch.data import sniff
from launch.data.conversation import Conversation
from launch.data.files.decoded_bytes import RowGroup
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
    kind = sys.argv[3]
    for _ in read_samples(Path(sys.argv[1]), DataFormat(kind, {kind: kind}, sys.argv[2], "")):
        pass
except DataError as raised:
    error = str(raised)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def text_format(file_type: str) -> DataFormat:
    return DataFormat("text", {"text": "text"}, file_type, "")  # pyright: ignore


def read_aside(path: Path, file_type: str, kind: str = "text") -> tuple[int, str]:
    """(MiB that reading the file took, its error)."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), file_type, kind],
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


def talk(num_messages: int, *texts: str) -> pa.Table:
    """A row of many messages, which repeat some texts."""
    indices = pa.array([i % len(texts) for i in range(num_messages)], "int32")
    contents = pa.DictionaryArray.from_arrays(indices, pa.array(texts, "large_string"))
    roles = pa.array(["user", "assistant"] * (num_messages // 2))
    turns = pa.StructArray.from_arrays([roles, contents.cast("large_string")], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, num_messages]), turns)})


def test_one_row_that_repeats_a_long_text_is_refused_before_it_is_decoded(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(talk(1000, "a" * MIB), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1024
    taken_mib, error = read_aside(path, "parquet", "messages")
    assert "a.parquet: row group 1: rows 1 to 1 decode to 1,048," in error
    assert taken_mib < 200


def test_one_row_of_short_texts_beside_a_long_one_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = talk(1000, *[f"{i}" for i in range(999)], "a" * MIB)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    with pq.ParquetFile(path) as file:
        assert RowGroup(path, 0, file.metadata.row_group(0), ["messages"]).kept_dictionaries == [
            "messages.list.element.role",
            "messages.list.element.content",
        ]
    columns = {"messages": "messages"}
    (sample,) = read_samples(path, DataFormat("messages", columns, "parquet", ""))
    assert isinstance(sample, Conversation)
    assert sample.messages == table.to_pylist()[0]["messages"]


def write_arrow(path: Path, table: pa.Table, compression: str | None, kind: str) -> Path:
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_batch_of_an_arrow_file_is_measured_before_it_is_unpacked(
    tmp_path, compression, kind
):
    table = pa.table({"text": ["a" * 5 * MIB] * 60})
    path = write_arrow(tmp_path / "a.arrow", table.combine_chunks(), compression, kind)
    taken_mib, error = read_aside(path, "arrow")
    assert "a.arrow: batch 1: its " in error and "bytes unpack to 314,57" in error
    assert taken_mib < 50
    with pytest.raises(DataError, match="bytes unpack to 314,57"):
        sniff.read(path)


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_compressed_batches_and_dictionaries_are_read(tmp_path, compression, kind):
    texts = [f"row {i}" for i in range(1000)]
    repeated = pa.DictionaryArray.from_arrays(
        pa.array([0, 1] * 500, "int32"), pa.array(["x" * 50, None])
    )
    table = pa.table({"text": texts, "number": [None, 1] * 500, "d": repeated})
    path = write_arrow(tmp_path / "a.arrow", table, compression, kind)
    assert list(read_samples(path, text_format("arrow"))) == texts


def test_a_compressed_dictionary_of_an_arrow_file_is_measured_too(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", repeated(1, 300 * MIB), "zstd", "file")
    with pytest.raises(DataError, match=r"batch 1: its .* bytes unpack to 314,572,8"):
        sniff.read(path)


def test_wrong_offsets_in_an_arrow_file_are_damage(tmp_path):
    """They ended the process."""
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": ["a", "b", "c"]}), None, "stream")
    offsets = b"".join(i.to_bytes(4, "little") for i in range(4))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:]))
    with pytest.raises(
        DataError, match=r"a\.arrow: cannot be read after row 0 \(.*; write or copy"
    ):
        list(read_samples(path, text_format("arrow")))


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
