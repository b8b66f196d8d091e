"""Layers whose frozen weights come from the host one by one train what layers do that stay: the
same code as on a card, without its streams."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import composed
from launch.base.workspace import Workspace
from launch.plan.resolve import resolve
from launch.predict.step.compose import Composer
from launch.predict.step.recorded import Recorded
from launch.predict.step.streamed import stream
from launch.render import run_files
from launch.run_folder.layout import RunDir
from launch.schema.levers import Levers
from launch.schema.recorded_step import SLOT, Log
from tests import builders
from tests.modes.trace.test_trace import LENGTH, recipe_of
from tests.train_cpu.test_equivalence import train
from tests.train_cpu.test_resume import kill_after
from training.levers.streaming import Streaming
from training.trace import step

pytestmark = pytest.mark.modes
STEPS, STREAMED = 20, 4  # of 6 layers
TRAINING: dict[str, Any] = {
    "max_steps": STEPS,
    "max_grad_norm": 0.0,
    "eval_steps": 7,
    "activation_checkpointing": True,
}
# the last product of a layer has no adapter: backward begins with a frozen weight
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["c_attn", "c_fc"]}
QLORA = {"load_in_4bit": True}


def recipe(folder: Path, **sections: Any) -> str:
    return str(builders.recipe(folder, "gpt2-tiny", lora=LORA, training=TRAINING, **sections))


def rendered(folder: Path, streamed: int, ranks: int, bf16: bool) -> Path:
    words = [f"--launch.num_processes={ranks}", f"--training.streamed_layers={streamed}"]
    words += [f"--training.bf16={str(bf16).lower()}"]
    words += [f"--training.per_device_train_batch_size={4 // ranks}"]
    words += ["--training.gradient_accumulation_steps=2"]
    choice = resolve(recipe(folder), words, trace=False)
    assert choice.plan.strategy.levers.streamed_layers == streamed
    run = RunDir.create(folder / "runs", "tiny", datetime.now())
    run_files.write_run(run, choice.recipe, choice.machine, choice.plan, Workspace.here())
    return run.root


@pytest.mark.parametrize(("ranks", "bf16"), [(1, False), (2, False), (1, True)])
def test_losses_and_gradients_of_twenty_steps_are_those_of_layers_that_stay(tmp_path, ranks, bf16):
    """In float32 and under autocast, with GPT-2's dropout and evaluations in between."""
    resident, streamed = (
        train(tmp_path, {name: rendered(tmp_path / name, count, ranks, bf16)}, ranks)[name]
        for name, count in (("resident", 0), ("streamed", STREAMED))
    )
    assert len(resident["losses"]) == STEPS
    assert torch.equal(resident["losses"], streamed["losses"])
    assert torch.equal(resident["gradients"], streamed["gradients"])
    assert resident["gradients"].abs().max() > 0


# Each of two ranks: its loss and that of all weights on the device, resident bytes of its part of
# the shared weights. argv: output file
TWO_RANKS = r"""
import re, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from launch.schema.levers import Levers
from training.levers.streaming import Streaming

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=6)
network = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
tokens = torch.arange(24).view(2, 12)
loss = network(input_ids=tokens, labels=tokens).loss.item()
if rank:  # its weights are not those that it computes with
    for name, weight in network.named_parameters():
        weight.data.zero_() if ".layers." in name and ".lora_" not in name else None
streaming = Streaming(network, Levers(streamed_layers=6), torch.device("cpu"), True, rank, 2)
streaming.attach()
torch.distributed.barrier()
streamed = network(input_ids=tokens, labels=tokens).loss.item()
torch.distributed.barrier()
mapped = r"memfd:streamed layers.*\n(?:.*\n)*?Pss: +(\d+)"
sizes = sum(map(int, re.findall(mapped, Path("/proc/self/smaps").read_text()))) << 10
torch.distributed.barrier()
torch.save((loss, streamed, sizes, streaming.bytes), f"{sys.argv[1]}/{rank}.pt")
"""


def test_two_ranks_of_a_machine_compute_with_the_weights_that_the_first_one_keeps(tmp_path):
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    argv = [sys.executable, *words, str(tmp_path / "ranks.py"), str(tmp_path)]
    env = builders.environment(tmp_path / "workspace", OMP_NUM_THREADS="1")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for loss, streamed, _, _ in ranks:
        assert loss == streamed == ranks[0][0]
    size_bytes = ranks[0][-1]
    assert size_bytes > 1 << 20
    assert sum(rank[2] for rank in ranks) == pytest.approx(size_bytes, rel=0.01)


