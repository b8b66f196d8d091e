"""Rows get the ids that AutoTokenizer gives beside the config.json that is exported."""

from __future__ import annotations

import json
import unicodedata
from functools import partial

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from launch.base import files
from launch.base.errors import DataError, ResourceError
from launch.schema.model_sections import TokenizerSection
from launch.schema.result import ExportedModel
from training.data import tokenizer

TEXTS = ["which year is 2014 in cafe\u0301?", "It's 500 euro  and 二 三\n\n日期 2024-03-05"]
IMPOSING = sorted(name for name in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if "qwen" in name)


def ids(each, text=TEXTS[1]):
    return each(text, add_special_tokens=False)["input_ids"]


def trained(model_type, split="word"):
    section = TokenizerSection(split=split)
    return tokenizer.train(iter(TEXTS * 9), section, 400, {"model_type": model_type})


@pytest.mark.parametrize("split", ["word", "character"])
@pytest.mark.parametrize("model_type", [*IMPOSING, "llama", "t5"])
def test_a_trained_tokenizer_is_read_beside_its_models_config_as_it_was_trained(
    model_type, split, tmp_path
):
    made = trained(model_type, split)
    made.save_pretrained(tmp_path)
    files.write_json(tmp_path / "config.json", {"model_type": model_type})
    read = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ids(read, text) == ids(made, text)
        nfc = unicodedata.normalize("NFC", text)
        assert read.decode(ids(read, text)) in (text, nfc)
    assert len(read) == len(made) <= 400


def test_a_trained_tokenizer_of_other_types_is_what_it_was_without_a_config():
    before = tokenizer.train(iter(TEXTS * 9), TokenizerSection(), 400)
    assert trained("llama").backend_tokenizer.to_str() == before.backend_tokenizer.to_str()


def test_a_folder_is_read_beside_the_models_config_unless_its_file_is_asked_for(tmp_path):
    made = trained("llama")
    tokenizer.save(made, tmp_path / "auto", {"model_type": "qwen2"})
    tokenizer.save(made, tmp_path / "file", None)
    assert ids(tokenizer.load(tmp_path / "file")) == ids(made)
    assert ids(tokenizer.load(tmp_path / "auto")) != ids(made)
    assert ids(tokenizer.load(tmp_path / "auto", loading="file")) == ids(made)


def test_an_exported_folder_is_read_as_it_was_trained(tmp_path):
    made = trained("llama")
    tokenizer.save(made, tmp_path, {"model_type": "qwen2"})
    files.write_json(tmp_path / "lowmem.json", ExportedModel("a run", tokenizer_loading="file"))
    assert ids(tokenizer.load(tmp_path)) == ids(made)


def test_the_first_row_that_two_readings_cut_otherwise_is_named():
    by_file, by_auto = trained("llama"), trained("qwen2")
    assert tokenizer.difference(by_file, by_file, TEXTS) is None
    line = tokenizer.difference(by_file, by_auto, TEXTS)
    assert line is not None and line.startswith("row 1 has [")
    assert "by tokenizer.json, [" in line and line.endswith("by AutoTokenizer")


class Reading:
    """A tokenizer of words. `lost`: what it has no token for; `blanks`: False, it loses them."""

    def __init__(self, lower=False, lost="", blanks=True):
        self.lower, self.lost, self.blanks = lower, lost, blanks

    def __call__(self, text, add_special_tokens):
        text = text.lower() if self.lower else text
        cut = text if self.blanks else text.replace(" ", "")
        return {"input_ids": ["<unk>" if each in self.lost else each for each in cut]}

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(ids)

    def convert_ids_to_tokens(self, ids):
        return ids


@pytest.mark.parametrize(
    ("by_file", "by_auto", "refused"),
    [
        (Reading(), Reading(lower=True), True),
        (Reading(lower=True), Reading(), False),  # keeps more
        (Reading(lower=True), Reading(lower=True, lost="c"), True),
        (Reading(lower=True, lost="c"), Reading(lower=True, lost="c"), False),
        (Reading(), Reading(blanks=False), True),
    ],
)
def test_a_reading_that_keeps_less_is_refused_whichever_row_shows_it(by_file, by_auto, refused):
    texts = ["d", "dd", "A b C c"]
    if not refused:
        tokenizer.difference(by_file, by_auto, texts)
        return
    with pytest.raises(ResourceError, match=r"row 3 .* by AutoTokenizer, which loses characters"):
        tokenizer.difference(by_file, by_auto, texts)


def test_a_pair_ends_its_inputs_with_the_end_token_in_the_tokenizers_own_call():
    made = trained("t5")
    assert tokenizer.around(made) == ([], [])
    before = tokenizer.around_source(made), tokenizer.around_target(made)
    tokenizer.end_inputs(made)
    assert tokenizer.around(made) == ([], [made.eos_token_id])
    assert (tokenizer.around_source(made), tokenizer.around_target(made)) == before
    tokenizer.end_inputs(made)
    assert tokenizer.around(made) == ([], [made.eos_token_id])


def test_a_reading_that_loses_characters_is_refused(tmp_path):
    """A vocabulary of words between ▁ has no token for a byte of Qwen2's pre-tokenizer."""
    made = trained("llama")
    words = json.loads(made.backend_tokenizer.to_str())
    words["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    words["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    words["model"]["merges"] = []
    words["model"]["vocab"] = {
        **{token["content"]: token["id"] for token in words["added_tokens"]},
        **{sign: 9 + i for i, sign in enumerate(dict.fromkeys("▁" + "".join(TEXTS)))},
    }
    made.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    files.write_json(tmp_path / "config.json", {"model_type": "qwen2"})
    by_file, by_auto = tokenizer.load(tmp_path, loading="file"), tokenizer.load(tmp_path)
    with pytest.raises(ResourceError, match=r"row 1 .* by AutoTokenizer, which loses characters"):
        tokenizer.difference(by_file, by_auto, ["which year is 2014 二"])


@pytest.mark.parametrize(
    ("regex", "text", "limit_s", "said"),
    [
        ("(a+)+b", "a" * 40, 60, "panicked: Onig"),
        ("(?:a|aa|b)+c", ("a" * 24 + "d") * 400, 0.3, r"did not end within \d+ s of CPU time"),
    ],
)
def test_a_tokenizer_whose_regular_expression_is_too_slow_is_named(
    regex, text, limit_s, said, monkeypatch
):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Split(Regex(regex), "isolated")
    monkeypatch.setattr(tokenizer, "CALL_S", limit_s)  # nothing else: 0.3 is a shorter wait
    with pytest.raises(DataError, match=rf"^the tokenizer of m {said}.*begins with 'aaa.*json"):
        tokenizer.called(partial(made.encode_batch, [text]), [text], "the tokenizer of m")
