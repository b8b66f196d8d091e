"""The files of an exported folder as transformers 5 reads them, and the keys that 4.57 reads."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)

from launch.base.errors import ResourceError
from launch.plan import facts
from launch.predict.models import model_config
from launch.schema.model_sections import ModelSection, TokenizerSection
from launch.schema.recipe import Recipe
from tests import builders
from training.children.merge import merge
from training.data import tokenizer as tokenizers
from training.loop import export, exported_files
from training.loop.nan_guard import NonFinite
from training.model import build
from training.model.build import set_special_tokens

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {"model_type": "t5", "vocab_size": 320, "d_model": 32, "d_kv": 16, "d_ff": 64} | {
    "num_layers": 1,
    "num_heads": 2,
}
OLD = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD}
FACTORS = {"short_factor": [1.1] * 8, "long_factor": [2.5] * 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def model_of(config: dict[str, Any]) -> Any:
    settings = AutoConfig.for_model(**deepcopy(config))  # which changes it
    is_pair = settings.is_encoder_decoder
    return (AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM).from_config(settings)


def saved(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model that is saved as training leaves it."""
    model = model_of(config)
    model.config.use_cache = False
    exported_files.save_model(model, folder, config)
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def own_tokenizer() -> Any:
    return tokenizers.train(iter(["one two three"]), TokenizerSection(), 300)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": {"type": "yarn", **OLD}},
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "rope_type": "yarn", **OLD},
            },
        ),
        (
            {"model_type": "gemma3_text", "rope_theta": 3e5, "rope_local_base_freq": 5e3, **LAYERS},
            {"rope_theta": 3e5, "rope_local_base_freq": 5e3},
        ),
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 2e4},
            {"rotary_pct": 0.5, "rotary_emb_base": 2e4},
        ),
        (
            {"model_type": "glm4", "partial_rotary_factor": 0.25}
            | {"head_dim": 16, "pad_token_id": 0},
            {"partial_rotary_factor": 0.25},
        ),
        (
            {
                **{"model_type": "phi3", "pad_token_id": 0, "rope_theta": 1e4},
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", **FACTORS},
            },
            {"rope_scaling": {"type": "longrope", **FACTORS}},
        ),
        (
            {"model_type": "olmo2", "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16},
            {"num_experts": 4},
        ),
    ],
)
def test_config_json_has_the_keys_of_both_versions(tmp_path, config, keys):
    written = saved(tmp_path, {**LLAMA, **config})
    assert {key: written.get(key) for key in keys} == keys
    assert "use_cache" not in written  # that of the base, which had none
    trained = model_of({**LLAMA, **config}).config
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == trained.rope_parameters


@pytest.mark.parametrize(
    ("name", "is_short_of_ram", "size"),
    [("MAX_SHARD_BYTES", False, 5_000_000_000), ("MAX_SMALL_SHARD_BYTES", True, 1_000_000_000)],
)
def test_weights_are_written_in_several_files_that_load_as_one(
    tmp_path, monkeypatch, name, is_short_of_ram, size
):
    assert getattr(exported_files, name) == size
    monkeypatch.setattr(exported_files, name, 20_000)  # of a small model
    model = model_of(LLAMA)
    exported_files.save_model(model, tmp_path, {}, is_short_of_ram)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(len(load_file(file)) == 1 or file.stat().st_size < 25_000 for file in shards)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_the_cache_of_the_base_is_kept(tmp_path):
    assert saved(tmp_path, {**LLAMA, "use_cache": False})["use_cache"] is False
    assert saved(tmp_path, {**LLAMA, "use_cache": True})["use_cache"] is True


@pytest.mark.parametrize(
    ("config", "is_scaled"),
    [
        (T5, True),
        ({**T5, "tie_word_embeddings": False}, False),
        ({**T5, "model_type": "mt5"}, False),
    ],
)
def test_a_t5_without_scaled_outputs_is_untied_for_older_versions(tmp_path, config, is_scaled):
    written = saved(tmp_path, config)
    assert written.get("tie_word_embeddings", True) is is_scaled
    head = load_file(tmp_path / "model.safetensors").get("lm_head.weight")
    assert (head is None) is is_scaled
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.shared.weight
    assert getattr(loaded.config, "scale_decoder_outputs", False) is is_scaled