class Copies(Streaming):
    """Names the layers that are copied, among the events of a pass."""

    def __init__(self, events: list[tuple[str, int]], *args: Any) -> None:
        super().__init__(*args)
        self._events = events

    def copy(self, place: int) -> None:
        self._events.append(("copied", place))
        super().copy(place)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_next_layer_is_copied_before_one_computes_and_twice_in_a_micro_batch(use_reentrant):
    """Streamed are layers 1, 3, 5, 7 and 9 of 10."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=10)
    config.num_attention_heads = config.num_key_value_heads = 2
    network: Any = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"])
    )
    network.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    network.enable_input_require_grads()
    network.train()
    events: list[tuple[str, int]] = []
    streaming = Copies(events, network, Levers(streamed_layers=5), torch.device("cpu"))
    for number, layer in enumerate(network.base_model.model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda *_, number=number: events.append(("computed", number))
        )
    streaming.attach()
    tokens = torch.arange(24).view(2, 12)

    def micro_batch() -> list[tuple[str, int]]:
        events.clear()
        network(input_ids=tokens, labels=tokens).loss.backward()
        return [(kind, place if kind == "copied" else place // 2) for kind, place in events]

    micro_batch()
    steady = micro_batch()
    copies = [place for kind, place in steady if kind == "copied"]
    # two are in the slots when the direction turns
    assert copies == [2, 3, 4, 2, 1, 0]
    forward = steady[: steady.index(("copied", 4)) + 1]
    for place in (2, 3, 4):
        assert ("computed", place - 2) in forward[: forward.index(("copied", place))]
        # the layer before it, which is streamed too, has not computed yet
        assert forward[: forward.index(("copied", place))].count(("computed", place - 1)) == 1
    network.eval()
    with torch.no_grad():
        network(input_ids=tokens)


def logs(quantization: dict[str, Any] | None) -> tuple[Log, Log]:
    """A step that streams layers: recorded, and composed of one that does not."""
    training = {"activation_checkpointing": True, "bf16": True, "gradient_accumulation_steps": 2}
    model = {"dtype": "bfloat16"}
    sections = {"lora": {"r": 4}, "training": training, "model": model}
    sections |= {"quantization": quantization} if quantization else {}
    asked, plan = recipe_of("qwen2-0.5b", **sections)
    streams = replace(plan, strategy=plan.strategy.with_levers(streamed_layers=STREAMED))
    recorded = step.step(asked, streams, (LENGTH, LENGTH))
    base = step.record(asked, plan, (LENGTH, LENGTH), True)
    assert base.period  # few layers were recorded
    return recorded, stream(Composer(Recorded(base)).log(), streams.strategy.levers)


@pytest.mark.parametrize("quantization", [None, QLORA])
def test_a_recorded_step_is_the_composed_one_event_for_event(quantization):
    recorded, made = logs(quantization)
    assert not composed.difference(made, recorded)
    slots = [block.fixed_bytes for block in made.blocks if block.op == SLOT]
    assert len(slots) == 2 and slots[0] == slots[1] > 1 << 20


def exported(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The adapter, and the model into which it was merged."""
    return load_file(folder / "adapter/adapter_model.safetensors"), builders.weights(folder)


@pytest.mark.parametrize("quantization", [None, QLORA])
def test_a_killed_run_goes_on_and_exports_the_model_of_layers_that_stay(tmp_path, quantization):
    words = ["run", recipe(tmp_path, quantization=quantization), "--training.save_steps=5"]
    stays, streams = (
        [*words, f"--training.streamed_layers={count}", f"--output_dir={tmp_path / str(count)}"]
        for count in (0, STREAMED)
    )
    resident = builders.launch(tmp_path / "whole", *stays)
    assert resident.returncode == 0, resident.stderr + resident.stdout
    shutil.copytree(tmp_path / "whole/.cache", tmp_path / "killed/.cache")  # tokenised rows
    kill_after(tmp_path / "killed", streams, step=13)
    again = builders.launch(tmp_path / "killed", *streams)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "resuming from checkpoint-0000" in again.stdout
    assert "checked:" in again.stdout
    for expected, found in zip(
        exported(tmp_path / "0"), exported(tmp_path / str(STREAMED)), strict=True
    ):
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_layers_of_a_folder_that_is_packed_train_the_adapter_of_its_original(tmp_path):
    of_base = builders.recipe(tmp_path / "base", "gpt2-tiny", training={"max_steps": 1})
    done = builders.launch(tmp_path / "base", "run", str(of_base))
    assert done.returncode == 0, done.stderr + done.stdout
    original = tmp_path / "base/model"
    packed = builders.packed(original, tmp_path / "packed")
    adapters = []
    for name, base, count in (("resident", original, 0), ("streamed", packed, STREAMED)):
        sections = {"model": {"shape": None, "path": str(base)}, "quantization": QLORA}
        words = ["run", recipe(tmp_path / name, **sections), f"--training.streamed_layers={count}"]
        done = builders.launch(tmp_path / name, *words, "--training.max_steps=4")
        assert done.returncode == 0, done.stderr + done.stdout
        adapters.append(load_file(tmp_path / name / "model/adapter_model.safetensors"))
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.streamed_layers=2"], "2 would save nothing; stream 3 or more, or 0"),
        (["--training.streamed_layers=9"], "the model has 6 decoder layers"),
        (
            ["--training.streamed_layers=4", "--training.activation_checkpointing=false"],
            "checkpoint every layer",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_the_reason(tmp_path, words, message):
    done = builders.launch(tmp_path, "plan", recipe(tmp_path), *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_weights_that_are_trained_are_not_streamed(tmp_path):
    training = {**TRAINING, "streamed_layers": STREAMED}
    file = builders.recipe(tmp_path, "gpt2-tiny", training=training)
    done = builders.launch(tmp_path, "plan", str(file))
    assert done.returncode == 2
    assert "add lora, or leave it out" in done.stderr
