"""Tokenised rows are used again only by recipes that tokenise the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.data import columns, token_cache
from launch.data.files import shards
from launch.recipe import load
from launch.schema.recipe_keys import affected_by, all_keys
from tests import builders

pytestmark = pytest.mark.unit

ROW = {
    **{"prompt": "a", "response": "b", "question": "c", "answer": "d", "text": "e", "body": "f"},
    "talk": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h"}],
}
NAMED = ("--data.prompt_column=prompt", "--data.response_column=response")
ALONE = "--data.validation_file=null"
TEXTS = (ALONE, "--task=pretrain", "--data.train_file=rows.txt", "--data.packing=true")
# key that decides the rows -> a flag that changes it, after flags that both recipes have
CHANGES = {
    "task": ("--data.text_column=text", "--task=pretrain"),
    "tokenizer.vocab_size": ("--tokenizer.vocab_size=300",),
    "tokenizer.add_tokens": ("--tokenizer.add_tokens=['<|im_start|>']",),
    "tokenizer.loading": ("--tokenizer.loading=file",),
    "tokenizer.split": ("--tokenizer.split=word", "--tokenizer.split=character"),
    "tokenizer.split_special_tokens": ("--tokenizer.split_special_tokens=true",),
    "tokenizer.src_lang": ("--tokenizer.src_lang=de_DE",),
    "tokenizer.tgt_lang": ("--tokenizer.tgt_lang=ro_RO",),
    "data.validation_size": (ALONE, "--data.validation_size=1"),
    "data.prompt_column": (*NAMED, "--data.prompt_column=question"),
    "data.response_column": (*NAMED, "--data.response_column=answer"),
    "data.text_column": ("--data.text_column=text", "--data.text_column=body"),
    "data.messages_column": ("--data.messages_column=talk",),
    "data.ignore_columns": (*NAMED, "--data.ignore_columns=[body]"),
    "data.max_length": ("--data.max_length=64",),
    "data.truncation_side": ("--data.truncation_side=left",),
    "data.max_train_samples": ("--data.max_train_samples=5",),
    "data.max_validation_samples": ("--data.max_validation_samples=5",),
    "data.max_bad_rows": ("--data.max_bad_rows=1",),
    "data.text_rows": (*TEXTS, "--data.text_rows=paragraphs"),
    "data.packing": ("--data.packing=true",),
    "data.streaming": (*TEXTS, "--training.max_steps=5", "--data.streaming=true"),
}
# keys that decide the order of rows, which is not stored
ORDER = {"training.seed", "data.group_by_length", "data.shuffle_buffer_mib"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "chat_template.jinja")


@pytest.fixture
def name_of(tmp_path, monkeypatch):
    """A function that names the cache of the recipe sft_fast with these overrides."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "held_out.jsonl"):
        Path(name).write_text((json.dumps(ROW) + "\n") * 4)
    Path("rows.txt").write_text("a text\n" * 20)
    Path("tokenizer").mkdir()
    for name in (*TOKENIZER_FILES, "model.safetensors"):
        Path("tokenizer", name).write_text(name)
    Path("template.jinja").write_text("{{ messages }}")

    def name(*overrides: str) -> str:
        files = ("--data.train_file=rows.jsonl", "--data.validation_file=held_out.jsonl")
        recipe, _ = load.load("sft_fast", [*files, *overrides])
        model = builders.model_size(recipe.model, None, root=builders.CODE)
        data_format = columns.detect(recipe.data, tmp_path)
        return token_cache.token_cache(tmp_path, recipe, model, data_format).folder.name

    return name


def test_each_key_that_decides_rows_is_tried_below():
    assert CHANGES.keys() == {key for key in all_keys() if "rows" in affected_by(key)} - ORDER


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_that_changes_tokens_has_a_cache_of_its_own(name_of, key):
    *both, change = CHANGES[key]
    assert name_of(*both, change) != name_of(*both)


def test_both_ways_to_split_special_tokens_have_a_cache_of_their_own(name_of):
    values = ("null", "true", "false")
    names = {name_of(f"--tokenizer.split_special_tokens={value}") for value in values}
    assert len(names) == len(values)


@pytest.mark.parametrize(
    "override",
    ["--training.learning_rate=1e-3", "--data.truncation_side=right", "--training.seed=1"],
)
def test_a_setting_that_leaves_tokens_as_they_are_shares_the_cache(name_of, override):
    assert name_of(override) == name_of()


@pytest.mark.parametrize("file", TOKENIZER_FILES)
def test_a_changed_file_of_a_tokenizer_gives_other_tokens_and_changed_weights_do_not(name_of, file):
    before = name_of("--tokenizer.path=tokenizer")
    Path("tokenizer", "model.safetensors").write_text("other weights")
    assert name_of("--tokenizer.path=tokenizer") == before
    Path("tokenizer", file).write_text("other tokens")
    assert name_of("--tokenizer.path=tokenizer") != before


@pytest.mark.parametrize(
    ("override", "file"),
    [
        ("--data.max_length=128", "rows.jsonl"),
        ("--data.max_length=128", "held_out.jsonl"),
        ("--tokenizer.chat_template=./template.jinja", "template.jinja"),
    ],
)
def test_a_file_with_another_content_gives_other_tokens(name_of, override, file):
    before = name_of(override)
    Path(file).write_text(Path(file).read_text() * 2)
    assert name_of(override) != before


def test_packed_rows_of_units_of_another_size_have_a_cache_of_their_own(name_of, monkeypatch):
    names = []
    for unit_bytes in (shards.UNIT_BYTES, 64, 32):
        monkeypatch.setattr(shards, "UNIT_BYTES", unit_bytes)
        names.append((name_of(), name_of("--data.packing=true")))
    unpacked, packed = map(set, zip(*names, strict=True))
    assert (len(unpacked), len(packed)) == (1, 3)