def test_ends_of_the_base_and_its_settings_are_kept_and_both_files_agree(tmp_path):
    tokenizer = own_tokenizer()
    model = model_of(LLAMA)
    model.generation_config = GenerationConfig(
        bos_token_id=7, eos_token_id=[8, 9], temperature=0.6, do_sample=False, top_p=0.9
    )
    set_special_tokens(model, tokenizer, keeps_ids=True)
    exported_files.save_model(model, tmp_path, LLAMA)
    config = AutoConfig.from_pretrained(tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path)
    ends = [tokenizer.eos_token_id, 8, 9]
    assert (config.eos_token_id, generation.eos_token_id) == (ends, ends)
    assert (config.bos_token_id, generation.bos_token_id) == (7, 7)
    assert (generation.temperature, generation.top_p, generation.do_sample) == (0.6, 0.9, False)


def test_ids_of_a_base_mean_nothing_beside_another_tokenizer():
    tokenizer, model = own_tokenizer(), model_of({**LLAMA, "eos_token_id": [8, 9]})
    set_special_tokens(model, tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def recipe(**model: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "a", "task": "sft", "data": {"train_file": "a"}, "output_dir": "o"}
        | {"model": {"path": "base", **model}}
    )


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({}, "bfloat16"),
        ({"output_dtype": "float16"}, "float16"),
        ({"dtype": "float16"}, "bfloat16"),
    ],
)
def test_a_model_is_exported_in_the_type_of_its_folder_or_as_asked(asked, written):
    assert recipe(**asked).output_dtype({"dtype": "bfloat16"}) == written
    assert recipe(**asked).output_dtype({"torch_dtype": "bfloat16"}) == written


def test_a_shape_is_exported_in_the_type_of_its_weights():
    of_shape = recipe(path=None, shape="llama-tiny", dtype="float16")
    assert of_shape.output_dtype({"dtype": "bfloat16"}) == "float16"


def test_scored_weights_are_those_that_are_exported(tmp_path):
    model, asked = model_of({**LLAMA, "tie_word_embeddings": True}), recipe()
    config = {**LLAMA, "dtype": "bfloat16"}
    export.round_weights(model, asked, config)
    ids = torch.tensor([[5, 6, 7]])
    scored = model(ids).logits
    content = export.save_weights(model, own_tokenizer(), asked, config, tmp_path, 1)
    assert content == "the whole model"
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.float()(ids).logits, scored)


def test_weights_above_the_largest_number_of_float16_are_not_written(tmp_path):
    model = model_of(LLAMA)
    model.lm_head.weight.data[0, 0] = 7e4
    asked = recipe(output_dtype="float16")
    with pytest.raises(NonFinite, match=r"not finite in float16.*lm_head"):
        export.save_weights(model, own_tokenizer(), asked, LLAMA, tmp_path, 1)


def test_an_adapter_and_its_merged_model_name_the_trained_ends(tmp_path):
    from peft import LoraConfig, get_peft_model

    tokenizer, base = own_tokenizer(), tmp_path / "base"
    config = {**LLAMA, "eos_token_id": [8, 9], "rope_theta": 5e5, "use_cache": True}
    model_of(config).bfloat16().save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    set_special_tokens(model, tokenizer, keeps_ids=True)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    asked = recipe(path=str(base)).model_copy(update={"lora": None})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    export.save_weights(adapted, tokenizer, asked, config, adapter, 1)
    ends = [tokenizer.eos_token_id, 8, 9]
    assert GenerationConfig.from_pretrained(adapter).eos_token_id == ends
    merge(base, adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.generation_config.eos_token_id == merged.config.eos_token_id == ends
    assert merged.dtype == torch.bfloat16
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written["use_cache"] is True


def test_a_tokenizer_has_the_names_of_both_versions(tmp_path):
    tokenizer = own_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>"]})
    list(exported_files.save_tokenizer(tokenizer, tmp_path, None))
    written = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|user|>"]
    assert "extra_special_tokens" not in written
    assert written["added_tokens_decoder"]["1"]["content"] == "<|end|>"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "one <|user|> two"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.all_special_tokens == tokenizer.all_special_tokens
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("bos", "adds"), [("<|system|>", True), (None, False)])
def test_older_versions_are_told_whether_texts_begin_with_bos(tmp_path, bos, adds):
    tokenizer = own_tokenizer()
    if bos:
        tokenizer.bos_token = bos
        tokenizer.add_bos_token = True
        tokenizer.update_post_processor()
    list(exported_files.save_tokenizer(tokenizer, tmp_path, None))
    written = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["add_bos_token"] is adds


