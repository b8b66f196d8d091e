"""A model's shape from a name or from a folder as transformers writes it; every broken folder is
named with its fix."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Model,
    MambaForCausalLM,
)

from launch.base.errors import ConfigError, ResourceError
from launch.predict import parameters
from launch.predict.models import model_config, model_families, weight_files
from launch.schema.model_sections import LoraSection, ModelSection
from tests import builders

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[4]
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "state_size": 4,
}


def config_of(name: str) -> dict:
    return yaml.safe_load(
        (ROOT / "configs" / "models" / f"{name}.yaml").read_text(encoding="utf-8")
    )


def real_model(config: dict):
    torch.manual_seed(0)
    real_config = AutoConfig.for_model(**config)
    family = AutoModelForSeq2SeqLM if real_config.is_encoder_decoder else AutoModelForCausalLM
    return family.from_config(real_config)


def loaded_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """What transformers makes of the folder."""
    config = AutoConfig.from_pretrained(folder)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return {name: tuple(p.shape) for name, p in family.from_pretrained(folder).named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folders with a tiny model of each family; never changed."""
    root = tmp_path_factory.mktemp("models")
    real_model(config_of("t5-tiny")).save_pretrained(root / "t5")
    real_model(config_of("llama-tiny")).save_pretrained(root / "llama")
    real_model(GPT2).save_pretrained(root / "gpt2")
    real_model(config_of("llama-tiny")).save_pretrained(root / "sharded", max_shard_size="300KB")
    MambaForCausalLM(AutoConfig.for_model(**MAMBA)).save_pretrained(root / "mamba")
    return root


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A Llama's folder to break."""
    return Path(shutil.copytree(saved / "llama", tmp_path / "a 'model"))


@pytest.fixture
def sharded(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


def load_folder(folder: Path, **kwargs):
    return builders.model_size(ModelSection(path=str(folder)), None, root=ROOT, **kwargs)


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = change(json.loads(raw[8 : 8 + length]))
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + raw[8 + length :])


# ---- what is read
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (ROOT / "configs" / "models").glob("*.yaml"))
)
def test_every_named_shape_loads_under_its_name(name):
    shape = builders.model_size(ModelSection(shape=name), None, root=ROOT)
    assert (shape.name, shape.config) == (name, config_of(name))
    assert shape.parameters == shape.trainable_parameters > 0
    assert shape.is_encoder_decoder == name.startswith("t5")


def test_freezing_and_lora_are_counted():
    frozen = builders.model_size(
        ModelSection(shape="t5-chatlm-0.2b", freeze=("shared", "encoder")), None, root=ROOT
    )
    assert (frozen.parameters, frozen.trainable_parameters, frozen.lora_parameters) == (
        187_692_288,
        94_396_032,
        0,
    )
    adapted = builders.model_size(ModelSection(shape="llama-tiny"), LoraSection(r=2), root=ROOT)
    assert adapted.parameters == 254_272
    assert (
        adapted.trainable_parameters
        == adapted.lora_parameters
        == 2 * 2 * (2 * 128 + 2 * 96 + 3 * 320)
    )


def test_the_vocabulary_really_used_replaces_the_shapes_own():
    shape = builders.model_size(ModelSection(shape="llama-tiny"), None, 1000, root=ROOT)
    assert shape.config["vocab_size"] == 1000
    assert shape.parameters == 254_272 - 1048 * 64


@pytest.mark.parametrize("family", ["t5", "llama", "gpt2", "sharded", "mamba"])
def test_a_folder_has_the_parameters_that_transformers_loads(saved, family):
    config, read, _ = model_config.read(
        ModelSection(path=str(saved / family)), root=ROOT, cache=builders.CACHE
    )
    assert read == loaded_shapes(saved / family)
    assert config == json.loads((saved / family / "config.json").read_text())
    assert load_folder(saved / family).name == family


def test_the_folder_of_shards_really_has_shards(saved):
    assert len(list((saved / "sharded").glob("model-*.safetensors"))) > 1


def test_a_relative_folder_starts_at_the_root(saved):
    assert builders.model_size(ModelSection(path="llama"), None, root=saved).parameters == 254_272


def test_a_config_without_weights_is_counted_from_its_keys(folder):
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"left by a Trainer")
    assert load_folder(folder).parameters == 254_272
    assert load_folder(folder, vocab_size=100).config["vocab_size"] == 100


def test_a_config_with_a_byte_order_mark_is_read(folder):
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_folder(folder).parameters == 254_272


