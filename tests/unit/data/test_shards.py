"""A corpus is the shards of a folder or a pattern: read in the order of their names, each fault
with its shard."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base import files
from launch.base.errors import DataError, ResourceError
from launch.data import columns, sniff, token_cache
from launch.data.files import folders, shards
from launch.data.rows import BadRows, Slice, read_samples, samples_of
from launch.schema.data_section import DataSection
from launch.schema.plan import DataFormat

pytestmark = pytest.mark.unit

TEXTS = [f"text {number} 二" for number in range(50)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


WRITERS: dict[str, Callable[[Path, list[str]], Any]] = {
    ".jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    ".json": lambda path, texts: path.write_text(json.dumps([{"text": text} for text in texts])),
    ".txt": lambda path, texts: path.write_text("\n".join(texts)),
    ".jsonl.gz": lambda path, texts: path.write_bytes(
        gzip.compress(lines(texts[:3])) + gzip.compress(lines(texts[3:]))
    ),
    ".json.zst": lambda path, texts: path.write_bytes(
        pa.compress(lines(texts), codec="zstd", asbytes=True)
    ),
    ".parquet": lambda path, texts: pq.write_table(
        pa.table({"text": texts}), path, row_group_size=7
    ),
    ".arrow": arrow,
    ".tar": lambda path, texts: tar(
        path, {f"a/{i:03}.txt": text.encode() for i, text in enumerate(texts)}
    ),
}


def write(folder: Path, ending: str) -> Path:
    """Three shards with TEXTS, written in another order than that of their names."""
    folder.mkdir(exist_ok=True)
    for name, part in (("c", TEXTS[40:]), ("a", TEXTS[:20]), ("b", TEXTS[20:40])):
        WRITERS[ending](folder / f"{name}{ending}", part)
    (folder / "_SUCCESS").touch()
    (folder / "README.md").write_text("none of the shards")
    return folder


def found(path: Path, **section: Any) -> DataFormat:
    return columns.detect(DataSection(train_file=str(path), **section), Path("/"))


@pytest.mark.parametrize("ending", WRITERS)
def test_a_folder_or_a_pattern_of_shards_reads_as_one_file_in_the_order_of_names(tmp_path, ending):
    folder = write(tmp_path / "of shards", ending)
    data_format = found(folder)
    assert list(read_samples(folder, data_format)) == TEXTS
    assert list(read_samples(tmp_path / "**" / f"[bc]{ending}", data_format)) == TEXTS[20:]
    assert columns.row_count(folder) == (
        None if ending in (".jsonl.gz", ".json.zst", ".tar") else 50
    )


def test_a_folder_that_datasets_has_saved_is_read_as_datasets_reads_it(tmp_path):
    saved = datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(50))})
    saved.shuffle(seed=1).save_to_disk(tmp_path / "saved", num_shards=3)
    again = datasets.Dataset.load_from_disk(str(tmp_path / "saved"))
    assert list(read_samples(tmp_path / "saved", found(tmp_path / "saved"))) == again["text"][:]
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(
        DataError, match="both: holds a data set for each of test, train; give the folder of one"
    ):
        found(tmp_path / "both")


def test_webdataset_shards_are_read_as_datasets_reads_them(tmp_path):
    talk = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    members = {}
    for number in range(20):
        members |= {
            f"a.b/{number:03}.jpg": b"\xff\xd8",
            f"a.b/{number:03}.txt": f"text {number} é".encode(),
        }
        members |= {
            f"a.b/{number:03}.json": json.dumps({"messages": talk, "number": number}).encode()
        }
    tar(tmp_path / "a.tar", members)
    theirs = datasets.load_dataset(
        "webdataset", data_files=[str(tmp_path / "a.tar")], split="train", streaming=True
    )
    theirs = theirs.decode(False)
    ours = [(key, row) for key, row in shards.tar_samples(tmp_path / "a.tar")]
    named = [{"jpg": {"member": f"a.b/{number:03}.jpg"}} for number in range(20)]
    assert ours == [
        (row["__key__"], {**row["json"], "text": row["txt"], **member})
        for row, member in zip(theirs, named, strict=True)
    ]
    with pytest.raises(DataError, match=r"a\.tar:a\.b/000: .* column 'jpg' is not trained yet"):
        found(tmp_path / "a.tar")
    assert found(tmp_path / "a.tar", ignore_columns=["jpg"]).kind == "messages"


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ({"content": "x"}, r"b\.jsonl: its columns are of no known format; found columns content"),
        (
            {"prompt": "x", "response": "y"},
            r"b\.jsonl: reads as prompt_response .*a\.jsonl as text",
        ),
        ({"text": 3}, r"b\.jsonl:1: column 'text' holds a number"),
    ],
)
def test_a_shard_with_other_columns_is_named(tmp_path, shard, words):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "b.jsonl").write_text(json.dumps(shard))
    with pytest.raises(DataError, match=words):
        found(tmp_path)


def written(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if writer := WRITERS.get("".join(path.suffixes)):
            writer(path, TEXTS)
        else:
            path.write_text("{}")


PARQUETS = [f"train-0000{number}-of-00004.parquet" for number in range(4)]


@pytest.mark.parametrize(
    ("others", "notes"),
    [
        ([], ()),
        (["dataset_infos.json"], ("dataset_infos.json",)),
        (["README.md", ".gitattributes", "LICENSE", ".cache/x.parquet"], ("LICENSE, README.md",)),
        (["state.json"], ("state.json",)),
        (["notes.txt", "old.jsonl.gz"], ("notes.txt, old.jsonl.gz",)),
        ([".part.parquet", "._train.parquet"], ("._train.parquet, .part.parquet",)),
        (["validation/a.parquet", "more.jsonl.xz"], ("more.jsonl.xz, validation/",)),
        (
            [f"{i:02}.md" for i in range(21)],
            (", ".join(f"{i:02}.md" for i in range(20)) + ", ...",),
        ),
    ],
)
def test_shards_of_the_type_of_most_are_read_and_the_rest_of_the_folder_is_named(
    tmp_path, others, notes
):
    written(tmp_path, *PARQUETS, *others)
    assert [file.name for file in shards.list_shards(tmp_path)] == PARQUETS
    assert found(tmp_path).notes == tuple(f"not read of {tmp_path}: {names}" for names in notes)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.parquet", "b.jsonl"], r"several types, .* pattern: \S+/a\.parquet or \S+/b\.jsonl$"),
        (["a.txt", "b.txt", "train.parquet"], r"several types, .*/\*\.txt' or \S+/train\.parquet$"),
        ([*PARQUETS, "test-0.parquet"], r"parts of a data set.*train: '\S+/train-0000\*\.parquet'"),
        (["sft_train.jsonl", "sft_valid.jsonl"], r"validation: \S+/sft_valid\.jsonl\)"),
        (["gsm8k-train.arrow", "gsm8k-test.arrow"], r"test: \S+/gsm8k-test\.arrow, train: "),
        (["data/train.jsonl", "README.md"], r"no data file .* one of its folders \(data\)"),
        (["train/0.jsonl", "validation/0.jsonl"], r"one of its folders \(train, validation\)"),
        (["state.json", "dataset_info.json"], r"no data file lies in this folder"),
        (
            ["a.jsonl", "b.jsonl", "c.jsonl", "info.json"],
            r"info\.json: .*leaves it out: '\S+/\*\.jsonl'",
        ),
    ],
)
def test_a_folder_whose_data_is_not_clear_gets_the_pattern_to_type(tmp_path, names, words):
    (tmp_path / "stub").mkdir()
    written(tmp_path / "stub", *names)
    if "b.txt" in names:
        (tmp_path / "stub" / "train.parquet").write_bytes(bytes(10_000))
    with pytest.raises(DataError, match=words):
        found(tmp_path / "stub")


def test_names_of_one_split_that_name_two_are_no_two_splits(tmp_path):
    written(tmp_path, "train_test_split_0.jsonl", "train_test_split_1.jsonl", "more.jsonl")
    assert len(shards.list_shards(tmp_path)) == 3


def test_a_pattern_finds_no_file_of_a_hidden_folder_below_it(tmp_path):
    written(tmp_path, ".home/a.jsonl", ".home/.cache/b.jsonl")
    assert [file.name for file in shards.list_shards(tmp_path / ".home" / "**" / "*.jsonl")] == [
        "a.jsonl"
    ]


def test_a_bad_row_is_named_by_its_shard_and_all_shards_share_what_is_allowed(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(TEXTS[:2]) + b"{\n" + lines(TEXTS[2:4]))
    data_format = DataFormat("text", {"text": "text"}, "jsonl", "")
    bad = BadRows(2)
    assert list(read_samples(tmp_path, data_format, bad)) == TEXTS[:4] * 2
    assert bad.count == 2
    with pytest.raises(
        DataError, match=r"b\.jsonl:3: is not JSON .* bad row 2, data.max_bad_rows allows 1"
    ):
        list(read_samples(tmp_path, data_format, BadRows(1)))


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ({"b.json": b"{"}, r"a\.tar:b\.json: cannot be read as JSON"),
        ({"b.json": b"[]"}, r"a\.tar:b\.json: found list"),
        ({"b.txt": b"\xff"}, r"a\.tar:b\.txt:0: this byte is not UTF-8"),
        ({"b.jpg": b""}, r"a\.tar:b: has jpg, but neither a \.txt nor a \.json"),
        ({"b.json": b'{"text": 3}'}, r"a\.tar:b: column 'text': found int"),
    ],
)
def test_a_bad_sample_of_a_tar_is_named_by_its_key_and_those_after_it_are_read(
    tmp_path, member, words
):
    tar(tmp_path / "a.tar", {"a.txt": b"first", **member, "c.txt": b"last"})
    data_format = DataFormat("text", {"text": "text"}, "webdataset", "")
    bad = BadRows(1)
    assert list(read_samples(tmp_path / "a.tar", data_format, bad)) == ["first", "last"]
    assert re.search(words, bad.errors[0])
    with pytest.raises(DataError, match=words):
        list(read_samples(tmp_path / "a.tar", data_format))


@pytest.mark.parametrize("ending", [".tar", ".jsonl.gz", ".json.zst", ".arrow"])
def test_a_shard_that_is_cut_anywhere_is_an_error(tmp_path, ending):
    """Not the end of its rows. A tar may be cut behind its end, which is several blocks long."""
    texts = [f"{os.urandom(300).hex()}" for _ in range(20)]
    WRITERS[ending](tmp_path / f"whole{ending}", texts)
    content = (tmp_path / f"whole{ending}").read_bytes()
    file_type = sniff.file_type_of(tmp_path / f"whole{ending}")
    end = len(content.rstrip(b"\0")) if ending == ".tar" else len(content) - 9
    for cut in range(end // 2, end, end // 40):
        path = tmp_path / f"cut{ending}"
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match="cut"):
            list(read_samples(path, DataFormat("text", {"text": "text"}, file_type, "")))


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet", ".arrow"])
def test_slices_hold_each_row_once_wherever_a_file_is_cut(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    WRITERS[ending](path, TEXTS)
    data_format = DataFormat("text", {"text": "text"}, folders.SUFFIXES[ending], "")
    end = 8 if ending in (".parquet", ".arrow") else path.stat().st_size
    for width in (1, 3, 7, 100, end):
        cuts = [Slice(path, start, start + width) for start in range(0, end, width)]
        assert [text for cut in cuts for text in samples_of(cut, data_format, BadRows())] == TEXTS


def test_a_bad_line_of_any_slice_is_named_by_its_number_in_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS[:7]) + b"{\n" + lines(TEXTS[7:]))
    data_format = DataFormat("text", {"text": "text"}, "jsonl", "")
    bad = path.read_bytes().index(b"\n{\n") + 1
    for start in (0, 1, bad - 20, bad):
        with pytest.raises(DataError, match=r"a\.jsonl:8: is not JSON"):
            list(samples_of(Slice(path, start), data_format, BadRows()))
    assert list(samples_of(Slice(path, bad + 1), data_format, BadRows())) == TEXTS[7:]


# ---- what is remembered
# ---------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_content_in_order_and_of_no_name(tmp_path):
    one, other = write(tmp_path / "one", ".jsonl"), write(tmp_path / "other", ".jsonl")
    known = token_cache.known_files(tmp_path)
    before = shards.fingerprint(one, known)
    assert shards.fingerprint(other, known) == before
    (other / "a.jsonl").rename(other / "a2.jsonl")
    assert shards.fingerprint(other, known) == before
    (other / "a2.jsonl").rename(other / "z.jsonl")
    assert shards.fingerprint(other, known) != before
    (tmp_path / "alone").mkdir()
    (one / "a.jsonl").rename(tmp_path / "alone/a.jsonl")
    assert shards.fingerprint(tmp_path / "alone", known) == shards.fingerprint(
        tmp_path / "alone/a.jsonl", known
    )


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1")

    def unread() -> int:
        raise AssertionError("it was read again")

    known = shards.FileFacts(tmp_path / "files.json")
    assert known.get(path, "size", lambda: 1) == 1  # too young to be remembered
    assert known.get(path, "size", lambda: 2) == 2
    known = shards.FileFacts(tmp_path / "files.json", racy_s=-60)
    assert known.get(path, "size", lambda: 3) == 3
    known.keep()
    again = shards.FileFacts(tmp_path / "files.json")
    assert again.get(path, "size", unread) == 3
    path.write_bytes(b"2")
    os.utime(path, (0, 0))
    assert again.get(path, "size", lambda: 4) == 4


def _changed(file: Path) -> None:
    file.write_text(file.read_text().replace('"size": 3', '"size": 4'))


@pytest.mark.parametrize(
    "damage",
    [
        _changed,
        lambda file: file.write_text("[]"),
        lambda file: file.write_text("[" * 5000),
        lambda file: file.write_text('{"sha256": "", "entries": {"a": 1}}'),
        lambda file: file.write_bytes(b"\xff"),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["another value", "another type", "deep", "no entries", "no text", "FIFO"],
)
def test_damaged_facts_are_read_again(tmp_path, damage):
    path, file = tmp_path / "a.jsonl", tmp_path / "files.json"
    path.write_bytes(b"1")
    known = shards.FileFacts(file, racy_s=-60)
    known.get(path, "size", lambda: 3)
    known.keep()
    damage(file)
    again = shards.FileFacts(file, racy_s=-60)
    assert again.get(path, "size", lambda: 5) == 5
    again.keep()
    assert shards.FileFacts(file).get(path, "size", lambda: 6) == 5


def test_a_folder_in_place_of_a_file_that_is_written_is_named(tmp_path):
    file = tmp_path / "files.json"
    file.mkdir()
    with pytest.raises(ResourceError, match=r"files\.json: is a folder, expected a file"):
        files.write_atomic(file, "{}")
    assert list(tmp_path.iterdir()) == [file]
