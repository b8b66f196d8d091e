"""The reference of keys is whole and current, and a wrong name leads to the right key."""

from __future__ import annotations

import pytest

from launch.recipe import key_reference, training_arguments
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS
from scripts import render_docs

pytestmark = pytest.mark.unit


def test_every_key_has_a_type_a_default_and_a_meaning():
    keys = list(key_reference.all_keys())
    assert len({key.name for key in keys}) == len(keys) > 100
    assert [key for key in keys if not (key.type and key.default and key.meaning)] == []


def test_every_field_of_the_schema_and_of_the_installed_transformers_is_listed():
    names = {key.name for key in key_reference.all_keys()}
    for section, model in SECTIONS.items():
        assert {f"{section}.{field}" for field in model.model_fields} <= names
    assert {f"training.{field}" for field in training_arguments.free()} <= names
    assert set(Recipe.model_fields) - set(SECTIONS) <= names


@pytest.mark.parametrize(
    ("name", "text"),
    [("keys.md", render_docs.page), ("plan.schema.json", render_docs.plan_schema)],
)
def test_generated_pages_are_what_the_script_writes(name, text):
    written = (render_docs.CODE / "docs" / name).read_text(encoding="utf-8")
    assert written == text(), "run: python scripts/render_docs.py"


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [
        ("lr", "", "training.learning_rate"),
        ("lr", "training", "training.learning_rate"),
        ("LR", "", "training.learning_rate"),
        ("learning-rate", "", "training.learning_rate"),
        ("lerning_rate", "training", "training.learning_rate"),
        ("batch_size", "", "training.per_device_train_batch_size"),
        ("epochs", "", "training.num_train_epochs"),
        ("max_length", "training", "data.max_length"),
        ("adam_beta1", "", "training.adam_beta1"),
        ("alow", "resume", "resume.allow"),
        ("val_size", "data", "data.validation_size"),
        ("vql_szie", "data", None),
        ("qqq", "model", None),
    ],
)
def test_a_wrong_name_means_a_key_near_in_its_section_or_of_the_same_last_part(name, section, key):
    assert key_reference.likely(name, section) == key


def test_every_alias_leads_to_a_key():
    assert set(key_reference.ALIASES.values()) <= {key.name for key in key_reference.all_keys()}