def test_vocabularies_of_the_base_are_copied_while_they_describe_the_tokenizer(tmp_path):
    source, same, grown = (tmp_path / name for name in ("source", "same", "grown"))
    tokenizer = own_tokenizer()
    tokenizer.save_pretrained(source)
    (source / "tokenizer.model").write_bytes(b"pieces")
    (source / "model.safetensors").write_bytes(b"")
    assert list(exported_files.save_tokenizer(tokenizer, same, source)) == []
    assert (same / "tokenizer.model").read_bytes() == b"pieces"
    assert not (same / "model.safetensors").exists()
    tokenizers.add_tokens(tokenizer, ["<|im_end|>"])
    (line,) = exported_files.save_tokenizer(tokenizer, grown, source)
    assert "tokenizer.model of" in line
    assert "not copied" in line
    assert not (grown / "tokenizer.model").exists()


def with_own_head(folder: Path, **more: torch.Tensor) -> Path:
    """A folder whose file has a head of its own, though its config ties it."""
    model_of({**LLAMA, "tie_word_embeddings": True}).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file({**weights, **more}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_head_that_the_weights_untie_is_untied_for_older_versions(tmp_path):
    base = with_own_head(tmp_path / "base")
    model = build.from_folder(ModelSection(path=str(base)), None, torch.device("cpu"))
    config = json.loads((base / "config.json").read_text())
    exported_files.save_model(model, tmp_path / "own", config)
    assert json.loads((tmp_path / "own/config.json").read_text())["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert saved(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True})["tie_word_embeddings"]
    read = model_config.read(ModelSection(path=str(base)), root=base, cache=builders.CACHE)
    (line,) = facts.own_head(read[2], read[1])
    assert line.startswith("lm_head.weight of the weights differs from the embeddings")


def test_weights_that_the_config_does_not_describe_are_named(tmp_path, caplog):
    base = with_own_head(tmp_path, **{"value_head.weight": torch.ones(1)})
    with caplog.at_level("INFO", "lowmem"):
        build.from_folder(ModelSection(path=str(base)), None, torch.device("cpu"))
    assert "1 tensors are not in the model of config.json" in caplog.text
    assert "such as value_head.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generation_config.json", {"max_new_tokens": "lots"}),
        ("config.json", {"rope_scaling": {"rope_type": "ntk-magic"}}),
        ("config.json", {"torch_dtype": "bf16", "dtype": "bf16"}),
    ],
)
def test_a_value_that_transformers_does_not_take_is_named_with_its_file(tmp_path, name, change):
    with_own_head(tmp_path)
    file = tmp_path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ResourceError, match=r"value.* config\.json|config\.json: .* values "):
        build.from_folder(ModelSection(path=str(tmp_path)), None, torch.device("cpu"))


def test_a_trained_end_is_no_token_that_the_bases_settings_suppress():
    made, model = own_tokenizer(), model_of(LLAMA)
    end = made.eos_token_id
    model.generation_config.suppress_tokens = [end, 7]
    model.generation_config.bad_words_ids = [[end], [3, end]]
    set_special_tokens(model, made)
    assert model.generation_config.suppress_tokens == [7]
    assert model.generation_config.bad_words_ids == [[3, end]]
