"""The flags of scripts/train.py, and what the guide imports from config/."""

from __future__ import annotations

import pytest

from config.training_config import get_large_config, get_medium_config
from launch.base.errors import ConfigError
from launch.base.workspace import CODE
from launch.recipe import load
from launch.recipe.guides.train_py import translate
from tests import builders


@pytest.mark.parametrize(
    ("line", "recipe", "shape"),
    [
        ("--mode pretrain --config medium", "minigpt_medium", "minigpt-medium"),
        ("--mode=pretrain --config=large", "minigpt_large", "minigpt-large"),
        ("--mode sft --config medium", "minigpt_medium_sft", "minigpt-medium"),
        ("--config large --mode sft", "minigpt_large_sft", "minigpt-large"),
        ("--mode pretrain", "minigpt_medium", "minigpt-medium"),
        (
            "--mode pretrain --config medium --model.shape=llama-tiny",
            "minigpt_medium",
            "llama-tiny",
        ),
    ],
)
def test_mode_and_config_name_a_recipe(line, recipe, shape):
    request = translate(line.split())
    assert request.recipe == recipe
    assert load.load(request.recipe, request.overrides)[0].model.shape == shape


def test_a_size_that_was_typed_is_not_made_smaller_where_there_is_no_gpu():
    typed, left_out = (translate(["--mode=pretrain", *more]) for more in (["--config=medium"], []))
    assert (
        load.load(typed.recipe, typed.overrides, has_gpu=False)[0].model.shape == "minigpt-medium"
    )
    assert (
        load.load(left_out.recipe, left_out.overrides, has_gpu=False)[0].model.shape == "mini-chat"
    )


def test_sft_starts_from_what_pretraining_left_also_where_the_size_was_typed():
    for line in ("--mode sft", "--mode sft --config medium"):
        request = translate(line.split())
        for has_gpu in (True, False):
            recipe, _ = load.load(request.recipe, request.overrides, has_gpu)
            assert recipe.model.path_if_there == load.load("minigpt_medium")[0].output_dir


def test_a_model_of_the_users_own_is_taken_instead(tmp_path):
    request = translate(["--mode", "sft", "--config", "medium", f"--model.path={tmp_path}"])
    section = load.load(request.recipe, request.overrides)[0].model
    assert (section.path, section.shape, section.path_if_there) == (str(tmp_path), None, None)


def test_medium_counts_the_guides_parameters_in_every_recipe():
    for name in ("minigpt_medium", "minigpt_medium_sft"):
        recipe, _ = load.load(name)
        assert (
            builders.model_size(
                recipe.model.model_copy(update={"path_if_there": None}), None, root=CODE
            ).parameters
            == 58_491_392
        )


def test_the_guides_attributes_are_readable_and_printed(capsys):
    config = get_medium_config()
    assert (
        config.num_workers,
        config.prefetch_factor,
        config.pin_memory,
        config.persistent_workers,
    ) == (
        8,
        4,
        True,
        True,
    )
    assert (config.batch_size, config.gradient_accumulation_steps, config.effective_batch_size) == (
        32,
        4,
        128,
    )
    assert config.mixed_precision is True
    assert (config.learning_rate, config.warmup_steps, config.parameters) == (
        3e-4,
        4000,
        58_491_392,
    )
    lines = capsys.readouterr().out.splitlines()
    for word in (
        "num_workers 8",
        "prefetch_factor 4",
        "batch_size 32",
        "gradient_accumulation_steps 4",
    ):
        assert word in [" ".join(line.split()) for line in lines]
    assert get_large_config().effective_batch_size == 128


@pytest.mark.parametrize(
    ("line", "resume", "cpu", "dry_run"),
    [
        ("", "auto", False, False),
        ("--resume", "auto", False, False),
        ("--resume never --cpu", "never", True, False),
        ("--resume=runs/x/1 --dry-run", "runs/x/1", False, True),
        ("--dry_run", "auto", False, True),
    ],
)
def test_how_it_starts(line, resume, cpu, dry_run):
    request = translate(["--mode=pretrain", *line.split()])
    assert (request.resume, request.cpu, request.dry_run) == (resume, cpu, dry_run)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--mode: found nothing, expected one of pretrain, sft, or --config=FILE.yaml"),
        ("--config medium", "--mode: found nothing"),
        ("--mode pretran", "did you mean pretrain?"),
        ("--mode pretrain --config mediun", "did you mean medium?"),
        ("--mode pretrain --config=", "expected one of medium, large or a .yaml file"),
        ("--mode", "--mode: found no value"),
        ("--mode sft --config x.yaml", "leave it out"),
        ("--mode pretrain --batch_size=3", "found an unknown flag"),
        ("--mode pretrain --confg medium", "did you mean --config?"),
        ("--mode pretrain --dryrun", "did you mean --dry_run?"),
        ("--mode pretrain --learning_rate=1", "did you mean --training.learning_rate?"),
        ("pretrain", "found no flag"),
    ],
)
def test_a_mistake_is_one_line_with_what_was_expected(line, said):
    with pytest.raises(ConfigError) as caught:
        translate(line.split())
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_bad_value_of_a_key_names_what_was_typed():
    request = translate(["--mode=pretrain", "--training.learning_rate=high"])
    with pytest.raises(ConfigError, match=r"^--training.learning_rate=high: found 'high'"):
        load.load(request.recipe, request.overrides)
