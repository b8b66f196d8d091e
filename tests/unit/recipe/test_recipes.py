"""A recipe is read, overridden and checked; every mistake is told in one line by its place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launch.base.errors import ConfigError
from launch.recipe import load, strict_yaml, training_arguments, unread_keys
from launch.report import plan_lines
from launch.schema.plan import Change
from launch.schema.recipe import Recipe
from launch.schema.training_section import Optimizer
from tests import cost
from tests.builders import launch

MOST_CALLS = 11_000  # most take about 800; the YAML parser in Python takes ten times as many

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))

GOOD = """\
name: mine
task: sft
output_dir: model_save/mine
model:
  shape: t5-chatlm-0.2b
  freeze: [shared, encoder]
data: {train_file: data/train.parquet}
training:
  learning_rate: 1e-4
  bf16: true
"""
WITHOUT_GPU = """\
without_gpu:
  model: {shape: mini-chat}
  tokenizer: {split: character}
  training: {bf16: false, learning_rate: 1e-4}
"""


def with_line(line, under="training"):
    """The good recipe with one more line in a section; an empty name is the top level."""
    return GOOD + line + "\n" if not under else GOOD.replace(f"{under}:\n", f"{under}:\n  {line}\n")


@pytest.fixture
def write(tmp_path):
    def write(content, name="r.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def refusals(*words, **options):
    """The lines of an error, one for each mistake."""
    with pytest.raises(ConfigError) as caught:
        load.load(*words, **options)
    return str(caught.value).splitlines()


def refusal(file, overrides=(), has_gpu=True):
    """The one line that load() refuses this with."""
    with pytest.raises(ConfigError, match=r".") as caught:
        load.load(file, overrides, has_gpu)
    message = str(caught.value)
    assert message.isprintable(), "one line, without characters that hide"
    assert len(message) < 1500
    return message


# ---- recipes that are refused
# ---------------------------------------------------------------------------

BAD_RECIPES = {  # name -> (document, what the message must name)
    "empty": ("", r"r\.yaml:1: found nothing, expected the keys of a recipe: name, task"),
    "only a comment": ("# nothing\n", r":1: found nothing"),
    "only a start mark": ("---\n", r":1: found nothing"),
    "null": ("null\n", r":1: found nothing"),
    "empty mapping": ("{}\n", r":1: found nothing"),
    "a list": ("- name: x\n", r":1: found .*expected the keys"),
    "a word": ("name\n", r":1: found 'name', expected the keys"),
    "a number": ("12\n", r":1: found 12, expected the keys"),
    "a merge": (with_line("<<: {bf16: false}"), r":9: training\.<<: found an unknown key"),
    "nan as a word": (
        with_line("weight_decay: nan"),
        r":9: training\.weight_decay: found 'nan', expected a number",
    ),
    "an unknown section": (
        GOOD + "traning: {seed: 1}\n",
        r":11: traning: .*did you mean training\?",
    ),
    "an unknown key of the model": (
        with_line("shap: b", "model"),
        r":5: model\.shap: .*did you mean shape\?",
    ),
    "an unknown key of training": (
        with_line("lerning_rate: 1"),
        r":9: training\.lerning_rate: .*mean learning_rate\?",
    ),
    "another field misspelt": (
        with_line("adam_beta: 0.9"),
        r":9: training\.adam_beta: .*did you mean adam_beta[12]\?",
    ),
    "a key in no section": (
        GOOD + "learning_rate: 1\n",
        r":11: learning_rate: .*did you mean training\.learning_rate",
    ),
    "a key in another section": (
        with_line("seed: 1", "model"),
        r":5: model\.seed: .*did you mean training\.seed\?",
    ),
    "a key like no other": (
        with_line("qqq: 1", "model"),
        r":5: model\.qqq: .*python -m launch keys model lists the keys",
    ),
    "a missing section": (
        GOOD.replace("data:", "#"),
        r"r\.yaml: data: found nothing, expected a value",
    ),
    "a missing key": (
        GOOD.replace("train_file", "validation_file"),
        r"r\.yaml: data\.train_file: found nothing",
    ),
    "neither of two types": (
        GOOD + "lora: {target_modules: all_linear}\n",
        r":11: lora\.target_modules: found 'all_linear', expected a \[list\] or 'all-linear';"
        r" did you mean all-linear\?$",
    ),
    "a wrong type in a list": (
        GOOD + "lora: {target_modules: [3]}\n",
        r":11: lora\.target_modules\.0: found 3, expected text; put it in quotes$",
    ),
    "a section that is a number": (
        GOOD.replace("data: ", "data: 3 #"),
        r":7: data: found 3, expected a section",
    ),
    "a section that is empty": (
        GOOD.replace("data: ", "data: #"),
        r":7: data: found null, expected a section",
    ),
    "a section that is a list": (GOOD + "lora: [r, 8]\n", r":11: lora: found .*expected a section"),
    "text for a list": (
        GOOD + "lora: {target_modules: q_proj}\n",
        r":11: lora\.target_modules: found 'q_proj', expected a \[list\] .*; write \[q_proj\]$",
    ),
    "a number in a list": (
        GOOD.replace("[shared, ", "[3, "),
        r":6: model\.freeze\.0: found 3, expected text",
    ),
    "a list for text": (
        GOOD.replace("model_save/mine", "[a]"),
        r":3: output_dir: found \[\"a\"\], expected text",
    ),
    "yes for true": (
        GOOD.replace("bf16: true", "bf16: yes"),
        r":10: training\.bf16: found 'yes'.*write true or false",
    ),
    "1 for true": (
        GOOD.replace("bf16: true", "bf16: 1"),
        r":10: training\.bf16: found 1, expected true or false",
    ),
    "a quoted float": (
        GOOD.replace("1e-4", '"1e-4"'),
        r":9: training\.learning_rate: found '1e-4'.*drop the quotes",
    ),
    "a quoted whole number": (
        with_line('seed: "3"'),
        r":9: training\.seed: found '3', .*drop the quotes",
    ),
    "a float for a whole number": (
        with_line("save_steps: 16.0"),
        r":9: training\.save_steps: found 16\.0.*write 16$",
    ),
    "no share of the rows": (
        GOOD.replace("parquet}", "parquet, validation_size: 1.0}"),
        r":7: data\.validation_size: found 1\.0, expected a number of rows \(100\) or a share",
    ),
    "a number of rows as a float": (
        GOOD.replace("parquet}", "parquet, validation_size: 100.0}"),
        r":7: data\.validation_size: found 100\.0, .*; write 100$",
    ),
    "true for a number of rows": (
        GOOD.replace("parquet}", "parquet, validation_size: true}"),
        r":7: data\.validation_size: found true, expected a number of rows",
    ),
    "true for a whole number": (
        with_line("save_steps: true"),
        r":9: training\.save_steps: found true, expected a whole",
    ),
    "underscores in a number": (
        with_line("save_steps: 1_000"),
        r":9: training\.save_steps: found '1_000'",
    ),
    "a time of day": (
        with_line("save_steps: 12:30:00"),
        r":9: training\.save_steps: found '12:30:00'",
    ),
    "full-width digits": (with_line("save_steps: １６"), r":9: training\.save_steps: found '１６'"),
    "a number for text": (
        GOOD.replace("data/train.parquet", "2024"),
        r":7: data\.train_file: .*put it in quotes",
    ),
    "not one of the choices": (
        GOOD.replace("sft", "dpo", 1),
        r":2: task: found 'dpo', expected 'sft' or 'pretrain'",
    ),
    "a hostile name": (GOOD.replace("name: mine", "name: ../mine"), r":1: name: found '\.\./mine'"),
    "an output folder above": (
        GOOD.replace("model_save/mine", "a/../../b"),
        r":3: output_dir: .*without \.\.",
    ),
    "an empty output folder": (GOOD.replace("model_save/mine", '""'), r":3: output_dir: found ''"),
    "a folder of 256 bytes": (
        GOOD.replace("model_save/mine", "x" * 256),
        r":3: output_dir: .*255 bytes",
    ),
    "two models": (
        with_line("path: models/a", "model"),
        r":4: model: give exactly one of model\.shape",
    ),
    "two precisions": (
        with_line("fp16: true"),
        r":11 and .*:9: training: bf16 and fp16 are both true",
    ),
    "without_gpu that is a word": (GOOD + "without_gpu: true\n", r":11: without_gpu: found true"),
    "without_gpu with an unknown key": (
        GOOD + "without_gpu:\n  model: {shap: a}\n",
        r":12: model\.shap: .*shape\?",
    ),
    "without_gpu with a wrong type": (
        GOOD + "without_gpu:\n  training: {seed: x}\n",
        r":12: training\.seed: found 'x'",
    ),
    "without_gpu with a field of ours": (
        GOOD + "without_gpu:\n  training: {fsdp: full}\n",
        r":12: training\.fsdp",
    ),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_a_bad_recipe_is_refused_at_once_in_one_line_that_names_key_or_line(name, write):
    document, expected = BAD_RECIPES[name]
    file = write(document)
    refusal(file)  # names of keys are read once a process; the last test of this file counts it
    messages: list[str] = []
    calls = cost.count_calls(lambda: messages.append(refusal(file)))
    assert re.search(expected, messages[0]), messages[0]
    assert file in messages[0]
    assert calls < MOST_CALLS


def test_every_problem_gets_its_own_line(write):
    file = write(with_line("save_steps: 0\n  seed: x\n  adam_beta1: true"))
    with pytest.raises(ConfigError, match=r"save_steps.*\n.*seed.*\n.*adam_beta1") as caught:
        load.load(file)
    assert all(line.startswith(f"{file}:") for line in str(caught.value).splitlines())


def test_a_file_of_many_mistakes_does_not_flood_the_screen(write):
    with pytest.raises(ConfigError, match="and 45 more") as caught:
        load.load(write(GOOD + "".join(f"key{i}: 1\n" for i in range(50))))
    assert len(str(caught.value).splitlines()) == load.MAX_PROBLEMS + 1


@pytest.mark.parametrize(
    "name", ["no/such.yaml", "such.yaml", ".", "./", "..", "x/" + "y" * 300, "a/\nb.yaml", "a/\0b"]
)
def test_a_file_that_cannot_be_read_is_refused(name):
    assert "found" in refusal(name)


def test_a_folder_is_no_recipe(tmp_path):
    assert "no such file" in refusal(f"{tmp_path}/")


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    message = refusal("sft_fst")
    assert "did you mean sft_fast?" in message
    assert all(name in message for name in NAMES)


# ---- numbers
# ---------------------------------------------------------------------------

BAD_NUMBERS = [
    *[
        ("training.per_device_train_batch_size", text)
        for text in ("0", "-1", "abc", "1e9", "1.5", "true", "", "65537")
    ],
    ("training.per_device_train_batch_size", '"16"'),
    ("training.per_device_train_batch_size", "１６"),
    ("training.per_device_train_batch_size", "9" * 400),
    *[("training.gradient_accumulation_steps", text) for text in ("0", "-1", "2.0", "65537")],
    *[("training.save_steps", text) for text in ("0", "-5", "0.5", "1e3")],
    *[("training.save_total_limit", text) for text in ("0", "-3")],
    *[
        ("training.learning_rate", text)
        for text in ("nan", ".nan", ".inf", "-1", "0", "abc", "true", '"1e-4"', "11")
    ],
    *[("training.num_train_epochs", text) for text in ("0", "-1", "inf", "1e999")],
    *[("training.seed", text) for text in ("-1", "4294967296", "1.5")],
    *[("data.max_length", text) for text in ("0", "7", "1048577", "abc")],
    *[("lora.r", text) for text in ("0", "-8", "8.0")],
    *[("launch.num_processes", text) for text in ("0", "1025")],
]


@pytest.mark.parametrize(("key", "text"), BAD_NUMBERS)
def test_a_bad_number_is_refused_by_its_key(key, text):
    override = f"--{key}={text}"
    message = refusal("sft_fast", [override])
    assert message.startswith(override[:50])
    assert message.count(f"{key}=") == 1 and f"{key}: " not in message, "the key twice"
    assert ": found " in message
    assert ", expected " in message


def test_max_steps_of_zero_is_refused():
    refused = refusal("sft_fast", ["training.max_steps=0"])
    assert refused.startswith("training.max_steps=0: 0 trains nothing")


def test_a_whole_number_is_a_good_float():
    assert load.load("sft", ["--training.num_train_epochs=3"])[0].training.num_train_epochs == 3.0


@pytest.mark.parametrize(("text", "batch"), [("1", 1), ("16", 16), ("65536", 65536)])
def test_a_batch_for_the_wrappers_is_read(text, batch):
    assert load.check_batch(text) == batch


BAD_BATCHES = [
    "0",
    "-1",
    "abc",
    "1e9",
    "1.5",
    "true",
    "",
    "65537",
    "１６",
    " 16",
    "16\n",
    "+16",
    "016",
    "0x10",
    "9" * 400,
]


@pytest.mark.parametrize("text", BAD_BATCHES)
def test_a_bad_batch_for_the_wrappers_is_refused_in_one_line(text):
    with pytest.raises(
        ConfigError, match=r"\Abatch size '.*' is not a whole number from 1 to 65536\Z"
    ):
        load.check_batch(text)


# ---- overrides
# ---------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(write):
    overrides = ["training.seed=1", "--training.seed=2", "--data.max-length=64", "name=other"]
    recipe, changes = load.load(write(GOOD), overrides)
    assert (recipe.training.seed, recipe.data.max_length, recipe.name) == (2, 64, "other")
    assert recipe.training.learning_rate == 1e-4
    assert changes == ()


def test_an_override_may_be_a_list_or_null(write):
    file = write(GOOD + "lora: {target_modules: [q]}\n")
    recipe, _ = load.load(file, ["model.freeze=[a, 'b c']", "lora.target_modules=[q_proj,v_proj]"])
    assert recipe.model.freeze == ("a", "b c")
    assert recipe.lora is not None
    assert recipe.lora.target_modules == ("q_proj", "v_proj")
    assert load.load(file, ["lora=null"])[0].lora is None
    assert load.load(file, ["--lora=", "--lora.r=4"])[0].lora.r == 4


def test_an_override_creates_the_lora_section(write):
    recipe, _ = load.load(write(GOOD + "lora: null\n"), ["--lora.r=8"])
    assert recipe.lora is not None
    assert recipe.lora.r == 8


@pytest.mark.parametrize(
    "path",
    ["a b #c.parquet", "it's: x", "*.parquet", "&x", "!x", "%d", "@x", "-x", "- x", "a=b", "~/x"],
)
def test_a_path_needs_no_yaml_quotes_in_an_override(path):
    assert load.load("sft", [f"--data.train_file={path}"])[0].data.train_file == path


@pytest.mark.parametrize(
    "path", ["a\nb", "a\tb", "a\0b", "\x1b[2J", "a\x85b", "a\u2028b", "\udcff", '"a\\nb"']
)
@pytest.mark.parametrize("key", ["data.train_file", "model.shape", "model.path", "output_dir"])
def test_a_name_or_path_with_a_control_character_is_refused(key, path):
    message = refusal("sft", [f"{key}={path}"])
    assert message.startswith(f"{key}=") and ": found the control character" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.seed", "found no '=', expected --section.key=value"),
        ("--training.seed", "found no '=', expected --section.key=value"),
        ("", "found no '='"),
        ("=3", "found the key ''"),
        ("--=3", "found the key ''"),
        ("-training.seed=3", "found the key '-training.seed'"),
        ("training.=3", "found the key 'training.'"),
        (".seed=3", "found the key '.seed'"),
        ("a.b.c=3", "found the key 'a.b.c'"),
        ("training.se ed=3", "found the key 'training.se ed'"),
        ("training.ｓeed=3", "found the key"),
        ("traning.seed=3", "did you mean training?"),
        ("training.sed=3", "did you mean seed?"),
        ("learning-rate=3", "did you mean training.learning_rate?"),
        ("training=3", "training=3: found 3, expected a section"),
        ("model.freeze=[a", "model.freeze=[a: found broken YAML"),
        ("model.freeze=[a] b", "found broken YAML"),
        ("model.freeze=" + "[" * 50, "more than 20 levels"),
        ("model.freeze=[*a]", "found an anchor or alias"),
        ("lora={r: 8}", "lora={r: 8}: found a mapping"),
        ("model.freeze=[1]", "model.freeze=[1]: model.freeze.0: found 1, expected text"),
        ("training.fp16=true", "and training.fp16=true: training: bf16 and fp16 are both true"),
    ],
)
def test_a_bad_override_is_refused_with_its_own_text(override, expected):
    assert expected in refusal("sft", [override])


@pytest.mark.parametrize("key", ["hub_token", "hub-token"])
def test_a_secret_in_an_override_is_never_shown(key):
    assert "canary" not in refusal("sft", [f"--training.{key}=hf_canary"])


# ---- the model, and machines without a GPU
# ---------------------------------------------------------------------------


def test_another_model_leaves_nothing_of_the_first_ones_source_and_frozen_modules(write):
    recipe, changes = load.load(write(GOOD), ["--model.path=models/qwen"])
    assert (recipe.model.path, recipe.model.shape, recipe.model.freeze) == ("models/qwen", None, ())
    assert [(c.key, c.requested, c.effective) for c in changes] == [
        ("model.freeze", '["shared", "encoder"]', "[]")
    ]
    assert "you replaced" in changes[0].reason


def test_a_shape_replaces_a_path(write):
    file = write(GOOD.replace("shape: t5-chatlm-0.2b", "path: models/t5"))
    recipe, _ = load.load(file, ["model.shape=gpt2-tiny"])
    assert (recipe.model.path, recipe.model.shape, recipe.model.freeze) == (None, "gpt2-tiny", ())


def test_frozen_modules_stay_when_they_are_given_or_the_model_is_the_same(write):
    recipe, changes = load.load(write(GOOD), ["model.shape=t5-tiny", "model.freeze=[shared]"])
    assert (recipe.model.freeze, changes) == (("shared",), ())
    recipe, changes = load.load(write(GOOD), ["model.shape=t5-chatlm-0.2b"])
    assert (recipe.model.freeze, changes) == (("shared", "encoder"), ())


def test_two_models_on_one_command_line_are_refused():
    assert "give exactly one of" in refusal("sft", ["model.shape=gpt2-tiny", "model.path=x"])


def test_without_a_gpu_the_small_default_is_used_and_each_replaced_value_is_told(write):
    recipe, changes = load.load(write(GOOD + WITHOUT_GPU), has_gpu=False)
    assert (recipe.model.shape, recipe.model.freeze, recipe.training.bf16) == (
        "mini-chat",
        (),
        False,
    )
    assert set(changes) == {
        Change("model.shape", "t5-chatlm-0.2b", "mini-chat", load.NO_GPU),
        Change("model.freeze", '["shared", "encoder"]', "[]", load.NO_GPU),
        Change("tokenizer.split", "word", "character", load.NO_GPU),
        Change("training.bf16", "true", "false", load.NO_GPU),
    }


def test_with_a_gpu_the_small_default_changes_nothing(write):
    assert load.load(write(GOOD + WITHOUT_GPU)) == load.load(write(GOOD, "plain.yaml"))


@pytest.mark.parametrize(
    "override", ["model.shape=t5-tiny", "--model.path=x", "--model.freeze=[shared]"]
)
def test_a_model_named_by_the_user_is_kept_without_a_gpu(override, write):
    recipe, changes = load.load(write(GOOD + WITHOUT_GPU), [override], has_gpu=False)
    assert recipe.model.shape != "mini-chat"
    assert recipe.training.bf16
    assert all(change.reason != load.NO_GPU for change in changes)


def test_the_users_values_win_over_the_small_default_and_naming_data_names_no_model(write):
    overrides = ["tokenizer.split=word", "data.train_file=b.jsonl", "training.bf16=true"]
    recipe, changes = load.load(write(GOOD + WITHOUT_GPU), overrides, has_gpu=False)
    assert (recipe.model.shape, recipe.tokenizer.split, recipe.training.bf16) == (
        "mini-chat",
        "word",
        True,
    )
    assert {change.key for change in changes} == {"model.shape", "model.freeze"}


# ---- fields of TrainingArguments
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    ["adam_beta2=0.98", "adam_beta1=1", "full_determinism=true", "tf32=null", "run_name=third"],
)
def test_a_field_of_the_installed_training_arguments_is_kept(override):
    key, _, text = override.partition("=")
    recipe, _ = load.load("sft", [f"training.{override}"])
    assert recipe.training.extras == {key: yaml.safe_load(text)}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("adam_beta1=true", "found true, expected a number"),
        ("adam_beta1='0.9'", "found '0.9', expected a number; drop the quotes"),
        ("adam_beta1=null", "found null, expected a number"),
        ("torch_compile=1", "found 1, expected true or false"),
        ("torch_compile=yes", "write true or false"),
        ("ddp_bucket_cap_mb=1.5", "found 1.5, expected a whole number"),
        ("ddp_bucket_cap_mb=true", "found true, expected a whole number"),
        ("run_name=3", "found 3, expected text"),
        ("ddp_static_graph=x", "found 'x', expected true or false"),
        ("label_smoothing_factor=1.5", "found 1.5, expected less than 1"),
        ("torch_compil=true", "did you mean torch_compile?"),
        ("evaluation_strategy=steps", "held-out rows are evaluated every eval_steps"),
    ],
)
def test_a_wrong_field_of_training_arguments_is_refused(override, expected):
    assert expected in refusal("sft", [f"training.{override}"])


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("' '", "found ' ', expected the text of a token, e.g. '<|im_end|>'"),
        ("''", "found '', expected the text of a token, e.g. '<|im_end|>'"),
        ("3", "found 3, expected text; put it in quotes"),
        ("a" * 65, f"found '{'a' * 65}', expected at most 64 characters"),
    ],
)
def test_a_token_that_is_no_text_is_refused(token, message):
    said = refusal("sft", [f"tokenizer.add_tokens=[ok, {token}]"])
    assert said.endswith(f": tokenizer.add_tokens.1: {message}")


@pytest.mark.parametrize(
    "key", [*training_arguments.OWNED, "hub_token", "hub_model_id", "hub_anything"]
)
def test_a_field_without_an_effect_is_refused_with_its_line_and_the_reason(key, write):
    message = refusal(write(with_line(f"{key}: x")))
    assert (
        f":9: training.{key}: found a field that has no effect here, expected it left out; "
        in message
    )


def test_checkpoints_in_steps_may_be_asked_for():
    assert load.load("sft", ["training.save_strategy=steps"])[0].training.extras == {
        "save_strategy": "steps"
    }


UNREAD = {
    "data.max_validation_samples": {"data": {"max_validation_samples": 5}},
    "launch.vram_fraction": {"launch": {"mode": "cpu", "vram_fraction": 0.5}},
    "launch.join_timeout_s": {"launch": {"join_timeout_s": 5}},
    "tokenizer.loading": {"tokenizer": {"loading": "file"}},
    "training.adam_beta1": {"training": {"optim": "adafactor", "adam_beta1": 0.5}},
    "training.adam_epsilon": {"training": {"optim": "lion_8bit", "adam_epsilon": 0.1}},
    "training.dataloader_prefetch_factor": {
        "training": {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 3}
    },
    "training.eval_on_start": {"training": {"eval_on_start": True}},
    "training.liger_kernel_config": {"training": {"liger_kernel_config": {"rope": False}}},
    "training.lr_scheduler_kwargs": {
        "training": {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"power": 2}}
    },
    "training.optim_args": {"training": {"optim": "sgd", "optim_args": "momentun=0.9"}},
    "training.project": {"training": {"report_to": ["wandb"], "project": "ours"}},
    "training.run_name": {"training": {"run_name": "third"}},
    "training.warmup_steps": {"training": {"lr_scheduler_type": "constant", "warmup_steps": 9}},
}


@pytest.mark.parametrize("key", UNREAD)
def test_a_key_that_nothing_reads_beside_the_others_is_said(key, write):
    content = yaml.safe_load(GOOD)
    for section, values in UNREAD[key].items():
        content[section] = {**content.get(section, {}), **values}
    _, changes = load.load(write(yaml.safe_dump(content)))
    assert [change.key for change in changes] == [key]


def test_keys_that_are_read_beside_the_others_are_not_said(write):
    overrides = [
        "data.validation_size=9",
        *("training.eval_on_start=true", "data.max_validation_samples=5"),
        *("training.optim=sgd", "training.optim_args='momentum=0.9, nesterov=true'"),
        *("training.lr_scheduler_type=polynomial", "training.lr_scheduler_kwargs={power: 2}"),
        *("training.report_to=[trackio]", "training.project=ours", "training.run_name=third"),
        *("training.warmup_steps=9", "launch.vram_fraction=0.5"),
    ]
    assert load.load(write(GOOD), overrides)[1] == ()


# ---- the recipes of the house
# ---------------------------------------------------------------------------


def test_the_five_recipes_of_the_guides_are_there():
    assert {"sft_small", "sft_fast", "sft", "pretrain", "pretrain_large"} <= set(NAMES)


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads(name, has_gpu):
    recipe, changes = load.load(name, has_gpu=has_gpu)
    assert recipe.name == name
    assert bool(changes) <= (not has_gpu)


@pytest.mark.parametrize(
    (
        "name",
        "epochs",
        "batch",
        "accumulation",
        "rate",
        "warmup",
        "log",
        "save",
        "length",
        "workers",
    ),
    [
        ("sft_small", 3, 1, 8, 5e-5, 100, 50, 312, 512, 0),
        ("sft_fast", 3, 16, 2, 5e-5, 100, 15, 78, 512, None),
        ("sft", 20, 20, 6, 5e-5, 200, 20, 83, 256, None),
        ("pretrain", 6, 32, 2, 1.5e-4, 1024, 100, 500, 192, None),
        ("pretrain_large", 6, 32, 2, 1.5e-4, 1024, 100, 5000, 192, None),
    ],
)
def test_the_guides_numbers(
    name, epochs, batch, accumulation, rate, warmup, log, save, length, workers
):
    recipe = load.load(name)[0]
    t = recipe.training
    assert (t.num_train_epochs, t.per_device_train_batch_size, t.gradient_accumulation_steps) == (
        epochs,
        batch,
        accumulation,
    )
    assert (t.learning_rate, t.warmup_steps, t.logging_steps, t.save_steps) == (
        rate,
        warmup,
        log,
        save,
    )
    assert (recipe.data.max_length, t.dataloader_num_workers) == (length, workers)
    assert (t.bf16, t.seed, t.max_grad_norm, t.save_total_limit) == (True, 23333, 1.0, 3)
    assert recipe.model.shape == "t5-chatlm-0.2b"
    assert recipe.model.freeze == (("shared", "encoder") if name.startswith("sft") else ())
    assert recipe.output_dir == f"model_save/{name}"


# ---- dump
# ---------------------------------------------------------------------------

AMBIGUOUS = [
    "1e-4",
    "no",
    "null",
    "~",
    "0o17",
    "017",
    "12:30:00",
    ".inf",
    "a: b",
    "a #b",
    "- a",
    "{",
    "[",
    "'",
    '"',
    "*a",
]
texts = st.sampled_from(AMBIGUOUS) | st.text(min_size=1).filter(
    lambda text: not strict_yaml.CONTROL.search(text)
)
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
words = st.lists(texts, max_size=3).map(tuple)
small = st.floats(0, 1, exclude_min=True, allow_nan=False)
counts = st.integers(1, 65_536)
extras = st.fixed_dictionaries(
    {},
    optional={
        "adam_beta2": small,
        "run_name": texts,
        "torch_compile": st.booleans(),
        "ddp_bucket_cap_mb": st.none() | st.integers(-(10**20), 10**20),
        "lr_scheduler_kwargs": st.none() | st.dictionaries(texts, small, max_size=2),
    },
)
whole_recipes = st.builds(
    lambda model, training, extra, **rest: Recipe.model_validate(
        {**rest, "model": model, "training": {**training, **extra}}
    ),
    name=names,
    task=st.sampled_from(["sft", "pretrain"]),
    model=st.fixed_dictionaries({"freeze": words, "shape": texts})
    | st.fixed_dictionaries({"freeze": words, "path": texts}),
    tokenizer=st.fixed_dictionaries({"path": st.none() | texts, "vocab_size": st.none() | counts}),
    lora=st.none() | st.fixed_dictionaries({"r": counts, "target_modules": st.none() | words}),
    data=st.fixed_dictionaries({"train_file": texts, "prompt_column": st.none() | texts}),
    training=st.fixed_dictionaries(
        {
            "learning_rate": small,
            "warmup_steps": small,
            "per_device_train_batch_size": counts,
            "bf16": st.booleans(),
        }
    ),
    extra=extras,
    launch=st.fixed_dictionaries({"vram_fraction": small, "host_reserve_gib": st.floats(0, 1e6)}),
    output_dir=names,
)


@given(recipe=whole_recipes)
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_dumped_recipe_is_read_back_equal(recipe, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(load.dump(recipe), encoding="utf-8")
    assert load.load(str(file))[0] == recipe


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_of_the_house_survives_a_dump(name, write):
    recipe = load.load(name, has_gpu=False)[0]
    assert load.load(write(load.dump(recipe)))[0] == recipe


@given(
    text=st.text(max_size=60),
    key=st.sampled_from(["training.seed", "model.freeze", "data.train_file", "lora", "name"]),
)
@settings(deadline=None)
def test_no_override_raises_anything_but_one_line(text, key):
    try:
        load.load("sft", [f"{key}={text}"])
    except ConfigError as error:
        assert "\n" not in str(error)


# ---- cost
# ---------------------------------------------------------------------------


def test_reading_a_recipe_with_extra_fields_opens_three_files_and_imports_no_torch():
    """The recipe, the stored token that no message may show, the source of TrainingArguments."""
    code = """
