"""What each recipe key affects stands at its field; who resumes, names a trace, remembers a tuned
batch, compares runs or compares ranks reads it there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from launch.predict.history import cache_keys
from launch.predict.traces import Traces
from launch.report import comparable
from launch.run_folder import resume
from launch.schema import section as schema_section
from launch.schema.plan import ModelSize
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS, affected_by, all_keys
from launch.schema.recorded_step import Question
from tests.builders import plan, recipe_of

MODEL = ModelSize("tiny", {"model_type": "llama"}, 1000, 1000)


def trace_name(recipe: Recipe) -> str:
    traces = Traces(recipe, MODEL, (), Path("/nowhere"))
    return traces.name(Question(replace(plan().strategy, gradient_accumulation_steps=1), (8, 8)))


def with_training(**changes: object) -> Recipe:
    data = {"train_file": "/data/a", "validation_file": "/data/b", "max_length": 128}
    return recipe_of(data=data, training=changes)


def test_every_key_of_the_schema_says_what_it_affects():
    known = set(get_args(schema_section.Effect))
    missing = [key for key in all_keys() if not affected_by(key)]
    assert missing == []
    assert all(affected_by(key) <= known for key in all_keys())
    for name, section in SECTIONS.items():
        assert {f"{name}.{key}" for key in section.model_fields} <= set(all_keys())


def test_every_effect_is_that_of_some_key():
    used = {effect for key in all_keys() for effect in affected_by(key)}
    assert used == set(get_args(schema_section.Effect))


def test_a_key_that_only_trainingarguments_knows_affects_everything_unless_it_is_listed():
    assert affected_by("training.optim_args") == schema_section.EVERYTHING
    assert affected_by("training.lr_scheduler_kwargs.min_lr") == {"weights"}
    assert affected_by("training.logging_first_step") == {"interruptions"}


def test_a_whole_section_affects_what_its_keys_do():
    assert affected_by("lora") >= {"weights", "memory"}
    assert "weights" not in affected_by("launch")


@pytest.mark.parametrize(
    "change",
    [
        {"load_best_model_at_end": True},
        {"learning_rate_scaling": "sqrt", "learning_rate_batch_size": 64},
        {"learning_rate": 1e-3},
        {"save_steps": 7},
        {"logging_first_step": True},
        {"lr_scheduler_kwargs": {"min_lr": 1e-6}},
    ],
)
def test_what_no_step_feels_neither_traces_again_nor_forgets_the_tuned_batch(change):
    before, after = with_training(), with_training(**change)
    assert trace_name(after) == trace_name(before)
    assert cache_keys.recipe_key(after) == cache_keys.recipe_key(before)


@pytest.mark.parametrize("change", [{"optim": "sgd"}, {"max_grad_norm": 0}, {"optim_args": "a=1"}])
def test_what_a_step_feels_traces_again_and_forgets_the_tuned_batch(change):
    before, after = with_training(), with_training(**change)
    assert trace_name(after) != trace_name(before)
    assert cache_keys.recipe_key(after) != cache_keys.recipe_key(before)


def test_lora_alpha_scales_the_adapter_and_is_no_other_step():
    before, after = recipe_of(lora={}), recipe_of(lora={"lora_alpha": 64})
    assert trace_name(after) == trace_name(before)
    assert cache_keys.recipe_key(after) == cache_keys.recipe_key(before)
    assert "lora_alpha" in str(after)


def test_a_longer_limit_of_rows_of_the_same_lengths_is_the_same_trace():
    assert trace_name(recipe_of(data={"max_length": 256})) == trace_name(recipe_of())


@pytest.mark.parametrize(
    ("key", "is_free"),
    [
        ("training.learning_rate", False),
        ("training.load_best_model_at_end", False),
        ("training.optim_args", False),
        ("data.packing", False),
        ("data.max_train_samples", False),
        ("training.seed", False),
        ("model.path", False),
        ("training.logging_first_step", True),
        ("training.data_seed", True),  # of a run begun when it was taken without an effect
        ("training.average_tokens_across_devices", False),  # of one in which it had one
        ("training.save_steps", True),
        ("training.gradient_accumulation_steps", True),
        ("data.train_file", True),  # its content is compared instead
        ("data.batch_by_tokens", True),
        ("launch.mode", True),
        ("evaluation.exact_match_rows", True),
        ("output_dir", True),
    ],
)
def test_a_run_is_continued_after_changes_that_train_the_same_weights_of_the_same_rows(
    key, is_free
):
    assert resume.may_change(key) is is_free


@pytest.mark.parametrize(
    ("key", "is_compared"),
    [
        ("training.learning_rate", True),
        ("training.save_steps", True),
        ("launch.vram_fraction", True),
        ("launch.host_limit_gib", True),
        ("training.gradient_accumulation_steps", False),  # the strategy tells it
        ("launch.mode", False),
        ("data.train_file", False),
        ("name", False),
    ],
)
def test_runs_are_compared_by_what_neither_the_strategy_nor_the_rows_tell(key, is_compared):
    assert comparable.is_compared(key) is is_compared