def test_another_vocabulary_for_weights_of_a_known_type_resizes_the_embedding(folder):
    assert load_folder(folder, vocab_size=2050).parameters == 254_272 + 2 * 64


def test_weights_of_a_bare_model_are_known_without_their_prefix(tmp_path):
    GPT2Model(AutoConfig.for_model(**GPT2)).save_pretrained(tmp_path / "bare")
    assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    _, read, _ = model_config.read(
        ModelSection(path=str(tmp_path / "bare")), root=ROOT, cache=builders.CACHE
    )
    assert read == loaded_shapes(tmp_path / "bare")


@pytest.mark.parametrize("family", ["t5", "llama", "gpt2"])
@pytest.mark.parametrize("differs", [True, False])
def test_a_tied_pair_that_is_stored_twice_counts_twice_only_where_it_differs(
    saved, tmp_path, family, differs
):
    folder = Path(shutil.copytree(saved / family, tmp_path / family))
    tensors = load_file(folder / "model.safetensors")
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    tensors["lm_head.weight"] = tensors[
        parameters.FAMILIES[model_type].tied["lm_head.weight"]
    ].clone()
    tensors["lm_head.weight"][-1, -1] += differs
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, read, _ = model_config.read(ModelSection(path=str(folder)), root=ROOT, cache=builders.CACHE)
    assert read == loaded_shapes(folder)
    assert ("lm_head.weight" in read) == differs


def test_a_tied_embedding_that_is_stored_under_its_other_name_is_found(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_folder(folder).parameters == sum(
        p.numel() for p in real_model(config_of("llama-tiny")).parameters()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "somebody/model"},
        {"_attn_implementation": "sdpa"},
        {"_attn_implementation_autoset": True},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_harmless_private_keys_are_accepted(folder, changes):
    change_config(folder, **changes)
    assert load_folder(folder).parameters == 254_272


# ---- what is refused: names
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gpt2-smal",
            r"there is no 'gpt2-smal' in .*; nearest: gpt2-small.*; all: gpt2-medium, .*t5-tiny",
        ),
        ("../../configs/models/gpt2-small", r"there is no '\.\./"),
        ("", r"there is no ''"),
    ],
)
def test_an_unknown_shape_is_an_error_with_the_nearest_and_all_names(name, message):
    with pytest.raises(ConfigError, match=message):
        builders.model_size(ModelSection(shape=name), None, root=ROOT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "cannot be read"),
        ("- llama", "holds list, not a mapping"),
        ("", "holds NoneType"),
        ("hidden_size: 64", "has no model_type"),
        ("model_type: llama\nauto_map: {AutoModel: x.Y}", "auto_map"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_broken_shape_file_is_named(tmp_path, text, message):
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{message}"):
        builders.model_size(ModelSection(shape="mine"), None, root=tmp_path)


# ---- what is refused: folders
# ---------------------------------------------------------------------------


def test_a_missing_folder_names_the_nearest(saved):
    with pytest.raises(
        ResourceError, match=r"there is no folder .*lama; nearest: llama.*nothing is downloaded"
    ):
        load_folder(saved / "lama")


def test_a_name_of_the_hub_is_told_how_to_become_a_folder():
    with pytest.raises(
        ResourceError, match=r"there is no folder .*Qwen2-0\.5B.*=Qwen/Qwen2-0\.5B --download"
    ):
        builders.model_size(ModelSection(path="Qwen/Qwen2-0.5B"), None, root=ROOT)


def test_a_path_that_no_file_system_takes_is_an_error():
    with pytest.raises(ResourceError, match=r"cannot be opened: File name too long"):
        load_folder(Path("/tmp") / ("x" * 300))


def test_a_file_in_place_of_a_folder_is_an_error(folder):
    with pytest.raises(ResourceError, match=r"config\.json is a file; give the folder"):
        load_folder(folder / "config.json")


def test_a_folder_without_config_is_an_error(folder):
    (folder / "config.json").unlink()
    with pytest.raises(
        ResourceError, match=r"has no config\.json; give a folder written by save_pretrained"
    ):
        load_folder(folder)


def test_an_adapters_folder_is_recognised(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ResourceError, match=r"has no config\.json; it is a LoRA adapter"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", r"is not JSON"),
        (b'{"model_type": "llama"', r"is not JSON"),
        (b"\xff\xfe{}", r"is not JSON"),
        (b"[" * 100_000, r"is not JSON"),
        (b"[]", r"holds list, not a mapping"),
        (b"{}", r"has no model_type"),
        (b'{"model_type": 3}', r"has no model_type"),
        (
            b'{"model_type": "llama", "num_hidden_layers": 1000000000}',
            r"num_hidden_layers is 1,000,",
        ),
        (
            b'{"model_type": "gpt2", "n_layer": 10001}',
            r"n_layer is 10,001, expected at most 10,000",
        ),
        (b" " * (11 << 20), r"has 11,534,336 bytes, more than a config can have"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_config_is_named(folder, raw, message):
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(ResourceError, match=rf"config\.json: {message}"):
        load_folder(folder)


def test_a_broken_generation_config_is_named(folder):
    for raw in ('{"eos_token_id": [1,', "[]"):
        (folder / "generation_config.json").write_text(raw)
        with pytest.raises(ResourceError, match=r"generation_config\.json: is n"):
            load_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            r"auto_map asks for code.*never run",
        ),
        ({"text_config": {"auto_map": {}}}, r"auto_map asks for code"),
        ({"_experts_implementation": "eager"}, r"private key '_experts_implementation'"),
        ({"_auto_class": "AutoModel"}, r"private key '_auto_class'"),
        ({"_get_generation_parameters": "x"}, r"private key '_get_generation_parameters'"),
        ({"text_config": {"_output_attentions": True}}, r"private key '_output_attentions'"),
        ({"_sliding_window_pattern": "6"}, r"private key '_sliding_window_pattern'"),
        ({"__class__": "x"}, r"private key '__class__'"),
        (
            {"_attn_implementation": "somebody/kernel"},
            r"_attn_implementation 'somebody/kernel' would download code",
        ),
        ({"attn_implementation": {"": "somebody/kernel"}}, r"would download code"),
        ({"quantization_config": {"bits": 4}}, r"linear ones of 4 bits that"),
    ],
    ids=str,
)
def test_a_config_that_brings_code_is_refused(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ResourceError, match=rf"config\.json: .*{message}"):
        load_folder(folder)


