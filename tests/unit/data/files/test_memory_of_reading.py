"""Files are read in little memory; a small one that decodes to more than that is refused."""

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


TOO_MUCH = "batch 1 of its rows takes more memory than the 2.00 GiB that reading may take"


@pytest.mark.parametrize("is_typed", [False, True])
def test_a_row_group_of_gigabytes_in_one_dictionary_is_refused(tmp_path, is_typed):
    path = tmp_path / "a.parquet"
    pq.write_table(repeated(600, 5 * MIB), path, compression="zstd", store_schema=is_typed)
    assert path.stat().st_size < 1024
    taken_mib, error = read_aside(path, "parquet")
    assert f"a.parquet: {TOO_MUCH}" in error
    assert taken_mib < 2200


def test_a_small_file_of_gigabytes_is_read_a_few_rows_at_a_time(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", repeated(600, 5 * MIB), "zstd", "file")
    taken_mib, error = read_aside(path, "arrow")
    assert error == ""
    assert taken_mib < 2200
    pq.write_table(repeated(150_000, 10_000), tmp_path / "a.parquet", store_schema=False)
    taken_mib, error = read_aside(tmp_path / "a.parquet", "parquet")
    assert error == ""
    assert taken_mib < 200


def test_a_long_dictionary_is_no_long_row(tmp_path):
    texts = [f"{i}" + "a" * 9 * MIB for i in range(8)]
    column = pa.DictionaryArray.from_arrays(pa.array([0, 7], "int32"), pa.array(texts))
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": column}), None, "file")
    assert list(read_samples(path, text_format("arrow"))) == [texts[0], texts[7]]


def test_lists_that_repeat_a_long_text_are_read(tmp_path):
    content = pa.array(["a" * (MIB // 2)] * 300)
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 150), content], ["role", "content"]
    )
    path = tmp_path / "a.parquet"
    lists = pa.ListArray.from_arrays(pa.array(range(0, 301, 2), "int32"), turns)
    pq.write_table(pa.table({"messages": lists}), path, compression="zstd")
    data_format = DataFormat("messages", {"messages": "messages"}, "parquet", "")
    assert len(list(read_samples(path, data_format))) == 150


def talk(num_messages: int, *texts: str) -> pa.Table:
    """A row of many messages, which repeat some texts."""
    indices = pa.array([i % len(texts) for i in range(num_messages)], "int32")
    contents = pa.DictionaryArray.from_arrays(indices, pa.array(texts, "large_string"))
    roles = pa.array(["user", "assistant"] * (num_messages // 2))
    turns = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, num_messages]), turns)})


def test_one_row_that_repeats_a_long_text_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(talk(2200, "a" * MIB), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1024
    _, error = read_aside(path, "parquet", "messages")
    assert f"a.parquet: {TOO_MUCH}" in error


def test_one_row_of_short_texts_beside_a_long_one_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = talk(1000, *[f"{i}" for i in range(999)], "a" * MIB)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    columns = {"messages": "messages"}
    (sample,) = read_samples(path, DataFormat("messages", columns, "parquet", ""))
    assert isinstance(sample, Conversation)
    assert sample.messages == table.to_pylist()[0]["messages"]


NEW = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}
SCHEMA = pa.schema([("text", pa.large_string())])


def write_arrow(path: Path, table: pa.Table, compression: str | None, kind: str) -> Path:
    new = NEW[kind]
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_compressed_batch_of_gigabytes_is_refused_before_it_is_unpacked(tmp_path, kind):
    column = pa.array(["a" * 5 * MIB], "large_string").take(pa.array([0] * 450))
    path = tmp_path / "a.arrow"
    new, options = NEW[kind], pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as sink, new(sink, SCHEMA, options=options) as writer:
        writer.write_batch(pa.record_batch([column], schema=SCHEMA))
    _, error = read_aside(path, "arrow")
    assert f"a.arrow: {TOO_MUCH}" in error
    with pytest.raises(DataError, match=TOO_MUCH):
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
    with pytest.raises(DataError, match=r"a\.parquet: row 11 has 68,157,4\d\d bytes, over 64"):
        list(read_samples(path, text_format("parquet")))


@pytest.mark.parametrize(
    ("name", "file_type", "start", "separator"),
    [("a.json.zst", "json", b"[", b","), ("a.jsonl.zst", "jsonl", b"", b"\n")],
)
def test_a_packed_file_of_very_many_bytes_is_read_in_little_memory(
    tmp_path, name, file_type, start, separator
):
    row = json.dumps({"text": "a" * 100_000}).encode()
    with pa.CompressedOutputStream(pa.OSFile(str(tmp_path / name), "wb"), "zstd") as file:
        file.write(start + row)
        for _ in range(100):
            file.write((separator + row) * 64)
        file.write(b"]" * (file_type == "json"))
    taken_mib, error = read_aside(tmp_path / name, file_type)
    assert error == ""
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
