from __future__ import annotations

import pytest

from launch.base.errors import ConfigError
from launch.recipe import load
from launch.recipe.guides.chatlm_flags import Request, translate

pytestmark = pytest.mark.unit


def test_the_guides_command_is_understood_word_for_word():
    request = translate(
        ["train", "--is_finetune=True", "--use_fast_config=True", "--batch_size_per_gpu=20"]
    )
    assert request == Request("sft_fast", ("--training.per_device_train_batch_size=20",), "auto")
    recipe, _ = load.load(request.recipe, request.overrides)
    assert recipe.training.per_device_train_batch_size == 20
    assert recipe.training.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("", "pretrain"),
        ("--is_finetune", "sft"),
        ("--is_finetune=True", "sft"),
        ("--is_finetune=False", "pretrain"),
        ("--is_finetune --use_small_config", "sft_small"),
        ("--use_small_config", "sft_small"),
        ("--use_small_config --use_fast_config --is_finetune", "sft_fast"),
        ("--use_fast_config --use_large_config --use_small_config --is_finetune", "pretrain_large"),
        ("--use_large_config=0 --use_fast_config=1", "sft_fast"),
        ("--use_fast_config --nouse_fast_config --is_finetune", "sft"),
    ],
)
def test_large_goes_before_fast_before_small_before_finetune_before_pretrain(flags, recipe):
    assert translate(["train", *flags.split()]).recipe == recipe


@pytest.mark.parametrize(
    "flags",
    [
        "--is_finetune=True --batch_size_per_gpu=8",
        "--is-finetune=true --batch-size-per-gpu=8",
        "--is_finetune True --batch_size_per_gpu 8",
        "--is_finetune --batch-size-per-gpu 8",
        "--is_finetune=1 --batch_size_per_gpu=8",
        "--nois_finetune --is_finetune --batch_size_per_gpu=8",
    ],
)
def test_every_form_that_google_fire_reads_is_read(flags):
    expected = Request("sft", ("--training.per_device_train_batch_size=8",), "auto")
    assert translate(flags.split()) == translate(["train", *flags.split()]) == expected


@pytest.mark.parametrize(
    ("flag", "override"),
    [
        ("--batch_size_per_gpu=4", "--training.per_device_train_batch_size=4"),
        ("--gradient_accumulation_steps=3", "--training.gradient_accumulation_steps=3"),
        ("--epochs=2", "--training.num_train_epochs=2"),
        ("--learn_rate=1e-4", "--training.learning_rate=1e-4"),
        ("--max_seq_len=128", "--data.max_length=128"),
        ("--save_steps=7", "--training.save_steps=7"),
        ("--train_file=a b.parquet", "--data.train_file=a b.parquet"),
        ("--validation_file=b=c.parquet", "--data.validation_file=b=c.parquet"),
        ("--training.weight_decay=0.1", "--training.weight_decay=0.1"),
        ("--data.max-length=64", "--data.max_length=64"),
        ("--training.activation_checkpointing", "--training.activation_checkpointing=true"),
        ("--model.shape=t5-tiny", "--model.shape=t5-tiny"),
        ("--output_dir=elsewhere", "--output_dir=elsewhere"),
    ],
)
def test_each_flag_becomes_an_override_that_the_recipe_takes(flag, override):
    request = translate([flag])
    assert request.overrides == (override,)
    load.load(request.recipe, request.overrides)


def test_overrides_keep_the_order_in_which_they_were_typed():
    request = translate(
        [
            "--batch_size_per_gpu=4",
            "--training.per_device_train_batch_size=2",
            "--batch_size_per_gpu=6",
        ]
    )
    assert load.load(request.recipe, request.overrides)[0].training.per_device_train_batch_size == 6


@pytest.mark.parametrize("value", ["-1", "0", "abc", "1.5", "true", "1e9", "", "65537", "[1, 2]"])
def test_a_bad_value_names_the_flag_that_was_typed_and_the_key_of_the_recipe(value):
    request = translate([f"--batch_size_per_gpu={value}"])
    with pytest.raises(ConfigError, match=r"^--batch_size_per_gpu=") as caught:
        load.load(request.recipe, request.overrides)
    assert f"--batch_size_per_gpu={value}: training.per_device_train_batch_size: found" in str(
        caught.value
    )
    assert str(caught.value).isprintable()