import sys, launch.recipe.load as load
opened, calls = [], 0
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
def count(frame, event, arg):
    global calls
    calls += event == "call"
sys.setprofile(count)
load.load("sft", ["training.adam_beta2=0.98"], False)
sys.setprofile(None)
heavy = {"torch", "transformers", "numpy", "accelerate", "training"} & set(sys.modules)
print(len(opened), calls, *heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files, calls, *heavy = done.stdout.split()
    assert (int(files), heavy) == (3, [])
    assert int(calls) < 8000  # 3,919 in November 2026


def test_extra_fields_are_refused_where_transformers_is_not_installed(write):
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] +"
        " sys.argv[1:2];import launch.recipe.load as r; r.load('sft');r.load('sft',"
        " ['training.adam_beta2=0.98'])"
    )
    site = Path(write("", "site")).with_name("site-packages-without-transformers")
    site.mkdir()
    for package in (
        "yaml",
        "_yaml",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
    ):
        (site / package).symlink_to(Path(yaml.__file__).parent.with_name(package))
    module = Path(yaml.__file__).parent.with_name("typing_extensions.py")
    (site / module.name).symlink_to(module)
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "training.adam_beta2=...: found an extra field, expected an installed transformers"
        in done.stderr
    )


def test_a_recipe_built_by_hand_is_held_to_the_same_schema():
    with pytest.raises(ValidationError, match="extra"):
        Recipe.model_validate({"name": "a", "extra": 1})


