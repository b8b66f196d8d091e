"""Folders whose linear weights bitsandbytes has packed in 4 bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from launch.base.errors import ConfigError, ResourceError
from launch.plan import resolve
from launch.predict.models import weight_files
from launch.predict.models.weight_files import Packing
from launch.schema.model_sections import ModelSection
from tests import builders

pytestmark = pytest.mark.unit

NF4 = {"quant_type": "nf4", "blocksize": 64, "shape": [4, 32], "nested_blocksize": 256}


def packed(name: str = "a.weight", num_bytes: int = 64, **state: Any) -> dict[str, torch.Tensor]:
    """The tensors of one weight of 4 x 32, as bitsandbytes writes them, or with another state."""
    described = json.dumps({**NF4, **state}).encode()
    return {
        name: torch.zeros(num_bytes, 1, dtype=torch.uint8),
        f"{name}.absmax": torch.zeros(2, dtype=torch.uint8),
        f"{name}.nested_absmax": torch.zeros(1),
        f"{name}.nested_quant_map": torch.zeros(256),
        f"{name}.quant_map": torch.zeros(16),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(described), dtype=torch.uint8),
    }


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("types", "is_same"),
    [
        ((torch.float32, torch.float32), True),
        ((torch.float32, torch.bfloat16), True),
        ((torch.float16, torch.float32), True),
        ((torch.float64, torch.float32), None),
        ((torch.float16, torch.bfloat16), None),  # two roundings of one number
    ],
)
def test_weights_in_another_type_are_the_same_if_one_is_the_other_rounded(tmp_path, types, is_same):
    torch.manual_seed(0)
    weight = torch.randn(3, 400_000) * torch.logspace(-9, 9, 400_000)
    weight[0, :3] = torch.tensor([1.00390625, 1.01171875, -0.0])  # between two of bfloat16
    other = weight.clone()
    other[2, 200_000] *= 2

    def tensor(name: str, values: torch.Tensor) -> weight_files.Tensor:
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, {"a.weight": values})
        return (weight_files.tensors(tmp_path / name) or {})["a.weight"]

    first, second = (tensor(str(n), weight.to(dtype)) for n, dtype in enumerate(types))
    assert weight_files.same_values(first, second) is is_same
    unlike = tensor("other", other.to(types[0]))
    assert weight_files.same_values(unlike, second) is (None if is_same is None else False)
    flat = tensor("flat", weight.to(types[0]).reshape(-1))
    assert weight_files.same_values(flat, second) is False


def test_a_packed_weight_has_its_own_shape_and_no_tensor_beside_it(tmp_path):
    folder_of(tmp_path, {**packed(), "norm.weight": torch.zeros(32, dtype=torch.bfloat16)})
    model = weight_files.tensors(tmp_path)
    assert model is not None
    assert {name: each.shape for name, each in model.items()} == {
        "a.weight": (4, 32),
        "norm.weight": (32,),
    }
    assert weight_files.packing(tmp_path) == Packing("nf4", True)
    stored = weight_files.stored_weights(tmp_path)
    assert stored is not None
    assert stored.elements == {"bfloat16": 32}
    of_state = sum(tensor.nbytes for tensor in packed().values())
    assert (stored.packed_bytes, stored.total_bytes) == (of_state, of_state + 64)
    plain = {**packed(nested_blocksize=None), "b.weight": torch.zeros(4)}
    assert weight_files.packing(folder_of(tmp_path, plain)) == Packing("nf4", False)
    assert weight_files.packing(folder_of(tmp_path, {"b.weight": torch.zeros(4)})) is None


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (packed(blocksize=128), "in blocks of 128 of nf4; expected two weights a byte in blocks"),
        (packed(quant_type="int4"), "in blocks of 64 of int4; expected"),
        (packed(num_bytes=60), "a.weight has 60 bytes, for a shape of [4, 32]"),
        (packed(shape="x"), "the state of a.weight is damaged"),
        ({**packed(), **packed("b.weight", nested_blocksize=None)}, "are packed in several ways"),
        ({"a.weight": torch.zeros(4, dtype=torch.int8)}, "a.weight is of type I8, expected F64"),
    ],
)
def test_what_cannot_be_packed_so_is_named(tmp_path, tensors, words):
    with pytest.raises(ResourceError, match=re.escape(words)):
        weight_files.tensors(folder_of(tmp_path, tensors))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder that transformers has written, and another in which one layer is not packed."""
    root = tmp_path_factory.mktemp("packed")
    config = yaml.safe_load((builders.CODE / "configs/models/llama-tiny.yaml").read_text())
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    original.save_pretrained(root / "original")
    for name, skipped in (("all", None), ("part", ["lm_head", "gate_proj"])):
        how = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped
        )
        model = AutoModelForCausalLM.from_pretrained(
            root / "original", quantization_config=how, device_map={"": "cpu"}
        )
        model.save_pretrained(root / name)
    return root


def test_a_folder_of_transformers_is_the_model_of_its_original(llama):
    read = [
        builders.model_size(ModelSection(path=str(llama / name)), None, root=builders.CODE)
        for name in ("original", "all")
    ]
    assert read[0].parameters == read[1].parameters
    assert "quantization_config" not in read[1].config
    with pytest.raises(ResourceError, match=r"packed [\d,]+ of the [\d,]+ weights .*gate_proj"):
        builders.model_size(ModelSection(path=str(llama / "part")), None, root=builders.CODE)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "add --quantization.load_in_4bit=true --lora.r=16, or take the model in 16"),
        ({"lora": {"r": 4}}, "add --quantization.load_in_4bit=true, or take the model in 16"),
        (
            {"lora": {"r": 4}, "quantization": {"bnb_4bit_quant_type": "fp4"}},
            "quantization.bnb_4bit_quant_type: 'fp4', but the weights in ",
        ),
        (
            {"lora": {"r": 4}, "quantization": {"bnb_4bit_use_double_quant": True}},
            "bnb_4bit_use_double_quant: true, but the weights in ",
        ),
    ],
)
def test_a_recipe_that_names_other_weights_is_refused(llama, sections, words):
    if "quantization" in sections:
        sections = {**sections, "quantization": {"load_in_4bit": True, **sections["quantization"]}}
    recipe = builders.recipe_of(model={"shape": None, "path": str(llama / "all")}, **sections)
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve.as_packed(recipe)


def test_what_a_recipe_leaves_open_is_that_of_the_folder(llama):
    sections = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}
    recipe = builders.recipe_of(model={"shape": None, "path": str(llama / "all")}, **sections)
    found = resolve.as_packed(recipe).quantization
    assert found is not None
    assert (found.bnb_4bit_quant_type, found.bnb_4bit_use_double_quant) == ("nf4", False)
    original = builders.recipe_of(
        model={"shape": None, "path": str(llama / "original")}, **sections
    )
    assert resolve.as_packed(original) is original
