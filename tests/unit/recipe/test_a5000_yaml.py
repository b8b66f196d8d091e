"""The A5000 guide's YAML as a recipe: every key of it means something here, or is refused with what
does."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.base.errors import ConfigError
from launch.base.workspace import CODE
from launch.recipe import load
from launch.recipe.guides.train_py import translate_yaml
from launch.schema.recipe import Recipe

SHIPPED = CODE / "config" / "training_config.yaml"
GUIDE = """\
model: {name_or_path: qwen1.5-7b, torch_dtype: bfloat16, trust_remote_code: false}
data: {train_file: a.jsonl, validation_file: b.jsonl}
training:
  per_device_train_batch_size: 6
  per_device_eval_batch_size: 12
  gradient_accumulation_steps: 3
  learning_rate: 3e-5
  lr_scheduler_type: cosine
  warmup_ratio: 0.1
  optim: "adamw_torch_fused"
  max_seq_length: 2048
lora: {r: 32, lora_alpha: 64, lora_dropout: 0.05, bias: none, task_type: CAUSAL_LM,
       target_modules: [q_proj, v_proj]}
quantization: {use_4bit: false}
environment:
  dataloader_num_workers: 8
  gradient_checkpointing: false
  torch_compile: true
  bf16: true
  fp16: false
  parallel_mode: "data_parallel"
  tensor_parallel_size: 1
