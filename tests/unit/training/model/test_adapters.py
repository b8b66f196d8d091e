"""Adapters of LoRA: what they cast, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from launch.schema.recipe import Recipe
from tests.builders import plan, recipe_of
from tests.real_steps import trainer
from training.compat.transformers_private import Network

pytestmark = pytest.mark.unit

LENGTH, STEPS = 16, 2
MODEL = {"shape": "llama-tiny", "dtype": "bfloat16"}
AUTOCAST = {"bf16": True}


class WideCasts(TorchDispatchMode):
    """Counts the casts of activations to float32, with the width of their last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and out.dtype is torch.float32
        self.count += is_cast and out.dim() == 3
        return out


class Gradients(TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = kwargs["model"].named_parameters()
        self.of_steps.append(
            {name: weight.grad.clone() for name, weight in trained if weight.grad is not None}
        )


def asked(**sections: Any) -> Recipe:
    lora = {"r": 4, "init_lora_weights": False, "fused_adapters": False, **sections.pop("lora", {})}
    training = {"per_device_train_batch_size": 2, **AUTOCAST, **sections.pop("training", {})}
    return recipe_of(**{"model": MODEL, "lora": lora, "training": training, **sections})


def with_casts_of_peft(network: Network) -> None:
    for layer in network.modules():
        vars(layer).pop("_cast_input_dtype", None)


def trained(
    recipe: Recipe, is_plain: bool = False
) -> tuple[float, list[Mapping[str, torch.Tensor]], int]:
    """The loss of some steps, their gradients, and the casts of activations to float32.
    `is_plain`: with PEFT's own casts."""
    made, gradients = trainer(recipe, plan(recipe), LENGTH, True, STEPS), Gradients()
    made.add_callback(gradients)
    if is_plain:
        with_casts_of_peft(made.model)
    with WideCasts() as casts:
        loss = made.train().training_loss
    return loss, gradients.of_steps, casts.count


SAME = {
    "LoRA": {},
    "rsLoRA": {"lora": {"use_rslora": True}},
    "copies of modules": {"lora": {"modules_to_save": ["lm_head", "model.norm"]}},
    "tokens": {"lora": {"trainable_token_indices": [3, 5]}},
    "checkpointing": {"training": {"activation_checkpointing": True}},
    "gpt2": {"model": {"shape": "gpt2-tiny", "dtype": "bfloat16"}},
    "bf16 adapters": {"lora": {"autocast_adapter_dtype": False}},
    "4 bits": {"quantization": {"load_in_4bit": True}},
    "float32": {"model": {"shape": "llama-tiny"}},
}


@pytest.mark.parametrize("name", SAME)
def test_without_the_cast_of_peft_loss_and_gradients_have_the_same_bits(name):
    recipe = asked(**SAME[name])
    loss, gradients, casts = trained(recipe)
    plain_loss, plain_gradients, plain_casts = trained(recipe, is_plain=True)
    assert loss == plain_loss
    for step, plain_step in zip(gradients, plain_gradients, strict=True):
        assert step.keys() == plain_step.keys()
        assert all(torch.equal(gradient, plain_step[each]) for each, gradient in step.items())
    assert (casts < plain_casts) is (name != "bf16 adapters")  # inputs of their type


@pytest.mark.parametrize("lora", [{"lora_dropout": 0.5}, {"use_dora": True}])
def test_dropout_and_dora_compute_in_the_type_that_peft_casts_to(lora):
    network = trainer(asked(lora=lora), plan(asked(lora=lora)), LENGTH, True, STEPS).model
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    assert layers
    assert not any("_cast_input_dtype" in vars(layer) for layer in layers)


def test_a_dropout_in_bf16_drops_the_same_and_scales_by_a_rounded_factor():
    """The reason why the cast stays there."""
    values = torch.randn(64, 64).bfloat16()
    torch.manual_seed(0)
    wide = functional.dropout(values.float(), 0.05).bfloat16()
    torch.manual_seed(0)
    narrow = functional.dropout(values, 0.05)
    assert torch.equal(wide == 0, narrow == 0)
    assert not torch.equal(wide, narrow)


def test_without_autocast_peft_casts():
    network = trainer(asked(), plan(asked()), LENGTH, True, STEPS).model
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        assert network(input_ids=ids).logits.isfinite().all()