@pytest.mark.parametrize(
    "written", [{"_remove_final_layer_norm": False}, {"_sliding_window_pattern": 6}], ids=str
)
def test_private_keys_that_save_pretrained_writes_are_read(folder, written):
    change_config(folder, **written)
    assert list(model_config.unread_keys(load_folder(folder).config)) == []


def test_private_keys_of_other_programs_are_named_and_not_read(folder):
    left = {"_model_name_or_path": "Smollm2 Mix1", "_num_labels": 2, "_commit_hash": None}
    if model_families.private_names() & {*left}:
        pytest.skip("an older transformers has some of these names itself, and they are refused")
    inner = {"text_config": {"_flash_attn_2_enabled": True, "_name_or_path": "x"}}
    change_config(folder, **left, **inner)
    config = load_folder(folder).config
    assert list(model_config.unread_keys(config)) == [*left, "_flash_attn_2_enabled"]


def test_the_private_names_of_transformers_configs_are_read_from_its_source():
    config = AutoConfig.for_model("llama")
    names = {name for name in dir(config) if name.startswith("_") and not name.startswith("__")}
    assert names <= model_families.private_names()


def test_a_model_of_text_beside_images_is_refused_before_it_is_built(tmp_path):
    config = AutoConfig.for_model("gemma3", text_config={"num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match=r"'gemma3' is of text beside .* 'gemma3_text'\)$"):
        load_folder(tmp_path)


@pytest.mark.modes
def test_an_encoder_is_refused_unless_it_is_a_decoder(folder):
    change_config(folder, model_type="bert")
    with pytest.raises(ConfigError, match=r"config\.json: model_type 'bert' is an encoder"):
        load_folder(folder)
    change_config(folder, model_type="bert", is_decoder=True)
    with pytest.raises(ResourceError, match="its weights have 254,272 elements, the model of"):
        load_folder(folder)
    (folder / "model.safetensors").unlink()
    assert load_folder(folder).family.model_type == "bert"


@pytest.mark.parametrize("name", ["qwen33", "vit"])
def test_a_type_that_transformers_does_not_have_or_that_writes_no_text_is_refused(folder, name):
    change_config(folder, model_type=name)
    message = rf"config\.json: model_type '{name}' is no language model .* can build; nearest: "
    with pytest.raises(ConfigError, match=message):
        load_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", "holds list, not a mapping"),
        ("tokenizer.json", '{"version": "1.0", "added', "is no JSON object, or was cut"),
        ("tokenizer.json", "[]", "is no JSON object, or was cut"),
        ("tokenizer.json", "", "is no JSON object, or was cut"),
    ],
)
def test_a_damaged_tokenizer_is_refused_before_it_is_loaded(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ResourceError, match=rf"^{tmp_path}/{name}: {message}"):
        model_config.check_tokenizer(tmp_path)