def test_a_negative_number_after_a_space_is_a_value():
    assert translate(["--save_steps", "-1"]).overrides == ("--training.save_steps=-1",)


@pytest.mark.parametrize(
    ("flags", "resume"),
    [
        ("", "auto"),
        ("--is_keep_training", "auto"),
        ("--is_keep_training=True", "auto"),
        ("--is_keep_training=False", "never"),
        ("--nois_keep_training", "never"),
        ("--resume", "auto"),
        ("--noresume", "never"),
        ("--resume=auto", "auto"),
        ("--resume=never", "never"),
        ("--resume never --is_keep_training=False", "never"),
        ("--resume=model_save/sft/checkpoint-100", "model_save/sft/checkpoint-100"),
        ("--resume x/checkpoint-1 --is_keep_training", "x/checkpoint-1"),
    ],
)
def test_how_to_resume(flags, resume):
    assert translate(flags.split()).resume == resume


@pytest.mark.parametrize(
    "flags",
    ["--resume=auto --is_keep_training=False", "--nois_keep_training --resume=x", "--resume="],
)
def test_contradicting_or_empty_resume_is_refused(flags):
    with pytest.raises(ConfigError, match=r"^--resume=.*expected auto, never or the path"):
        translate(flags.split())


@pytest.mark.parametrize(
    ("flags", "cpu"), [("", False), ("--cpu", True), ("--cpu=True", True), ("--nocpu", False)]
)
def test_the_cpu_can_be_asked_for(flags, cpu):
    assert translate(flags.split()).cpu is cpu


@pytest.mark.parametrize(
    ("flags", "dry_run"), [("", False), ("--dry-run", True), ("--dry_run=False", False)]
)
def test_the_plan_alone_can_be_asked_for(flags, dry_run):
    assert translate(flags.split()).dry_run is dry_run


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--batch_size_per_gpus=20", "did you mean --batch_size_per_gpu?"),
        ("--batch-size=20", "did you mean --batch_size_per_gpu?"),
        ("--is_finetuning", "did you mean --is_finetune?"),
        ("--use_fast", "did you mean --use_fast_config?"),
        ("--learning_rate=1", "did you mean --training.learning_rate?"),
        ("--per_device_train_batch_size=1", "did you mean --training.per_device_train_batch_size?"),
        ("--epoch=1", "did you mean --epochs?"),
        ("--nobatch_size_per_gpu", "did you mean --batch_size_per_gpu?"),
        ("--qqq=1", "there are --use_large_config"),
        ("--=1", "there are --use_large_config"),
    ],
)
def test_an_unknown_flag_is_refused_with_a_suggestion(flag, suggestion):
    with pytest.raises(ConfigError, match="found an unknown flag") as caught:
        translate(["train", flag])
    assert str(caught.value).startswith(flag.partition("=")[0])
    assert suggestion in str(caught.value)


def test_the_value_of_an_unknown_flag_is_not_shown():
    with pytest.raises(ConfigError, match="hf_token") as caught:
        translate(["--hf_token=canary"])
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("value", ["yes", "no", "2", "TRUE", "", "None", "data.parquet"])
def test_only_true_and_false_are_booleans(value):
    with pytest.raises(ConfigError, match="expected True or False"):
        translate([f"--is_finetune={value}"])


@pytest.mark.parametrize("word", ["sft", "-x", "--", "train=1", ""])
def test_a_word_that_is_no_flag_is_refused(word):
    with pytest.raises(ConfigError, match="found no flag, expected --name=value"):
        translate(["train", "--is_finetune=True", word])


@pytest.mark.parametrize("flag", ["--batch_size_per_gpu", "--train_file", "--epochs"])
def test_a_flag_without_its_value_is_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag}: found no value, expected {flag}=VALUE"):
        translate([flag, "--is_finetune"])


@pytest.mark.parametrize("flag", ["--train_file=a\nb", "--is_finetune=\x1b[2J", "--x\ny=1", "a\nb"])
def test_messages_are_one_printable_line_whatever_was_typed(flag):
    with pytest.raises(ConfigError, match="found") as caught:
        request = translate([flag])
        load.load(request.recipe, request.overrides)
    assert str(caught.value).isprintable()
