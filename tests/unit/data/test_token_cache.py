"""Tokenised rows are used again only by recipes that tokenise the same way."""

from __future__ import annotations

import json

import pytest

from launch.data import token_cache
from launch.recipe import load
from launch.schema.plan import DataFormat
from tests import builders

pytestmark = pytest.mark.unit


@pytest.fixture
def name_of(tmp_path):
    """A function that names the cache of the recipe sft_fast with these overrides."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    data_format = DataFormat(
        "prompt_response", {"prompt": "prompt", "response": "response"}, "jsonl", ""
    )

    def name(*overrides: str) -> str:
        recipe, _ = load.load("sft_fast", [f"--data.train_file={rows}", *overrides])
        model = builders.model_size(recipe.model, None, root=builders.CODE)
        return token_cache.token_cache(tmp_path, recipe, model, data_format).folder.name

    return name


@pytest.mark.parametrize(
    "override",
    [
        *("--data.max_length=64", "--data.max_train_samples=5", "--data.max_bad_rows=1"),
        *("--data.packing=true", "--data.truncation_side=left", "--tokenizer.vocab_size=300"),
        *("--tokenizer.split_special_tokens=true", "--tokenizer.split_special_tokens=false"),
        *("--tokenizer.src_lang=de_DE", "--tokenizer.tgt_lang=ro_RO", "--tokenizer.loading=file"),
    ],
)
def test_a_setting_that_changes_tokens_has_a_cache_of_its_own(name_of, override):
    assert name_of(override) != name_of()


@pytest.mark.parametrize(
    "override",
    ["--training.learning_rate=1e-3", "--data.truncation_side=right", "--training.seed=1"],
)
def test_a_setting_that_leaves_tokens_as_they_are_shares_the_cache(name_of, override):
    assert name_of(override) == name_of()
