"""Exports of three families, loaded as a user loads them, by plain transformers and peft: ids,
logits and end tokens are those that were trained. `make test-exports` has every family, and
transformers 4."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import export_trainings, exports
from benchmarks.export_folders import FOLDERS
from benchmarks.export_trainings import ADAPTER, FULL, MERGED, Trained
from benchmarks.families import FAMILIES

LLAMA, ADDED_TOKENS, T5 = "llama (SmolLM)", "olmo2", "mt5"
# make test-exports has these and all others
LONG = [pytest.param(family, marks=pytest.mark.campaign) for family in (LLAMA, T5, ADDED_TOKENS)]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[exports.Loader]:
    process = exports.Loader(Path(sys.executable), tmp_path_factory.mktemp("loader"))
    yield process
    process.close()


def test_every_family_has_a_base_folder():
    assert FOLDERS.keys() == FAMILIES.keys()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return export_trainings.train(ADDED_TOKENS, tmp_path_factory.mktemp("adapted"), is_lora=True)


def test_an_adapter_and_what_it_is_merged_into_are_what_was_trained(adapted, loader):
    for kind in (ADAPTER, MERGED):
        assert exports.problems(adapted, kind, loader)[0] == [], kind


@pytest.mark.parametrize("family", LONG[:2])
def test_an_adapter_of_another_family_is_what_was_trained(family, tmp_path, loader):
    case = export_trainings.train(family, tmp_path, is_lora=True)
    for kind in (ADAPTER, MERGED):
        assert exports.problems(case, kind, loader)[0] == [], kind


@pytest.mark.parametrize("family", [T5, LONG[2]])
def test_a_model_that_is_trained_whole_is_exported_as_it_was_trained(family, tmp_path, loader):
    case = export_trainings.train(family, tmp_path, is_lora=False)
    assert exports.problems(case, FULL, loader)[0] == []


def test_an_export_that_is_not_what_was_trained_is_seen(adapted, tmp_path, loader):
    shutil.copytree(adapted.folder / "base", tmp_path / "base")
    whole, export = adapted.folder / MERGED, tmp_path / MERGED
    case = replace(adapted, folder=tmp_path)
    for file, key, value, *lines in (
        ("generation_config.json", "eos_token_id", 5, "end tokens [5] lack", "goes on after its"),
        ("config.json", "rms_norm_eps", 1.0, "logits off"),
        ("config.json", "use_cache", False, "use_cache false"),
        ("config.json", "dtype", "bfloat16", "dtype bfloat16"),
        ("tokenizer.json", "pre_tokenizer", {"type": "Whitespace"}, "ids of rows"),
        ("tokenizer.json", "model", None, "tokenizer: "),
    ):
        shutil.rmtree(export, ignore_errors=True)
        shutil.copytree(whole, export)
        damaged = export / file
        content = json.loads(damaged.read_text(encoding="utf-8"))
        damaged.write_text(json.dumps({**content, key: value}), encoding="utf-8")
        found = exports.problems(case, MERGED, loader)[0]
        for line in lines:
            assert any(line in problem for problem in found), (file, key, found)
