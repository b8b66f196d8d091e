"""lora.autocast_adapter_dtype: false. Adapters have the type of their layers, as in PEFT; their
bytes are predicted exactly in memory, gradients, states and on the disk."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from launch.base.errors import ConfigError
from launch.plan import facts as plan_facts
from launch.predict import optimizers
from launch.predict import parameters as predict_parameters
from launch.schema.model_sections import LoraSection, ModelSection, QuantizationSection
from launch.schema.plan import ModelSize
from tests import builders
from tests.unit.predict.test_modules_to_save import (
    batch,
    config_of,
    real_model,
    shapes_of,
    targets_of,
    trained_of,
)
from training.model import build, four_bit
from training.model.build import with_lora

NAMES = ("llama", "tied", "qwen3", "gpt2", "t5")
HALF = ModelSection(shape="any", dtype="bfloat16")


def lora_of(**fields) -> LoraSection:
    return LoraSection(r=4, autocast_adapter_dtype=False, **fields)


def as_a_user(model: torch.nn.Module, name: str, lora: LoraSection) -> PeftModel:
    """PEFT's own model with these adapters."""
    config = LoraConfig(
        r=lora.r,
        use_dora=lora.use_dora,
        target_modules=list(targets_of(name, lora)),
        modules_to_save=list(lora.modules_to_save) or None,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def types_of(network: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (part.shape, part.dtype) for name, part in trained_of(network).items()}


def states_of(name: str, lora: LoraSection, dtype: str, quantization=None):
    kind = config_of(name)["model_type"]
    return optimizers.model_state(
        shapes_of(name),
        (),
        lora,
        predict_parameters.FAMILIES[kind],
        "adamw_torch",
        dtype,
        quantization,
    )


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"modules_to_save": ("norm",)}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_gradients_and_states_have_the_bytes_of_a_real_peft_model(name, dtype, fields):
    if fields.get("modules_to_save") and name in ("gpt2", "t5"):
        fields = {"modules_to_save": ("ln_f",) if name == "gpt2" else ("final_layer_norm",)}
    lora = lora_of(**fields)
    ours = with_lora(real_model(name, dtype), lora, targets_of(name, lora))
    theirs = as_a_user(real_model(name, dtype), name, lora)
    assert types_of(ours) == types_of(theirs)
    assert {kind for _, kind in types_of(ours).values()} == {getattr(torch, dtype)}
    states = states_of(name, lora, dtype)
    assert states.weights_bytes == sum(part.nbytes for part in theirs.parameters())
    trained = list(trained_of(theirs).values())
    theirs(**batch(name)).loss.backward()
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    assert states.gradients_bytes == sum(part.grad.nbytes for part in trained)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert states.optimizer_bytes == sum(value.nbytes for value in moments if value.ndim)
    in_float32 = states_of(name, LoraSection(r=4, **fields), dtype)
    if dtype == "bfloat16" and not fields.get("modules_to_save"):
        assert states.gradients_bytes * 2 == in_float32.gradients_bytes


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_traced_model_has_the_same_types(name, use_dora):
    lora, size = lora_of(use_dora=use_dora), ModelSize("any", config_of(name), 0, 0)
    traced = build.without_weights(HALF, size, lora, targets_of(name, lora))
    real = with_lora(real_model(name, "bfloat16"), lora, targets_of(name, lora))
    assert types_of(traced) == types_of(real)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_adapters_of_4_bit_layers_have_the_type_that_these_compute_in(name, dtype, compute):
    in_4_bits = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype=compute)
    lora, size = lora_of(), ModelSize("any", config_of(name), 0, 0)
    section = ModelSection(shape="any", dtype=dtype)
    theirs = as_a_user(build.from_shape(section, size, in_4_bits), name, lora)
    ours = with_lora(build.from_shape(section, size, in_4_bits), lora, targets_of(name, lora))
    assert types_of(ours) == types_of(theirs)
    traced = build.without_weights(section, size, lora, targets_of(name, lora), in_4_bits)
    assert types_of(traced) == types_of(theirs)
    states = states_of(name, lora, dtype, in_4_bits)
    assert states.gradients_bytes == sum(part.nbytes for part in trained_of(theirs).values())
    parts = [each for part in theirs.parameters() for each in (part, *four_bit.scales(part))]
    assert states.weights_bytes == sum(each.untyped_storage().nbytes() for each in parts)


def test_added_tokens_have_the_type_of_the_embeddings():
    lora = lora_of(trainable_token_indices=(3, 5))
    network = with_lora(real_model("llama", "bfloat16"), lora, targets_of("llama", lora))
    assert any("trainable_tokens_delta" in name for name in trained_of(network))
    trained = trained_of(network).values()
    assert {part.dtype for part in trained} == {torch.bfloat16}
    states = states_of("llama", lora, "bfloat16")
    assert states.gradients_bytes == sum(part.nbytes for part in trained)


def test_a_checkpoint_has_the_predicted_bytes_and_loads_in_the_same_type(tmp_path):
    lora = lora_of()
    network = with_lora(real_model("llama", "bfloat16"), lora, targets_of("llama", lora))
    for part in trained_of(network).values():
        torch.nn.init.normal_(part)
    network.save_pretrained(tmp_path)
    recipe = builders.recipe_of(model={"dtype": "bfloat16"}).model_copy(update={"lora": lora})
    counted = plan_facts.model_size(
        recipe, config_of("llama"), shapes_of("llama"), predict_parameters.FAMILIES["llama"]
    )
    written = load_file(tmp_path / "adapter_model.safetensors").values()
    assert sum(part.nbytes for part in written) == counted.lora_bytes
    fresh = with_lora(real_model("llama", "bfloat16"), lora, targets_of("llama", lora))
    fresh.load_adapter(tmp_path, "default", is_trainable=True)  # as transformers.Trainer resumes
    assert types_of(fresh) == types_of(network)
    for name, part in trained_of(fresh).items():
        assert torch.equal(part, trained_of(network)[name])
    plain = PeftModel.from_pretrained(real_model("llama", "bfloat16"), tmp_path)
    assert all(map(math.isfinite, plain(**batch("llama")).logits.flatten().tolist()))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"dtype": "float16"}}, "cannot train model.dtype float16 beside fp16 autocast"),
        (
            {"quantization": {"load_in_4bit": True}},
            "cannot train lora.autocast_adapter_dtype: false beside fp16 autocast.*; leave"
            " lora.autocast_adapter_dtype out",
        ),
    ],
)
def test_half_precision_adapters_are_not_trained_under_fp16_autocast(sections, words):
    common = {"training": {"fp16": True}, "launch": {"mode": "single_gpu"}}
    lora = {"r": 4, "autocast_adapter_dtype": False}
    with pytest.raises(ConfigError, match=words):
        builders.plan(builders.recipe_of(lora=lora, **common, **sections), builders.machine(1))
    assert builders.plan(  # adapters in float32, as by default
        builders.recipe_of(lora={"r": 4}, **common, **sections), builders.machine(1)
    )