def test_held_out_rows_of_other_data_are_left_out_and_it_is_said_of_a_users_own_file(write):
    own = write(GOOD.replace("train.parquet", "train.parquet, validation_file: held.parquet"))
    recipe, changes = load.load(own, ["--data.train_file=mine.jsonl"])
    assert recipe.data.validation_file is None
    assert [(change.key, change.effective) for change in changes] == [
        ("data.validation_file", "null")
    ]
    recipe, changes = load.load(
        "sft_fast", ["--data.train_file=mine.jsonl", "--data.validation_file=held.jsonl"]
    )
    assert recipe.data.validation_file == "held.jsonl"
    assert not changes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        ["--model.path=/models/mine"],
        ["--data.train_file=mine.jsonl"],
        ["--data.train_file=mine.jsonl", "--model.shape=gpt2-tiny", "--data.packing=true"],
        ["--tokenizer.path=/models/mine"],
        ["--training.lr_scheduler_type=constant"],
    ],
)
def test_keys_of_a_shipped_recipe_that_the_users_words_leave_without_use_are_no_changes(
    name, has_gpu, words, write
):
    recipe, changes = load.load(name, words, has_gpu)
    assert {change.reason for change in changes} <= {load.NO_GPU}
    named = {change.key: change.effective for change in changes}
    assert not {word[2:].partition("=")[0] for word in words} & set(named)
    unread = {f"{section}.{key}" for section, key, _ in unread_keys.of_recipe(recipe)}
    assert not unread & set(named)
    assert not (recipe.tokenizer.path and {"tokenizer.vocab_size", "tokenizer.split"} & set(named))
    assert "data.validation_file" not in named
    assert named.get("model.freeze", "[]") == "[]"


