"""data.text_rows: a row of a .txt file is a line, a paragraph, or the file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import ConfigError, DataError
from launch.data import columns, rows, sources, token_cache
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows, Slice, read_samples
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat
from tests import builders
from training.data import units

pytestmark = pytest.mark.unit

BOOK = "\ufeffOne,\r\n  two.\r\n\r\n \t\r\n\u3000\r\nThree.\r\n\r\n四\u2028五\r\n六"
PARAGRAPHS = ["One,\n  two.", "Three.", "四\u2028五\n六"]
FORMAT = DataFormat("text", {"text": "text"}, "paragraphs", "")


def book(folder: Path, content: bytes = BOOK.encode(), name: str = "book.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def detect(path: Path, text_rows: str, **section: Any) -> DataFormat:
    data = DataSection.model_validate({"train_file": str(path), "text_rows": text_rows, **section})
    return columns.detect(data, Path("/"))


@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
@pytest.mark.parametrize(
    ("text_rows", "texts"),
    [
        ("lines", ["One,", "two.", "Three.", "四\u2028五", "六"]),
        ("paragraphs", PARAGRAPHS),
        ("file", ["One,\n  two.\n\n \t\n\u3000\nThree.\n\n四\u2028五\n六"]),
    ],
)
def test_the_rows_of_a_text_file_are_lines_paragraphs_or_the_file(tmp_path, name, text_rows, texts):
    path = book(tmp_path, name=name)
    data_format = detect(path, text_rows)
    assert list(read_samples(path, data_format)) == texts
    assert rows.count(Slice(path), data_format) == len(texts)


def test_each_paragraph_is_in_one_slice_wherever_the_file_is_divided(tmp_path):
    text = BOOK + "\r\n\r\n\n\n" + "seven\n\n" * 3 + "eight\nnine"
    path = book(tmp_path, text.encode())
    expected = [*PARAGRAPHS, "seven", "seven", "seven", "eight\nnine"]
    for size in range(1, len(text.encode())):
        (bounds,) = zip(*units.divide([path], FORMAT, size), strict=True)
        read = [rows.samples_of(of, FORMAT, BadRows()) for of in bounds]
        assert [text for part in read for text in part] == expected
        assert sum(rows.count(of, FORMAT) for of in bounds) == len(expected)
    whole = DataFormat("text", {"text": "text"}, "whole_text", "")
    assert units.divide([path], whole, 8) == [(Slice(path),)]


def test_a_file_of_each_folder_is_a_row_and_held_out_as_one(tmp_path):
    for number in range(10):
        book(tmp_path, f"{number}\n\nend\n".encode(), f"{number}.txt")
    data = DataSection(train_file=str(tmp_path), text_rows="file", validation_size=3)
    data_format = columns.detect(data, Path("/"))
    counts = sources.count_rows(data, data_format, FileFacts())
    assert counts == ((1,) * 10,)
    parts = [
        [
            text
            for source in sources.of_part(data, data_format, counts, part)
            for text in source.read(BadRows())
        ]
        for part in ("train", "validation")
    ]
    assert [len(part) for part in parts] == [7, 3]
    assert sorted(parts[0] + parts[1]) == [f"{number}\n\nend" for number in range(10)]


def test_counts_of_lines_are_not_taken_for_those_of_paragraphs(tmp_path):
    path, facts = book(tmp_path), FileFacts(tmp_path / "files.json", racy_s=-1.0)
    for text_rows, count in (("lines", 5), ("paragraphs", 3), ("file", 1)):
        data = DataSection.model_validate({"train_file": str(path), "text_rows": text_rows})
        assert sources.count_rows(data, detect(path, text_rows), facts) == ((count,),)


def test_only_other_rows_than_lines_change_the_token_cache(tmp_path):
    recipes = [
        builders.recipe_of(
            data={"train_file": str(book(tmp_path)), "validation_file": None, **keys}
        )
        for keys in ({}, {"text_rows": "lines"}, {"text_rows": "file"})
    ]
    size = builders.model_size(recipes[0].model, None, root=builders.CODE)
    caches = [
        token_cache.token_cache(tmp_path, recipe, size, columns.detect(recipe.data, Path("/")))
        for recipe in recipes
    ]
    assert caches[0].folder == caches[1].folder != caches[2].folder
    assert caches[0].identity["columns"] == ["text", "text", {"text": "text"}]


@pytest.mark.parametrize("text_rows", ["paragraphs", "file"])
def test_a_bad_byte_and_a_text_of_more_than_64_mib_are_named(tmp_path, text_rows):
    path = book(tmp_path, b"a\n\nb\nc\xff\n\nd\n")
    place = "book.txt:3:3" if text_rows == "paragraphs" else "book.txt:1:6"
    with pytest.raises(DataError, match=place):
        detect(path, text_rows)
    longest = book(tmp_path, (b"x" * (1 << 20) + b"\n") * 65)
    with pytest.raises(
        DataError, match=r"book\.txt:1: a text longer than 64 MiB, the most of a row"
    ):
        detect(longest, text_rows)


def test_text_rows_of_a_file_that_is_no_text_are_refused(tmp_path):
    path = book(tmp_path, b'{"text": "a"}', "a.jsonl")
    with pytest.raises(ConfigError, match=r"data\.text_rows: file, but a\.jsonl is read as jsonl"):
        detect(path, "file")
    mixed = [str(path), str(book(tmp_path))]
    assert [of.file_type for of in detect(path, "file", train_file=mixed).of_sources] == [
        *("jsonl", "whole_text")
    ]
