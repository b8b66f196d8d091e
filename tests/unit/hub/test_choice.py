"""The files of a repository that are downloaded."""

from __future__ import annotations

import pytest

from launch.base.errors import DataError, ResourceError
from launch.hub import download, names

pytestmark = pytest.mark.unit


def data(text: str, paths: list[str], card: dict | None = None) -> tuple[str, list[str]]:
    config, local = download.choose_data_files(names.parse(text, is_data=True), paths, card or {})
    return config, sorted(local.values())


def model(*paths: str) -> list[str]:
    return sorted(download.choose_model_files(names.parse("a/b", is_data=False), paths))


def test_of_two_forms_of_the_weights_those_of_transformers_are_taken():
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    more = ["consolidated.safetensors", "model.fp16.safetensors", "original/consolidated.00.pth"]
    assert model(*parts, index, *more) == sorted([*parts, index])
    assert model("consolidated.safetensors", "config.json") == [
        "config.json",
        "consolidated.safetensors",
    ]
    assert model("adapter_model.safetensors", "adapter_config.json") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_tokenizer_template_card_and_licence_are_taken():
    beside = ["LICENSE", "README.md", "chat_template.jinja", "merges.txt", "tokenizer.model"]
    beside += ["tokenizer.json", "vocab.json", "vocab.txt", "config.json"]
    others = ["handler.py", "requirements.txt", "tf_model.h5", "training_args.bin", "a/config.json"]
    assert model("model.safetensors", *beside, *others) == sorted(["model.safetensors", *beside])


GSM8K = ["README.md", "main/test-0.parquet", "main/train-0.parquet", "socratic/train-0.parquet"]


def test_a_configuration_is_a_folder_and_a_split_a_word_of_the_name():
    assert data("hf:a/b/main", GSM8K) == ("main", ["README.md", "main/train-0.parquet"])
    assert data("hf:a/b/main:test", GSM8K)[1] == ["README.md", "main/test-0.parquet"]
    assert data("hf:a/b:test", GSM8K)[0] == "main"  # no other has one
    assert data("hf:a/b", ["data/train-0.csv", "data/validation-0.csv"])[1] == ["data/train-0.csv"]
    assert data("hf:a/b", ["one.jsonl", "two.jsonl"]) == ("default", ["one.jsonl", "two.jsonl"])
    assert data("hf:a/b", ["train.jsonl", "more.jsonl"])[1] == ["train.jsonl"]
    for text in ("hf:a/b", "hf:a/b/none"):
        with pytest.raises(DataError, match="main:test, main:train, socratic:train, expected one"):
            data(text, GSM8K)


def test_trained_rows_are_not_offered_in_the_place_of_a_validation_split():
    with pytest.raises(DataError, match="found main:test, expected one of them by its name: hf:a"):
        data("hf:a/b/main:validation", GSM8K)
    with pytest.raises(DataError, match=r"has no split but train, .*validation_size=100"):
        data("hf:a/b:validation", ["rows.jsonl"])


CONFIGS = [
    {"config_name": "all", "data_files": "**/*.jsonl"},
    {
        "config_name": "en",
        "default": True,
        "data_files": [
            {"split": "train", "path": ["english/a*", "english/b*"]},
            {"split": "train_sft", "path": "english/sft.jsonl"},
        ],
    },
    {"config_name": "de", "data_dir": "german"},
]
LISTED = ["english/a.jsonl", "english/b.jsonl", "english/sft.jsonl", "german/train.jsonl"]


@pytest.mark.parametrize(
    ("text", "config", "paths"),
    [
        ("hf:a/b", "en", LISTED[:2]),
        ("hf:a/b/en:train_sft", "en", LISTED[2:3]),
        ("hf:a/b/de", "de", LISTED[3:]),
        ("hf:a/b/all", "all", LISTED),
    ],
)
def test_configurations_are_those_of_the_card(text, config, paths):
    assert data(text, [*LISTED, "unnamed.jsonl"], {"configs": CONFIGS})[0] == config
    assert data(text, LISTED, {"configs": CONFIGS})[1] == paths


@pytest.mark.parametrize(
    "configs", [None, "text", [1], [{}], [{"config_name": "x", "data_files": 5}]]
)
def test_a_card_that_cannot_be_read_leaves_the_names(configs):
    assert data("hf:a/b/main", GSM8K, {"configs": configs})[0] == "main"


def test_of_several_types_the_first_is_taken_and_no_file_that_is_no_data():
    paths = ["train.txt", "train.csv", "train.parquet", "dataset_infos.json", ".train.parquet"]
    assert data("hf:a/b", paths)[1] == ["train.parquet"]
    with pytest.raises(
        DataError, match=r"huggingface\.co may have made parquet: hf:a/b@refs/convert"
    ):
        data("hf:a/b", ["b.py", "data.zip", "../train.jsonl"])


def test_paths_that_lead_elsewhere_or_are_the_same_on_some_disks_are_refused():
    with pytest.raises(ResourceError, match=r"'/train\.jsonl': a file of this name is never"):
        data("hf:a/b", ["/train.jsonl"])
    with pytest.raises(ResourceError, match=r"'a--train\.csv': collides with 'a/train\.csv'"):
        card = {"configs": [{"config_name": "x", "data_files": "*.csv"}]}
        data("hf:a/b", ["a/train.csv", "a--train.csv"], card)
    with pytest.raises(ResourceError, match="never downloaded"):
        model("model.safetensors", "a\\b.json")


def test_files_of_a_data_set_lie_side_by_side():
    _, local = download.choose_data_files(names.parse("hf:a/b/main", is_data=True), GSM8K, {})
    assert local == {"main--train-0.parquet": "main/train-0.parquet", ".README.md": "README.md"}