def test_a_key_that_the_user_wrote_and_nothing_reads_is_said_beside_a_shipped_recipe():
    typed = ["--data.train_file=mine.jsonl", "--evaluation.exact_match_rows=9"]
    _, changes = load.load("sft_fast", typed)
    assert [(change.key, change.requested) for change in changes] == [
        ("evaluation.exact_match_rows", "9")
    ]
    assert load.is_written("sft", ["--tokenizer.vocab_size=300"], "tokenizer.vocab_size")
    assert not load.is_written("sft", ["--tokenizer.split=word"], "tokenizer.vocab_size")
    assert load.is_written("my/recipe.yaml", [], "tokenizer.vocab_size")


def test_packing_that_was_asked_for_takes_the_place_of_a_recipes_cut_by_tokens():
    file = str(load.find("single_gpu_optimized"))
    recipe, changes = load.load(file, ["--data.packing=true"])
    assert recipe.data.packing
    assert not recipe.data.batch_by_tokens
    said = [(change.key, change.requested, change.effective, change.reason) for change in changes]
    assert said == [
        ("data.batch_by_tokens", "true", "null", "data.packing leaves nothing for it to do")
    ]
    recipe, changes = load.load("single_gpu_optimized", ["--data.packing=false"])
    assert recipe.data.batch_by_tokens
    assert not changes
    with pytest.raises(ConfigError, match="packing leaves nothing for batch_by_tokens to do"):
        load.load("single_gpu_optimized", ["--data.packing=true", "--data.batch_by_tokens=true"])


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (
            ["--training.fp16=true"],
            r"sft_fast\.yaml:\d+ and --training\.fp16=true: bf16 and fp16",
        ),
        (
            ["--quantization.load_in_4bit=true"],
            r"^--quantization\.load_in_4bit=true: 4-bit weights cannot be trained",
        ),
        (
            ["--data.packing=true", "--data.group_by_length=true", "--data.train_file=a.jsonl"],
            (
                r"^--data\.packing=true and --data\.group_by_length=true: packing leaves"
                r" nothing for group_by_length"
            ),
        ),
        (
            ["--data.train_file=a", "--training.load_best_model_at_end=true"],
            r"^--training\.load_best_model_at_end=true: ",
        ),
        (
            ["--data.train_file=a", "--task=pretrain", "--data.truncation_side=left"],
            r"^--data\.truncation_side=left: left is for task: sft",
        ),
    ],
)
def test_a_mistake_between_keys_names_the_places_of_both(words, places):
    with pytest.raises(ConfigError, match=places):
        load.load("sft_fast", words)


