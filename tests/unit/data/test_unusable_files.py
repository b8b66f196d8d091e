"""Every file that cannot be used is named before anything slow starts."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import DataError
from launch.data import columns as data_columns
from launch.data.files import shards
from launch.data.rows import read_samples
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat
from tests.data_files import TURNS, detect, write

pytestmark = pytest.mark.unit


def raw(content: bytes):
    return lambda path: path.write_bytes(content)


PARQUET = [{"prompt": "a" * 100, "response": f"{i}"} for i in range(50)]


def cut_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PARQUET), path)
    os.truncate(path, path.stat().st_size - 20)


def torn_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PARQUET), path)
    content = bytearray(path.read_bytes())
    content[-60:-20] = b"\xff" * 40  # in the footer, its magic kept
    path.write_bytes(content)


def empty_parquet(path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())}), path
    )


BROKEN = [
    ("a.parquet", raw(b""), r": 0 rows: the file is empty"),
    ("a.jsonl", raw(b""), r": 0 rows: the file is empty"),
    ("a.txt", raw(b""), r": 0 rows: the file is empty"),
    ("a.json", raw(b""), r": 0 rows: the file is empty"),
    ("a.jsonl", raw(b"\n \n\r\n"), r": 0 rows: every line is blank"),
    ("a.txt", raw(b"\xef\xbb\xbf\n"), r": 0 rows: every line is blank"),
    ("a.json", raw(b" \n"), r": 0 rows: every line is blank"),
    ("a.json", raw(b" [ ] "), r": 0 rows: the array is empty"),
    (
        "a.parquet",
        empty_parquet,
        r": 0 rows: the file has columns \(prompt, response\) but no data",
    ),
    ("a.parquet", cut_parquet, r": is cut, damaged or no parquet file"),
    ("a.parquet", torn_parquet, r": is cut, damaged or no parquet file"),
    ("a.parquet", raw(b"PAR1"), r": is cut, damaged or no parquet file"),
    (
        "a.parquet",
        raw(b'{"prompt": "a", "response": "b"}\n'),
        r": is cut, damaged or no parquet file",
    ),
    ("a.parquet", raw(b"\0" * 5000), r": is cut, damaged or no parquet file"),
    (
        "a.jsonl",
        raw(b'{"text": "a"\n'),
        r":1: is not JSON \(Expecting ',' delimiter at character 13\)",
    ),
    ("a.jsonl", raw(b"{'text': 'a'}\n"), r":1: is not JSON"),
    ("a.jsonl", raw(b'\n\n{"text": "a"}\n{"text": \n'), r":4: is not JSON"),
    ("a.jsonl", raw(b"prompt,response\na,b\n"), r":1: is not JSON"),
    ("a.jsonl", raw(b'"just text"\n'), r":1: holds string; each row must be an object"),
    (
        "a.jsonl",
        raw(b'{"text": "a\tb"}\n'),
        r":1: is not JSON \(Invalid control character at charac",
    ),
    (
        "a.csv",
        raw(b"prompt;response\na;b\n"),
        ": its columns .*; its header has semicolons between the names: write commas",
    ),
    (
        "a.tsv",
        raw(b"prompt,response\na,b\n"),
        ": its columns .*; its header has commas between the names: write tabs",
    ),
    *(
        (
            name,
            raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"),
            ": is a Git LFS pointer, not the data; fetch the data with git lfs pull",
        )
        for name in ("a.parquet", "a.jsonl", "a.jsonl.gz")
    ),
    ("a.jsonl", raw(b"3\n"), r":1: holds a number; each row must be an object"),
    ("a.jsonl", raw(b"null\n"), r":1: holds null; each row must be an object"),
    (
        "a.jsonl",
        raw(b'[{"text": "a"}]\n'),
        r":1: holds a list; a file that is one array of objects must end in \.json",
    ),
    ("a.jsonl", raw(b'[\n{"text": "a"}]\n'), r":1: is not JSON"),
    ("a.jsonl", raw(b'{"text": ' + b"[" * 100_000 + b"\n"), r":1: (cannot be read as|is not) JSON"),
    (
        "a.jsonl",
        raw(b'{"text": ' + b"1" * 10_000 + b"}\n"),
        r":1: cannot be read as JSON .* mend the line",
    ),
    (
        "a.jsonl",
        raw('{"text": "你好"}\n'.encode("gb18030")),
        r":1:10: this byte is not UTF-8; convert the file",
    ),
    ("a.jsonl", raw(b'{"text": "a"}\n{"text": "\xff"}\n'), r":2:10: this byte is not UTF-8"),
    (
        "a.jsonl",
        raw('{"text": "a"}\n'.encode("utf-16")),
        r":1:0: is UTF-16; convert the file to UTF-8",
    ),
    ("a.json", raw('[{"text": "a"}]\n'.encode("utf-16")), r":1:0: is UTF-16"),
    ("a.jsonl", raw(b"\x1f\x8b\x08\0\0\0\0\0\0\xff"), r":1:1: is compressed with gzip; unpack"),
    ("a.txt", raw(b"\xef\xbb\xbfab\xe4\xbd\n"), r":1:5: this byte is not UTF-8"),
    ("a.txt", raw(b"\n\n\x80\n"), r":3:0: this byte is not UTF-8"),
    (
        "a.json",
        raw(b'{\n "data": []\n}'),
        r":1: is not JSON .*a \.json file may be one array of objects",
    ),
    (
        "a.json",
        raw(b'[{"text": "a"}, {"text": ]'),
        r":1: is not JSON \(Expecting value at character 26\); mend the file",
    ),
    (
        "a.json",
        raw(b'[\n{"text": "a"}\n{"text": "b"}]'),
        r":3: is not JSON \(Expecting ',' delimiter",
    ),
    ("a.json", raw(b'[{"text": "a"}'), r":1: is not JSON"),
    ("a.json", raw(b'[{"text": "a"},'), r":1: is not JSON"),
    ("a.json", raw(b'[{"text": "a'), r":1: is not JSON"),
    ("a.json", raw(b"["), r":1: is not JSON"),
    ("a.json", raw(b'["a", "b"]'), r": element 1: holds string; each row must be an object"),
    ("a.json", raw(b'[{"text": "a"}, 3]'), r": element 2: holds a number"),
    ("a.json", raw(b"[" * 100_000), r"(: cannot be read as|:1: is not) JSON"),
    ("a.json", raw(b"[" + b"1" * 10_000 + b"]"), r": cannot be read as JSON"),
    (
        "a.json",
        raw(b'\xef\xbb\xbf[{"text": "a"},\n{"text": "\xff"}]'),
        r":2:10: this byte is not UTF-8",
    ),
    ("a.xlsx", raw(b"a,b\n"), r": \.xlsx is not a known file type; known: \.parquet, \.jsonl"),
    ("a.jsonl.gz", raw(b"\x1f\x8b"), r": cannot be read after row 0 \(Truncated compressed stream"),
    ("a.parquet.gz", raw(b"\x1f\x8b"), r": a parquet file is not read from \.gz; unpack it"),
    ("a.tar", raw(b"a"), r": is cut, damaged or no tar file"),
    ("a.tar", raw(bytes(10240)), r": 0 rows: no sample is in it"),
    ("a.arrow", raw(b"a"), r": is cut, damaged or no arrow file"),
    ("data", raw(b"a"), r": no ending is not a known file type"),
    ("a.jsonl", lambda path: path.mkdir(), r": no data file lies in this folder"),
    ("a.jsonl", os.mkfifo, r": is not an ordinary file; give a file"),
    ("a.jsonl", lambda path: path.symlink_to("gone.jsonl"), r": there is no such file"),
    ("a.jsonl", lambda path: path.symlink_to(path), r": cannot be opened"),
]


@pytest.mark.parametrize(("name", "make", "message"), BROKEN)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}{message}"):
        detect(tmp_path / name)


@pytest.mark.parametrize(("name", "make", "message"), BROKEN)
def test_the_validation_file_is_checked_like_the_training_file(tmp_path, name, make, message):
    training = write(tmp_path, "train.jsonl", [{"text": "a"}])
    make(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}{message}"):
        detect(training, tmp_path / name)


def test_a_line_without_end_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "')
        stream.truncate(shards.MAX_ROW_BYTES + 100)  # sparse
    with pytest.raises(DataError, match=r":1: longer than 64 MiB; write one row a line"):
        detect(path)


def test_an_array_element_without_end_is_refused_before_all_of_the_file_is_read(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as stream:
        stream.write(b'[{"text": "')
        stream.seek(8 * shards.MAX_ROW_BYTES)  # sparse
        stream.write(b'"}]')
    with pytest.raises(
        DataError,
        match=r":1: is not JSON .*, or longer than 64 MiB: element 1 has no end in [0-9,]+ ",
    ):
        detect(path)


def test_text_after_an_array_is_refused_where_rows_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]\n[]')
    data_format = DataFormat("text", {"text": "text"}, "json", "")
    with pytest.raises(DataError, match="has text after its array; mend the file"):
        list(read_samples(path, data_format))


def test_a_missing_file_names_the_nearest_in_its_folder(tmp_path):
    write(tmp_path, "sft_train.jsonl", [{"text": "a"}])
    write(tmp_path, "other.txt", [])
    with pytest.raises(
        DataError,
        match=r"sft_trian\.jsonl: there is no such file; nearest in that folder: sft_train\.jsonl",
    ):
        detect(tmp_path / "sft_trian.jsonl")
    with pytest.raises(
        DataError, match=r"there is no such file; in that folder: other\.txt, sft_train\.jsonl"
    ):
        detect(tmp_path / "0.parquet")


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(DataError, match=r"there is no such file; nor is there a folder .*nowhere"):
        data_columns.detect(DataSection(train_file="nowhere/a.jsonl"), tmp_path)
    with pytest.raises(DataError, match=r"there is no such file; there is no data file in"):
        detect(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "a\0.jsonl"])
def test_a_path_that_no_file_system_takes_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match=r"cannot be opened: "):
        data_columns.detect(DataSection(train_file=name), tmp_path)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "b.jsonl",
            {"messages": TURNS},
            r"b\.jsonl \(data\.validation_file\): reads as messages with columns messages, but "
            r".*a\.jsonl as prompt_response with columns instruction, output; give both files the"
            r" same columns, or read each in its own format, with '--data\.train_file=\[.*a\.jsonl",
        ),
        ("b.jsonl", {"text": "a"}, r"reads as text with columns text"),
        (
            "b.jsonl",
            {"prompt": "a", "response": "b"},
            r"columns prompt, response, but .* columns instruction, output",
        ),
        (
            "b.jsonl",
            {"instruction": "a", "input": "b", "output": "c"},
            r"columns instruction, input, output, but",
        ),
        (
            "b.json",
            {"instruction": "a", "output": "c"},
            r"is read as json, .*a\.jsonl as jsonl; write both in one",
        ),
        (
            "b.parquet",
            {"instruction": "a", "output": "c"},
            r"is read as parquet, .*a\.jsonl as jsonl",
        ),
        (
            "b.jsonl",
            {"theme": "a", "essay": "b"},
            r"b\.jsonl: its columns are of no known format; found columns theme, essay; give it"
            r" the columns of data\.train_file: instruction, output\. Known",
        ),
    ],
    ids=str,
)
def test_both_files_must_read_the_same_way(tmp_path, name, row, message):
    training = write(tmp_path, "a.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match=message):
        detect(training, write(tmp_path, name, [row]))


def test_a_context_missing_from_a_parquet_validation_file_is_an_error(tmp_path):
    training = write(tmp_path, "a.parquet", [{"instruction": "a", "input": "b", "output": "c"}])
    validation = write(tmp_path, "b.parquet", [{"instruction": "a", "output": "c"}])
    with pytest.raises(
        DataError, match=r"columns instruction, output, but .* instruction, input, output"
    ):
        detect(training, validation)


def test_a_missing_validation_file_is_named(tmp_path):
    training = write(tmp_path, "train.jsonl", [{"text": "a"}])
    with pytest.raises(
        DataError,
        match=r"valid\.jsonl: there is no such file; nearest in that folder: train\.jsonl",
    ):
        detect(training, tmp_path / "valid.jsonl")


def test_a_broken_array_cannot_be_counted(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {')
    with pytest.raises(DataError, match=r"a\.json:1: is not JSON"):
        data_columns.row_count(path)