# ---- what is refused: weights
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model.pt",
        "model.pkl",
        "model.pth",
        "tf_model.h5",
        "flax_model.msgpack",
        "m.gguf",
    ],
)
def test_weights_that_are_not_safetensors_are_refused(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ResourceError, match=rf"its weights are {name}; only safetensors are read"):
        load_folder(folder)


def test_a_pickle_beside_safetensors_does_not_matter(folder):
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert load_folder(folder).parameters == 254_272


@pytest.mark.parametrize("kept", [0, 5, 8, 100])
def test_a_file_cut_in_its_header_is_named(folder, kept):
    os.truncate(folder / "model.safetensors", kept)
    with pytest.raises(
        ResourceError, match=r"model\.safetensors: is cut or no safetensors file.*copy it again"
    ):
        load_folder(folder)


@pytest.mark.parametrize("missing", [1, 1000])
def test_a_file_cut_in_its_data_is_named(folder, missing):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - missing)
    with pytest.raises(
        ResourceError,
        match=rf"is cut: its header promises {size:,} bytes, it has {size - missing:,}",
    ):
        load_folder(folder)


def test_a_header_of_half_a_million_tensors_is_refused(folder):
    """It took a minute, and then said that config.json describes others."""
    empty = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    tensors = ", ".join(f'"{number}": {empty}' for number in range(500_001))
    header = f"{{{tensors}}}".encode()
    content = struct.pack("<Q", len(header)) + header
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ResourceError, match=r"safetensors: its header names 500,001 tensors"):
        load_folder(folder)


def test_weights_of_integers_are_refused_and_masks_of_them_are_not(folder):
    def of_integers(header):
        name = next(name for name in header if name.endswith("weight"))
        return {**header, name: {**header[name], "dtype": "I32"}}

    rewrite_header(folder / "model.safetensors", of_integers)
    with pytest.raises(ResourceError, match=r"weight is of type I32, expected F64, F32.*quantised"):
        load_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_a_fifo_in_a_model_folder_is_named(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ResourceError, match=rf"{name}: is no regular file; copy the folder again"):
        load_folder(folder)
    with pytest.raises(ResourceError, match=rf"{name}: is no regular file; copy the folder again"):
        model_config.check_tokenizer(folder)


def test_a_header_length_beyond_reason_is_refused_before_it_is_read(folder):
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000))
        stream.truncate(300_000_000)  # sparse
    with pytest.raises(ResourceError, match=r"its header has 200,000,000 bytes"):
        load_folder(folder)


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(
        ResourceError, match=r"is a Git LFS pointer, not the weights; run git lfs pull"
    ):
        load_folder(folder)


def first(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def changed(**changes):
    def change(header: dict) -> dict:
        first(header).update(changes)
        return header

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: b"{not json}", r"its header is damaged"),
        (lambda header: b"\xff" * 40, r"its header is damaged"),
        (lambda header: b"[]", r"its header is damaged"),
        (lambda header: b"[" * 100_000, r"its header is damaged"),
        (lambda header: header | {"model.norm.weight": 3}, r"its header is damaged"),
        (lambda header: header | {"model.norm.weight": {"dtype": "F32"}}, r"its header is damaged"),
        (changed(shape=[-1, 64]), r"its header is damaged \(shape"),
        (changed(shape=[2048, "64"]), r"its header is damaged \(shape"),
        (changed(shape=[2047, 64]), r"its header is damaged \(524288 bytes for shape"),
        (changed(data_offsets=[0]), r"its header is damaged"),
        (lambda header: {"__metadata__": {}}, r"holds no tensors"),
        (
            lambda header: {name: header[name] for name in list(header)[:-1]},
            r"its header does not describe the .* bytes it has",
        ),
        (
            lambda header: header | {"one.more": first(header)},
            r"its header does not describe the .* bytes it has",
        ),
    ],
)
def test_a_damaged_header_is_named(folder, change, message):
    rewrite_header(folder / "model.safetensors", change)
    with pytest.raises(ResourceError, match=rf"model\.safetensors: {message}"):
        load_folder(folder)