def test_a_mistake_between_keys_of_a_file_named_like_the_section_names_the_section(write):
    file = write(with_line("fp16: true"), "training.yaml")
    assert refusal(file) == (
        f"{file}:11 and {file}:9: training: bf16 and fp16 are both true; choose one"
    )


def test_all_that_is_wrong_between_keys_is_told_at_once(write):
    keys = "{train_file: a, packing: true, group_by_length: true, batch_by_tokens: true}"
    good = GOOD.replace("{train_file: data/train.parquet}", keys)
    lines = refusals(write(good + "launch: {machine_rank: 3}\n"))
    assert [re.sub(r"^.*: (data|launch): ", "", line) for line in lines] == [
        "packing leaves nothing for group_by_length to do; set one of the two to false",
        "packing leaves nothing for batch_by_tokens to do; set one of the two to false",
        "machine_rank: only for several machines; set launch.nodes too",
    ]


def test_a_key_that_is_missing_because_its_data_was_replaced_is_said_to_be_left_out(write):
    keys = "{train_file: a, validation_file: held_out}"
    good = with_line("early_stopping_patience: 3")
    file = write(good.replace("{train_file: data/train.parquet}", keys))
    needs, left_out = refusals(file, ["--data.train_file=b"])
    assert "training.early_stopping_patience 3 needs data.validation_file" in needs
    assert left_out == (
        "data.validation_file: held_out is left out; these are held-out rows of the recipe's own"
        " data, which you replaced"
    )


