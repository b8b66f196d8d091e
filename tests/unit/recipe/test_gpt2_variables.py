"""What run_single_gpu.sh is told by the environment, as overrides of its recipe."""

from __future__ import annotations

import pytest

from launch.base.errors import ConfigError
from launch.recipe import load
from launch.recipe.guides.gpt2_variables import NAMES, translate

GUIDE = {
    "MODEL_SIZE": "medium",
    "BATCH_SIZE": "16",
    "GRADIENT_ACCUM": "8",
    "ENABLE_FP16": "--fp16",
    "ENABLE_GRAD_CKPT": "--gradient_checkpointing",
    "NUM_WORKERS": "4",
    "MAX_LENGTH": "256",
    "EPOCHS": "3",
    "OUTPUT_DIR": "./output_single_optimized",
}


def test_every_variable_of_the_guide_sets_its_key():
    assert set(GUIDE) == set(NAMES)
    recipe, _ = load.load("single_gpu_optimized", translate({**GUIDE, "PATH": "/bin"}))
    training = recipe.training
    assert recipe.model.shape == "gpt2-medium"
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (16, 8)
    assert (training.fp16, training.bf16, training.activation_checkpointing) == (True, False, True)
    assert (training.dataloader_num_workers, training.num_train_epochs) == (4, 3)
    assert (recipe.data.max_length, recipe.output_dir) == (256, "./output_single_optimized")


def test_a_variable_that_is_not_set_leaves_its_key_to_the_recipe():
    assert translate({"HOME": "/root"}) == []
    assert (
        load.load("single_gpu", translate({"EPOCHS": "1"}))[0].training.per_device_train_batch_size
        == 8
    )


def test_an_empty_switch_is_off_as_in_the_guides_script():
    recipe, _ = load.load(
        "single_gpu_optimized", translate({"ENABLE_FP16": "", "ENABLE_GRAD_CKPT": ""})
    )
    assert (
        recipe.training.fp16,
        recipe.training.bf16,
        recipe.training.activation_checkpointing,
    ) == (
        False,
        False,
        False,
    )
    # so that planning leaves it off
    assert "activation_checkpointing" in recipe.training.model_fields_set


@pytest.mark.parametrize(
    "name", ["BATCH_SIZE", "GRADIENT_ACCUM", "NUM_WORKERS", "MAX_LENGTH", "EPOCHS"]
)
@pytest.mark.parametrize(
    "value", ["abc", "-1", "1e99", "[8]", "'8'", "true", "$(touch x)", "8; touch x"]
)
def test_a_bad_value_is_one_line_that_names_the_variable(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.*found .*expected") as caught:
        load.load("single_gpu", translate({name: value}))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["BATCH_SIZE", "OUTPUT_DIR", "EPOCHS"])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_value_is_refused(name, value):
    with pytest.raises(
        ConfigError, match=f"^{name}=.*: found nothing, expected a value; unset {name}"
    ):
        translate({name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODEL_SIZE", "mediun", "did you mean medium"),
        ("MODEL_SIZE", "", "expected one of tiny, small, medium"),
        ("MODEL_SIZE", "../x", "expected one of tiny, small, medium"),
        ("ENABLE_FP16", "1", 'expected "--fp16" or nothing'),
        ("ENABLE_FP16", "--bf16", 'expected "--fp16" or nothing'),
        ("ENABLE_GRAD_CKPT", "true", 'expected "--gradient_checkpointing" or nothing'),
    ],
)
def test_a_word_that_is_none_of_the_guides_is_refused(name, value, said):
    with pytest.raises(ConfigError, match=f"^{name}={value}: found .*{said}"):
        translate({name: value})


def test_before_and_after_are_one_comparison():
    before, after = (load.load(name)[0] for name in ("single_gpu", "single_gpu_optimized"))
    for recipe in (before, after):
        training = recipe.training
        assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 128
    cut = {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "bf16",
        "dataloader_num_workers",
    }
    left_out = {"name": True, "output_dir": True, "training": cut, "data": {"batch_by_tokens"}}
    assert before.model_dump(exclude=left_out) == after.model_dump(exclude=left_out)
