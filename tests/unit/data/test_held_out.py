"""data.validation_size: rows of every format are counted as they are read, and each is in one
part."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.errors import ConfigError, DataError
from launch.data import columns, rows, sources, token_cache
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows, Slice
from launch.recipe import load
from launch.schema.data_section import DataSection
from tests import builders
from training.data import units

pytestmark = pytest.mark.unit

TEXTS = [f"text {number}" for number in range(60)]
ODD_LINES = ["\ufeff" + json.dumps({"text": TEXTS[0]}), "", "  \t ", "\u3000", "\x1c"]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    objects = [{"text": text} for text in TEXTS]
    lines = [*ODD_LINES, *map(json.dumps, objects[1:]), ""]
    if kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=7)
    elif kind == "arrow":
        table = pa.table({"text": TEXTS})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])
    elif kind == "json":
        path.write_text(json.dumps(objects))
    elif kind == "txt":
        path.write_text("\n\n".join(TEXTS) + "\n\n")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts_of(named: tuple[sources.Source, ...]) -> list[object]:
    return [sample for source in named for sample in source.read(BadRows())]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "txt", "parquet", "arrow"])
def test_rows_of_a_format_are_counted_and_divided(tmp_path, kind):
    path = write(tmp_path, kind)
    data = DataSection(train_file=str(path), validation_size=0.25)
    data_format = columns.detect(data, tmp_path)
    counts = sources.count_rows(data, data_format, FileFacts())
    assert counts == ((60,),)
    train, validation = (
        texts_of(sources.of_part(data, data_format, counts, part))
        for part in ("train", "validation")
    )
    assert (len(train), len(validation)) == (45, 15)
    assert sorted([*train, *validation]) == sorted(TEXTS)
    same = DataSection(train_file=str(path), validation_size=15, max_train_samples=3)
    assert texts_of(sources.of_part(same, data_format, counts, "validation")) == validation
    # in units, as processes read them
    (source,) = sources.of_part(data, data_format, counts, "validation")
    of_units = units.of_sources([source], 100)
    assert len(of_units) > 3 or kind in ("jsonl.gz", "json", "csv")
    row_offsets = units.row_offsets(of_units, lambda: None)
    slices = [of for _, unit in of_units for of in unit]
    numbers = [number for unit in row_offsets for number in unit]
    in_units = [
        sample
        for of, first in zip(slices, numbers, strict=True)
        for sample in sources.samples_of(of, first, source, BadRows())
    ]
    assert in_units == validation


def test_pairs_of_turns_are_held_out_as_pairs(tmp_path):
    turns = [
        {"text": f"{role} {number}", "role": role}
        for number in range(20)
        for role in ("prompter", "assistant")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, turns)))
    data = DataSection(train_file=str(path), validation_size=5)
    data_format = columns.detect(data, tmp_path)
    counts = sources.count_rows(data, data_format, FileFacts())
    assert counts == ((20,),)
    for part, num_pairs in (("train", 15), ("validation", 5)):
        (source,) = sources.of_part(data, data_format, counts, part)
        pairs = [talk.messages for talk in source.read(BadRows())]
        assert len(pairs) == num_pairs
        assert all(
            question["content"].split()[1] == answer["content"].split()[1]
            for question, answer in pairs
        )


def test_a_bad_row_is_counted_in_its_own_part(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[30] = "{"
    path.write_text("\n".join(lines))
    data = DataSection(train_file=str(path), validation_size=0.5, max_bad_rows=1)
    data_format = columns.detect(data, tmp_path)
    assert rows.count(Slice(path), data_format) == 60
    bad = {}
    for part in ("train", "validation"):
        (source,) = sources.of_part(data, data_format, ((60,),), part)
        bad[part] = BadRows(1)
        list(source.read(bad[part]))
    assert sorted(rows.count for rows in bad.values()) == [0, 1]


def test_bad_rows_of_both_parts_are_not_counted_together(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    for number in range(4):
        lines[number * 9] = "{"
    path.write_text("\n".join(lines))
    section = {"train_file": str(path), "validation_size": 0.5}
    assert columns.detect(DataSection(**section, max_bad_rows=2), tmp_path).kind == "text"
    with pytest.raises(DataError, match=r"bad row 3, .* allows 1 in each of 2 parts"):
        columns.detect(DataSection(**section, max_bad_rows=1), tmp_path)


def test_the_size_decides_the_token_cache_and_too_few_rows_are_refused(tmp_path):
    path = builders.write_parquet(tmp_path / "train.parquet", builders.rows(20))

    def folder(size: float | None) -> Path:
        recipe = builders.recipe_of(data={"train_file": str(path), "validation_size": size})
        plan = builders.plan(recipe)
        return token_cache.token_cache(tmp_path, recipe, plan.shape, plan.data_format).folder

    assert len({folder(size) for size in (None, 0.2, 4, 5)}) == 4
    assert folder(0.2) == folder(0.2)
    with pytest.raises(DataError, match=r"train\.parquet: .* 0\.01 holds 0 of 20 rows out"):
        folder(0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--data.validation_file=a.parquet", "--data.validation_size=5"],
            "validation_file and validation_size both say which rows are held out",
        ),
        (
            [
                *("--task=pretrain", "--data.streaming=true", "--data.packing=true"),
                *("--training.max_steps=9", "--data.validation_size=5"),
            ],
            "no data.validation_size (a stream is not counted before it is trained",
        ),
    ],
)
def test_what_does_not_go_with_a_size_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load.load("sft_fast", overrides)


def test_a_typed_size_replaces_the_held_out_file_of_the_recipe_and_is_said_of_a_users_own_file():
    own = str(load.find("sft_fast"))
    recipe, changes = load.load(own, ["--data.validation_size=0.05"])
    assert (recipe.data.validation_file, recipe.data.validation_size) == (None, 0.05)
    assert recipe.data.holds_out
    (change,) = [change for change in changes if change.key == "data.validation_file"]
    assert change.effective == "null"
    assert load.load("sft_fast", ["--data.validation_size=0.05"]) == (recipe, ())


@pytest.mark.parametrize("name", ["val_size", "val_set_size", "test_size", "validation_split"])
def test_names_of_other_programs_lead_there(name):
    with pytest.raises(ConfigError, match=r"did you mean validation_size\?"):
        load.load("sft_fast", [f"--data.{name}=0.1"])