def test_all_overrides_that_cannot_be_read_are_told_at_once():
    lines = refusals("sft", ["training.seed", "model.freeze=[a", "a.b.c=3"])
    assert [line.partition(": found")[0] for line in lines] == [
        "override training.seed",
        "model.freeze=[a",
        "override --a.b.c=...",
    ]


def test_mistakes_of_the_file_and_of_its_part_without_a_gpu_are_told_at_once(write):
    file = write(with_line("seed: x") + WITHOUT_GPU.replace("mini-chat", "3"))
    lines = refusals(file, has_gpu=False)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
        "model.shape: found 3",
        "training.seed: found 'x'",
    ]


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("training.optim=adamm", "adamw_torch"),
        ("training.optim=adamw_hf", "adamw_torch"),
        ("training.optim=adamw_torch_fusd", "adamw_torch_fused"),
        ("training.lr_scheduler_type=cosin", "cosine"),
        ("launch.mode=deepspeed", "deepspeed_zero1"),
        ("data.text_rows=Line", "lines"),
        ("training.report_to=tensorbord", "tensorboard"),
        ("allow=optimiser", "optimizer"),
        ("training.log_level=inf", "info"),
        ("training.logging_strategy=step", "steps"),
        ("training.torch_compile_mode=max_autotune", "max-autotune"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_nearest(override, near):
    assert refusal("sft", [override]).endswith(f"; did you mean {near}?")


def test_an_optimizer_whose_states_are_not_known_is_refused_with_those_that_are():
    refused = refusal("sft", ["training.optim=galore_adamw"])
    assert all(f"'{name}'" in refused for name in get_args(Optimizer))


def test_all_flags_that_are_no_keys_are_told_at_once(tmp_path):
    words = ("--lerning-rate=1", "-training.seed=3", "--bathc_size=3")
    lines = launch(tmp_path, "plan", "sft", *words).stderr.splitlines()
    assert [line.partition("; ")[2] for line in lines] == [
        "write --training.learning_rate=1",
        "write --training.seed=3",
        "write --training.per_device_train_batch_size=3",
    ]


def test_evaluation_that_was_asked_for_without_held_out_rows_is_said_to_have_no_effect():
    words = [
        "--data.train_file=mine.jsonl",
        "--evaluation.exact_match_rows=5",
        "--training.eval_steps=2",
    ]
    changes = [
        change
        for change in load.load("sft_fast", words)[1]
        if "held out to evaluate" in change.reason
    ]
    assert [(change.key, change.requested, change.effective) for change in changes] == [
        ("evaluation.exact_match_rows", "5", "0"),
        ("training.eval_steps", "2", "null"),
    ]
    assert len(load.load("sft_fast", [*words, "--data.validation_file=held.jsonl"])[1]) == 0


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_a_schedule_without_the_numbers_that_it_needs_is_refused(write, name):
    with pytest.raises(ConfigError, match=rf"lr_scheduler_type {name} needs .*lr_scheduler_kwargs"):
        load.load("sft_fast", [f"--training.lr_scheduler_type={name}"])
    key = {"cosine_with_min_lr": "min_lr_rate: 0.1", "warmup_stable_decay": "num_decay_steps: 5"}[
        name
    ]
    file = write(with_line(f"lr_scheduler_type: {name}\n  lr_scheduler_kwargs: {{{key}}}"))
    assert load.load(file)[0].training.lr_scheduler_type == name


def test_4_bit_weights_want_lora_and_false_is_off(write):
    file = write(
        GOOD + "lora: {r: 4}\nquantization: {load_in_4bit: true, bnb_4bit_quant_type: fp4}\n"
    )
    section = load.load(file)[0].quantization
    assert section is not None
    assert (section.bnb_4bit_quant_type, section.bnb_4bit_use_double_quant) == ("fp4", True)
    assert load.load(file, ["--quantization.load_in_4bit=false"])[0].quantization is None
    with pytest.raises(
        ConfigError,
        match=r"quantization: 4-bit weights cannot be trained; add LoRA .*, or take a model in 16",
    ):
        load.load(file, ["lora=null"])
    with pytest.raises(ConfigError, match=r"load_in_4bits.*did you mean load_in_4bit\?"):
        load.load(file, ["--quantization.load_in_4bits=true"])
    with pytest.raises(ConfigError, match=r"bnb_4bit_quant_type=int4: found 'int4'"):
        load.load(file, ["--quantization.bnb_4bit_quant_type=int4"])
    with pytest.raises(ConfigError, match=r"lora\.r") as caught:
        load.load(file, ["--lora.r=0"])
    assert "quantization" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"quantization\.load_in_4bit: found nothing"):
        load.load(write(GOOD + "lora: {r: 4}\nquantization: {bnb_4bit_quant_type: nf4}\n"))


