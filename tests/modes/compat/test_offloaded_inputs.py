"""What checkpointing keeps goes to the host and comes back with the same values. A CPU stands for
the card, and other memory of it for the host's."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests import real_steps
from tests.builders import plan, recipe_of
from training.compat.levers_private import replaced
from training.levers.offloading import SAVE_ON_CPU, LayerInput, Offloading
from training.loop.trainer import LowMemTrainer

LENGTH, STEPS, LAYERS = 32, 3, 2
CPU = torch.device("cpu")


class Counted(Offloading):
    """Notes the bytes that are sent and fetched, and the most inputs on the device at once."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._inputs: list[weakref.ref[LayerInput]] = []
        self.sent_bytes: list[int] = []
        self.fetched = self.most = self.taken = 0

    def sent(self, tensor: torch.Tensor) -> LayerInput:
        layer_input = super().sent(tensor)
        self.sent_bytes.append(tensor.nbytes)
        self._inputs.append(weakref.ref(layer_input))
        self.most = max(self.most, self.on_device())
        return layer_input

    def empty_on_device(self, layer_input: LayerInput) -> torch.Tensor:
        self.fetched += 1
        return super().empty_on_device(layer_input)

    def received(self, layer_input: LayerInput) -> torch.Tensor:
        self.most = max(self.most, self.on_device())
        return super().received(layer_input)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        self.taken += not any(len(buffer) >= size_bytes for buffer in self._free)
        return super().buffer(size_bytes)

    def inputs(self) -> list[LayerInput]:
        """Those of a graph that is not used up, in their order."""
        return [
            layer_input for reference in self._inputs if (layer_input := reference()) is not None
        ]

    def on_device(self) -> int:
        return sum(layer_input.on_device is not None for layer_input in self.inputs())


def trained(offloading: Offloading | None, **sections: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps of two micro-steps with checkpointing."""
    training = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "activation_checkpointing": True,
        **sections.pop("training", {}),
    }
    shape = sections.pop("shape", "llama-tiny")
    recipe = recipe_of(model={"shape": shape}, training=training, **sections)
    chosen = plan(recipe)
    on_host = offloading is not None
    strategy = chosen.strategy.with_levers(activation_offloading=on_host)
    planned = replace(chosen, strategy=strategy)
    copies = (LowMemTrainer, "host_copies", lambda _: offloading)
    with replaced([copies, (*SAVE_ON_CPU, getattr(*SAVE_ON_CPU))]):
        trainer = real_steps.trainer(recipe, planned, LENGTH, True, STEPS)
        trainer.train()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "bf16": {"training": {"bf16": True}},
    "LoRA": {"lora": {"r": 2}},
    "every second layer": {"training": {"activation_checkpointing_kwargs": {"every_n_layers": 2}}},
    "packed rows": {"data": {"packing": True}},
    "encoder and decoder": {"shape": "t5-tiny"},
    "reentrant": {"training": {"activation_checkpointing_kwargs": {"use_reentrant": True}}},
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_plain_checkpointing_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offloading = Counted()
    offloaded = trained(offloading, **CASES[name])
    assert offloading.sent_bytes
    for key, value in trained(None, **CASES[name]).items():
        torch.testing.assert_close(offloaded[key], value, rtol=0, atol=0, msg=key)


def test_inputs_of_a_layer_go_once_come_back_but_the_last_and_host_memory_is_used_again(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    offloading = Counted()
    trained(offloading)
    micro_steps = STEPS * 2
    assert offloading.sent_bytes == [3 * LENGTH * 64 * 4] * LAYERS * micro_steps
    assert offloading.fetched == (LAYERS - 1) * micro_steps
    assert offloading.taken == LAYERS


class Deep(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, offloading: Offloading | None) -> torch.Tensor:
        for layer in self.layers:
            if offloading is None:
                x = checkpoint(lambda y, layer=layer: layer(y).relu(), x, use_reentrant=False)
            else:
                with offloading.hooks():
                    x = checkpoint(lambda y, layer=layer: layer(y).relu(), x, use_reentrant=False)
        return x.sum()


def test_one_input_is_on_its_way_however_deep_a_model_is():
    network, offloading = Deep(12), Counted()
    for rows in (4, 9, 2, 9):  # rows of many lengths
        loss = network(torch.ones(rows, 8, requires_grad=True), offloading)
        assert offloading.on_device() == 1  # the last
        loss.backward()
        assert not offloading.inputs()
    assert offloading.most == 1  # beside the one that its layer computes with
    # of 4 rows, then of 9, in which shorter ones fit
    assert offloading.taken == 12 + 12
    plain = Deep(12)
    for rows in (4, 9, 2, 9):
        plain(torch.ones(rows, 8, requires_grad=True), None).backward()
    for one, other in zip(network.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_what_comes_back_is_the_copy_of_the_host():
    """Before backward, the host's copies of all inputs but the last are changed."""
    network, offloading = Deep(3), Counted()
    loss = network(torch.ones(2, 8, requires_grad=True), offloading)
    for layer_input in offloading.inputs()[:-1]:
        layer_input.host.zero_()
    loss.backward()
    plain = Deep(3)
    plain(torch.ones(2, 8, requires_grad=True), None).backward()
    for index, is_same in enumerate((False, False, True)):
        one, other = (each.get_parameter(f"layers.{index}.weight") for each in (network, plain))
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad) == is_same


def test_weights_and_their_views_numbers_of_positions_and_nothing_stay_where_they_are():
    weight, offloading = torch.nn.Parameter(torch.ones(4, 4)), Counted()
    inputs = torch.ones(3, 4, requires_grad=True)
    with offloading.hooks():
        for each in (weight, weight[:2], weight.t()):
            torch.nn.functional.linear(inputs, each)
        inputs * torch.ones(3, 4, dtype=torch.int64)
        inputs[:0] * torch.ones(0, 4, requires_grad=True)
    assert offloading.sent_bytes == [inputs.nbytes] * 3


def test_a_forward_pass_without_a_backward_pass_keeps_nothing():
    network, offloading = Deep(3), Counted()
    for _ in range(3):
        network(torch.ones(2, 8, requires_grad=True), offloading)
        assert len(offloading.inputs()) == 1  # the last, until the next layer runs
    assert offloading.taken == 3