logging: {log_dir: results/logs, report_to: tensorboard}
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """(recipe, notes) of a YAML text, in a folder of the user's."""
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> tuple[Recipe, tuple[str, ...]]:
        (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
        name, overrides, notes = translate_yaml("my.yaml")
        return load.load(name, overrides)[0], notes

    return read


def test_the_guides_keys_become_the_recipes(read, tmp_path):
    recipe, notes = read(GUIDE)
    training = recipe.training
    assert (recipe.model.shape, recipe.model.dtype) == ("qwen1.5-7b", "bfloat16")
    assert (recipe.data.train_file, recipe.data.max_length) == (str(tmp_path / "a.jsonl"), 2048)
    assert (training.per_device_train_batch_size, training.per_device_eval_batch_size) == (6, 12)
    assert (
        training.gradient_accumulation_steps,
        training.learning_rate,
        training.warmup_steps,
    ) == (3, 3e-5, 0.1)
    assert (training.lr_scheduler_type, training.optim, training.bf16) == (
        "cosine",
        "adamw_torch_fused",
        True,
    )
    assert (training.dataloader_num_workers, training.torch_compile) == (8, True)
    assert (
        training.activation_checkpointing is False
        and "activation_checkpointing" in training.model_fields_set
    )
    assert recipe.lora is not None and recipe.quantization is None
    assert (recipe.lora.r, recipe.lora.lora_alpha, recipe.lora.target_modules) == (
        32,
        64,
        ("q_proj", "v_proj"),
    )
    assert recipe.log_dir == str(tmp_path / "results/logs")
    said = "\n".join(notes)
    for words in (
        "my.yaml:1: model.name_or_path: a shape of configs/models: random weights",
        "training.max_seq_length: data.max_length=2048",
        "training.warmup_ratio: training.warmup_steps=0.1, which below 1 is a share of all steps",
        "quantization.use_4bit: quantization.load_in_4bit=false",
    ):
        assert words in said


def test_the_shipped_file_says_in_the_guides_words_what_its_recipe_says():
    name, overrides, _ = translate_yaml(str(SHIPPED))
    workspace = str(CODE) + "/"
    from_yaml = load.load(name, overrides)[0].model_dump(exclude={"data": {"validation_file"}})
    recipe = load.load(name)[0].model_dump(exclude={"data": {"validation_file"}})
    from_yaml["data"]["train_file"] = from_yaml["data"]["train_file"].removeprefix(workspace)
    from_yaml["log_dir"] = from_yaml["log_dir"].removeprefix(workspace)
    rates = [made["training"].pop("learning_rate") for made in (from_yaml, recipe)]
    assert rates == [3e-5, 2e-4]  # the guide's, and what is usual for adapters
    assert from_yaml == recipe


def test_paths_of_the_shipped_file_are_the_checkouts_wherever_it_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOWMEM_ROOT", raising=False)
    name, overrides, _ = translate_yaml("config/training_config.yaml")
    assert load.load(name, overrides)[0].data.train_file == str(
        CODE / "data/sft_train_small_train.parquet"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modell: {}", "my.yaml:1: modell: found an unknown section, expected one of model, data"),
        ("trainin: {}", "did you mean training?"),
        ("training: [1]", "my.yaml:1: training: found [1], expected a section"),
        ("- 1", "expected the sections model, data, training"),
        ("training: {learning_rte: 1}", "my.yaml:1: training.learning_rte: found an unknown key"),
        (
            "training: {learning_rte: 1}",
            "expected a key of training; did you mean training.learning_rate?",
        ),
        ("training:\n  use_4bit: true", "my.yaml:2: training.use_4bit: found an unknown key"),
        ("training:\n  use_4bit: true", "did you mean quantization.use_4bit?"),
        ("lora: {rank: 8}", "lora.rank: found an unknown key"),
        ("lora: {lora_r: 8}", "lora.lora_r: found an unknown key"),
        ("data: {format: alpaca}", "data.format: found an unknown key"),
        ("training: {metric_for_best_model: eval_bleu}", "found 'eval_bleu', expected eval_loss"),
        ("training: {deepspeed: x.json}", "use launch.mode"),
        (
            "training: {warmup_ratio: 1.5}",
            "training.warmup_ratio: found 1.5, expected a share of all steps",
        ),
        (
            "environment: {tensor_parallel_size: 2}",
            "environment.tensor_parallel_size: found 2, expected 1",
        ),
        (
            "environment: {parallel_mode: model_parallel}",
            "found 'model_parallel', expected data_parallel",
        ),
        (
            "model: {trust_remote_code: true}",
            "found true, expected false; code that comes with a model is never run",
        ),
        ("model: {name_or_path: 3}", "model.name_or_path: found 3, expected a folder"),
        ("quantization: {use_8bit: true}", "found true, expected false; weights have 4 bits or 16"),
        ("logging: {report_to: comet_ml}", "training.report_to.0: found 'comet_ml', expected"),
        ("training: {save_strategy: epoch}", "found 'epoch', expected steps"),
        ("training: {eval_strategy: sometimes}", "expected steps, epoch or no"),
        ("lora: {enabled: 1}", "lora.enabled: found 1, expected true or false"),
        (
            "data: {max_length: 64}\ntraining: {max_seq_length: 64}",
            "data.max_length twice, expected it once; also at",
        ),
        (
            "training: {learning_rate: high}",
            "my.yaml:1: training.learning_rate: found 'high'",
        ),
        ("environment: {bf16: 'yes'}", "my.yaml:1: environment.bf16: training.bf16: found 'yes'"),
        ("lora: {r: 0}", "my.yaml:1: lora.r: found 0"),
        ("quantization: {use_4bit: {a: 1}}", "quantization.use_4bit"),
    ],
)
def test_a_mistake_names_file_line_and_key(read, text, said):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert said in str(caught.value)


def test_switching_lora_off_and_nothing_held_out(read):
    recipe, notes = read(
        "lora: {enabled: false}\nquantization: {use_4bit: false}\ntraining: {evaluation_strategy:"
        " 'no'}"
    )
    assert (
        recipe.lora is None and recipe.quantization is None and recipe.data.validation_file is None
    )
    assert any("data.validation_file=null" in note for note in notes)


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "adamw_bnb_8bit"])
def test_eight_bit_optimizers_and_double_quantisation_reach_the_recipe(read, name):
    quantization = "{use_4bit: true, use_nested_quant: true, bnb_4bit_quant_type: nf4}"
    recipe, _ = read(f"training: {{optim: {name}}}\nquantization: {quantization}")
    assert recipe.training.optim == name
    assert recipe.quantization is not None and recipe.quantization.bnb_4bit_use_double_quant


@pytest.mark.parametrize(
    "value", ["123", "true", "null", "a b", "[x]", "ü: {y}", "1e-4", '"q"', "~"]
)
def test_text_stays_text(read, value, tmp_path):
    recipe, _ = read("data: {prompt_column: " + repr(value) + ", response_column: r}")
    assert recipe.data.prompt_column == value


def test_a_missing_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"none\.yaml: found no such file"):
        translate_yaml("none.yaml")
    assert not list(Path(tmp_path).iterdir())
