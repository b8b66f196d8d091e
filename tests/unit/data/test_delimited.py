"""CSV and TSV files are read as they are written; a row of another width is named by its line."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest

from launch.base.errors import DataError
from launch.data import columns as data_columns
from launch.data.conversation import Conversation
from launch.data.files import shards
from launch.data.rows import BadRows, read_samples
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat

pytestmark = pytest.mark.unit

ROWS = [
    ("plain", "answer"),
    ('says "no", twice', "two\nlines\r\nand a\ttab, a comma"),
    ("你好", ""),
]


def written(
    ending: str, rows: list[tuple[str, ...]] = ROWS, header: tuple = ("prompt", "response")
):
    text = io.StringIO()
    csv.writer(text, delimiter="\t" if ".tsv" in ending else ",").writerows([header, *rows])
    return text.getvalue().encode()


def detect(path: Path, **section) -> DataFormat:
    return data_columns.detect(DataSection(train_file=str(path), **section), path.parent)


def pairs(path: Path) -> list[tuple[str, ...]]:
    samples = list(read_samples(path, detect(path)))
    assert all(isinstance(sample, Conversation) for sample in samples)
    return [
        tuple(message["content"] for message in sample.messages)
        for sample in samples
        if isinstance(sample, Conversation)
    ]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
def test_quoted_cells_are_read_as_they_were_written(tmp_path, ending, mark):
    path = tmp_path / f"a{ending}"
    content = mark + written(ending)
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    assert pairs(path) == ROWS
    found = detect(path)
    assert (found.kind, found.file_type) == ("prompt_response", ending[1:4])
    assert data_columns.row_count(path) == (None if ending.endswith(".gz") else 3)


def test_shards_of_csv_are_read_in_order(tmp_path):
    for name in "ba":
        (tmp_path / f"{name}.csv").write_bytes(written(".csv", [(name, name)]))
    assert pairs(tmp_path) == [("a", "a"), ("b", "b")]


def test_a_history_and_tools_are_json_text_in_a_cell(tmp_path):
    header = ("instruction", "output", "system", "history")
    (tmp_path / "a.csv").write_bytes(written(".csv", [("a", "b", "s", '[["q", "r"]]')], header))
    assert pairs(tmp_path / "a.csv") == [("s", "q", "r", "a", "b")]


def test_the_rows_of_a_large_csv_file_are_not_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(written(".csv"))
    with path.open("ab") as file:
        file.truncate(data_columns.COUNTED_CSV_BYTES + 1)  # sparse
    assert data_columns.row_count(path) is None


def test_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\nprompt,response\r\n\r\na,b\n\n")
    assert pairs(tmp_path / "a.csv") == [("a", "b")]


def test_a_column_of_an_index_without_a_name_is_not_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b",prompt,response\n0,a,b\n")
    assert pairs(tmp_path / "a.csv") == [("a", "b")]


HEADER = b"prompt,response\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + b'"a\nb",c\nd\n', r"a\.csv:4: found 1 cells, expected 2 as in the header"),
        (HEADER + b"a,b\na,b,c\n", r"a\.csv:3: found 3 cells, expected 2"),
        (HEADER + b'a,b\n"a"b,c\n', r"a\.csv:3: cannot be read as CSV"),
        (HEADER + b'a,b\n"a,b\nc,d\n', r"a\.csv:3: cannot be read as CSV \(unexpected end"),
        (HEADER + b"a,b\rc,d\n", r"a\.csv:2: cannot be read as CSV \(new-line character"),
        (HEADER + b"a,\xff\n", r"a\.csv:2:2: this byte is not UTF-8"),
        ((HEADER + b"a,b\n").decode().encode("utf-16"), r"a\.csv:1:0: is UTF-16"),
        (b"prompt,response,prompt\na,b,c\n", r"a\.csv:1: two columns have the name 'prompt'"),
        (HEADER, r"a\.csv: 0 rows: the file has no row below its header"),
        (b"\n\n", r"a\.csv: 0 rows"),
        (b"", r"a\.csv: 0 rows: the file is empty"),
        (b"prompt;response\na;b\n", r"a\.csv: its columns are of no known format; found columns"),
        (HEADER[:-1] + b",label\na,b,1\n", r"a\.csv:2: .*column 'label' is for another kind"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        detect(tmp_path / "a.csv")


def test_a_row_of_another_width_is_a_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + b"a,b\nc\nd,e\n")
    bad = BadRows(1)
    assert len(list(read_samples(path, detect(path, max_bad_rows=1), bad))) == 2
    assert "a.csv:3: found 1 cells" in bad.errors[0]


def test_a_quote_without_end_does_not_read_all_of_a_large_file(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("wb") as file:
        file.write(HEADER + b'a,b\n"c,d\n')
        file.truncate(2 * shards.MAX_ROW_BYTES)  # sparse
    with pytest.raises(DataError, match=r"a\.csv:3: .*(64 MiB|field larger than)"):
        detect(path)