def test_an_index_that_names_a_missing_shard_is_an_error(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        ResourceError, match=rf"index\.json: names {shard.name}, which is not in the folder"
    ):
        load_folder(sharded)


def test_a_cut_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(ResourceError, match=rf"{shard.name}: is cut"):
        load_folder(sharded)


def test_shards_without_their_index_are_an_error(sharded):
    (sharded / weight_files.INDEX_NAME).unlink()
    with pytest.raises(
        ResourceError,
        match=r"has model-00001-of-\d+\.safetensors but no model\.safetensors\.index\.json",
    ):
        load_folder(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: {}, r"has no weight_map"),
        (lambda index: {"weight_map": {}}, r"has no weight_map"),
        (lambda index: [], r"has no weight_map"),
        (
            lambda index: {
                "weight_map": index["weight_map"] | {"model.norm.weight": "../x.safetensors"}
            },
            r"no file name",
        ),
        (
            lambda index: {
                "weight_map": index["weight_map"] | {"model.norm.weight": "/etc/passwd"}
            },
            r"no file name",
        ),
        (
            lambda index: {"weight_map": index["weight_map"] | {"model.norm.weight": 3}},
            r"no file name",
        ),
        (
            lambda index: {"weight_map": index["weight_map"] | {"model.norm.weight": ".."}},
            r"no file name|not in the fold",
        ),
        (
            lambda index: {
                "weight_map": index["weight_map"] | {"one.more": "model-00001-of-00004.safetensors"}
            },
            r"says that .* holds one\.more, but it does not|not in the folder",
        ),
    ],
)
def test_a_wrong_index_is_named(sharded, change, message):
    file = sharded / weight_files.INDEX_NAME
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ResourceError, match=rf"index\.json: .*({message})"):
        load_folder(sharded)


def test_an_index_that_leaves_a_parameter_out_is_an_error(sharded):
    file = sharded / weight_files.INDEX_NAME
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(
        ResourceError,
        match=r"lack 1 of the \d+ parameters config.json describes, e.g. model.norm.weight",
    ):
        load_folder(sharded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 2049},
            (
                r"embed_tokens.weight has shape \[2048, 64\] in model.safetensors, \[2049, 64\] by"
                r" config"
            ),
        ),
        ({"num_hidden_layers": 3}, r"lack 9 of the 29 parameters"),
        (
            {"tie_word_embeddings": False},
            r"lack 1 of the \d+ parameters config.json describes, e.g. lm_head.weight",
        ),
    ],
    ids=str,
)
def test_weights_and_config_of_two_models_are_an_error(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ResourceError, match=message):
        load_folder(folder)


def test_a_type_that_is_not_counted_here_is_built_without_weights(saved, tmp_path):
    shutil.copy(saved / "mamba" / "config.json", tmp_path)
    assert load_folder(tmp_path) == replace(load_folder(saved / "mamba"), name=tmp_path.name)


@pytest.mark.modes
def test_a_config_that_transformers_cannot_build_is_an_error(folder):
    change_config(folder, model_type="phi3", pad_token_id=3000)
    message = r"config\.json: transformers cannot build a phi3 from this config: Padding_idx must"
    with pytest.raises(ConfigError, match=message):
        load_folder(folder)


def test_a_type_whose_embedding_is_not_known_keeps_its_vocabulary(saved):
    assert load_folder(saved / "mamba", vocab_size=100).parameters > 0
    with pytest.raises(ConfigError, match="the model's weights name no embedding of tokens"):
        load_folder(saved / "mamba", vocab_size=101)


def test_stored_weights_are_counted_by_their_types(tmp_path):
    tensors = {
        "a": torch.zeros(4, 6),
        "b": torch.zeros(30, dtype=torch.bfloat16),
        "c": torch.zeros(5, dtype=torch.bfloat16),
        "table": torch.zeros(100, dtype=torch.int64),  # is no weight
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = weight_files.stored_weights(tmp_path)
    assert stored is not None
    assert stored.elements == {"float32": 24, "bfloat16": 35}
    assert stored.largest == {"float32": 24, "bfloat16": 30}
    assert stored.largest_file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (stored.total_bytes, stored.largest_bytes) == (24 * 4 + 35 * 2, 24 * 4)
    assert stored.converted_bytes("float32") == 35 * 4
    assert stored.largest_converted_bytes("float32") == 30 * 4
    assert stored.largest_converted_bytes("float16") == 30 * 2
    (tmp_path / "model.safetensors").unlink()
    assert weight_files.stored_weights(tmp_path) is None