@pytest.mark.parametrize("old", sorted(training_arguments.RENAMED))
def test_the_old_name_of_a_renamed_key_is_taken_and_said(write, old):
    new, value = (
        training_arguments.RENAMED[old],
        {"gradient_checkpointing": "true"}.get(old, "null"),
    )
    line = f"training.{old} is now training.{new}"
    in_file = load.load(write(with_line(f"{old}: {value}")))
    as_override = load.load(write(GOOD), [f"--training.{old}={value}"])
    expected, no_changes = load.load(write(with_line(f"{new}: {value}")))
    assert no_changes == ()
    for recipe, changes in (in_file, as_override):
        assert recipe == expected
        assert [change.reason for change in changes] == [line]
        assert [text.strip() for text in plan_lines.lines(plan_lines.change_facts(changes))] == [
            f"changed    {line}"
        ]


@pytest.mark.parametrize(
    ("kwargs", "is_on"),
    [
        ("{every_n_layers: 2}", True),
        ("{offload: true}", True),
        ("{every_n_layers: null, use_reentrant: true}", False),
        ("null", False),
    ],
)
def test_keywords_that_name_layers_or_a_place_turn_checkpointing_on(write, kwargs, is_on):
    in_file, _ = load.load(write(with_line(f"activation_checkpointing_kwargs: {kwargs}")))
    as_override, _ = load.load(
        write(GOOD), [f"--training.activation_checkpointing_kwargs={kwargs}"]
    )
    for recipe in (in_file, as_override):
        assert recipe.training.activation_checkpointing is is_on
        assert ("activation_checkpointing" in recipe.training.model_fields_set) is is_on


def test_the_old_name_beside_the_new_one_is_refused(write):
    both = with_line("gradient_checkpointing: true").replace(
        "training:\n", "training:\n  activation_checkpointing: false\n"
    )
    with pytest.raises(
        ConfigError, match=r"is training\.activation_checkpointing, which is set too"
    ):
        load.load(write(both))


def test_an_override_with_an_old_name_wins_over_the_file(write):
    path = write(with_line("activation_checkpointing: true"))
    recipe, _ = load.load(path, ["--training.gradient_checkpointing=false"])
    assert recipe.training.activation_checkpointing is False
