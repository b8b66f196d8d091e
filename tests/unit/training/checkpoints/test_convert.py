"""States of a checkpoint reach the parameters that they are of, whatever engine wrote them; no code
that a file holds runs."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from launch.base.errors import CheckpointError
from tests.builders import machine, plan, recipe_of
from training.checkpoints import convert

PLAIN = plan().strategy


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Held:
    def __init__(self, start: int) -> None:
        self.start = start


@pytest.mark.shows("F21", "a pickle that makes a folder; loaded without our reader it does")
@pytest.mark.parametrize("zipped", [True, False])
def test_an_object_in_a_pickle_gives_its_attributes_and_no_code_of_it_runs(tmp_path, zipped):
    file, marker = tmp_path / "optim_states.pt", tmp_path / "marker"
    parameter = torch.nn.Parameter(torch.arange(6.0))
    content = {"flat": parameter, "step": 3, "at": Held(7), "scaler": Payload(marker)}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    found = convert.read_pickle(file)
    assert torch.equal(found["flat"], parameter)
    assert (found["step"], found["at"].start) == (3, 7)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists()  # the payload is one


@pytest.mark.parametrize(
    ("engine", "zero_stage", "ranks", "mode", "num_processes", "is_needed"),
    [
        ("plain", 0, 1, "dual_gpu_nccl", 2, False),
        ("ddp", 0, 2, "single_gpu", 1, False),
        ("ddp", 0, 2, "cpu", 1, False),
        ("fsdp2", 0, 2, "fsdp2", 4, False),
        ("deepspeed", 2, 2, "deepspeed_zero2", 2, False),
        ("deepspeed", 2, 2, "deepspeed_zero2_offload", 2, False),
        ("deepspeed", 1, 2, "deepspeed_zero2", 2, False),
        ("deepspeed", 3, 2, "deepspeed_zero3", 2, False),
        ("deepspeed", 2, 2, "deepspeed_zero2", 4, True),
        ("deepspeed", 3, 2, "deepspeed_zero3", 3, True),
        ("deepspeed", 3, 2, "deepspeed_zero2", 2, True),
        ("deepspeed", 2, 2, "deepspeed_zero3", 2, True),
        ("deepspeed", 2, 2, "dual_gpu_nccl", 2, True),
        ("ddp", 0, 2, "deepspeed_zero2", 2, True),
        ("ddp", 0, 2, "fsdp2", 2, True),
        ("fsdp2", 0, 2, "dual_gpu_nccl", 2, True),
    ],
)
def test_what_an_engine_would_misread_is_converted(
    engine, zero_stage, ranks, mode, num_processes, is_needed
):
    described = {"engine": engine, "zero_stage": zero_stage, "world_size": ranks}
    strategy = replace(PLAIN, mode=mode, num_processes=num_processes)
    assert convert.is_needed(described, strategy) == is_needed


# ---- one process
# ---------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.frozen(inputs)))


def trainer_of(network: torch.nn.Module, *groups: tuple[str, ...]) -> Any:
    """The parts of a trainer that conversion reads, with AdamW on these groups of parameters."""
    parameters = dict(network.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [parameters[name] for name in group]} for group in groups], lr=0.1
    )
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=network,
        optimizer=SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups),
        lr_scheduler=schedule,
    )


def step(trainer: Any) -> torch.Tensor:
    """A step of optimizer and schedule; returns the loss before it."""
    loss = trainer.model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().sum()
    loss.backward()
    trainer.optimizer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.optimizer.optimizer.zero_grad()
    return loss


WEIGHTS, BIASES = ("first.weight", "second.weight"), ("first.bias", "second.bias")


@pytest.fixture
def saved(tmp_path) -> tuple[Any, Path, dict[str, Any]]:
    """A trainer after three steps, the files of its checkpoint, and their description."""
    trainer = trainer_of(Small(), WEIGHTS, BIASES)
    for _ in range(3):
        step(trainer)
    save_file(trainer.model.state_dict(), tmp_path / "model.safetensors")
    torch.save(trainer.optimizer.optimizer.state_dict(), tmp_path / "optimizer.pt")
    names = convert.optimizer_names(trainer)
    return trainer, tmp_path, {"engine": "plain", "optimizer_parameters": names}


def test_an_optimizer_with_other_groups_goes_on_as_the_one_that_was_saved(saved):
    trainer, source, described = saved
    assert described["optimizer_parameters"] == [list(WEIGHTS), list(BIASES)]
    network = Small()
    network.frozen.load_state_dict(trainer.model.frozen.state_dict())
    other = trainer_of(network, (*reversed(BIASES), *WEIGHTS))
    convert.write(source, described, other, source)
    assert not any("frozen" in key for key in load_file(source / convert.FILE))
    assert convert.load(other, PLAIN, source) == []
    convert.load_schedule(other, copy.deepcopy(trainer.lr_scheduler.state_dict()))
    for _ in range(3):
        assert torch.equal(step(trainer), step(other))


def test_parameters_without_states_are_named(saved):
    trainer, source, described = saved
    optimizer = torch.load(source / "optimizer.pt", weights_only=True)
    del optimizer["state"][1]  # of the second weight
    torch.save(optimizer, source / "optimizer.pt")
    convert.write(source, described, trainer, source)
    assert convert.load(trainer, PLAIN, source) == ["second.weight"]


def test_a_checkpoint_without_the_weights_of_a_trained_parameter_is_refused(saved):
    trainer, source, described = saved
    weights = load_file(source / "model.safetensors")
    save_file({"first.weight": weights["first.weight"]}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no weights for first\.bias and 2 more"):
        convert.write(source, described, trainer, source)


def test_the_files_of_an_adapter_leave_its_name_out(tmp_path):
    network = torch.nn.Module()
    network.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 3, bias=False)})
    network.head = torch.nn.Module()
    network.head.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2)})
    trainer = trainer_of(network, tuple(name for name, _ in network.named_parameters()))
    stored = {"lora_A.weight": (3, 2), "head.weight": (2, 3), "head.bias": (2,)}
    weights = {name: torch.rand(shape) for name, shape in stored.items()}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    torch.save(trainer.optimizer.optimizer.state_dict(), tmp_path / "optimizer.pt")
    described = {"engine": "ddp", "optimizer_parameters": convert.optimizer_names(trainer)}
    convert.write(tmp_path, described, trainer, tmp_path)
    convert.load(trainer, PLAIN, tmp_path)
    assert torch.equal(network.lora_A["default"].weight, weights["lora_A.weight"])
    assert torch.equal(network.head.modules_to_save["default"].bias, weights["head.bias"])


def test_a_schedule_of_two_groups_is_restored_in_one():
    before = trainer_of(Small(), WEIGHTS, BIASES)
    for _ in range(3):
        step(before)
    other = trainer_of(Small(), WEIGHTS + BIASES)
    convert.load_schedule(other, copy.deepcopy(before.lr_scheduler.state_dict()))
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1 / 4]
    step(other)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 5)


def test_the_rate_of_this_schedule_takes_the_place_of_that_in_a_checkpoint():
    trainer = trainer_of(Small(), WEIGHTS, BIASES)
    step(trainer)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 7.0  # another run's
    trainer.lr_scheduler = SimpleNamespace(scheduler=trainer.lr_scheduler)  # Accelerate's wrapper
    convert.apply_schedule(trainer)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1 / 2] * 2


# ---- ranks of DeepSpeed
# ---------------------------------------------------------------------------

NUM_RANKS = 11  # the name of rank 10 stands before that of rank 2
WHOLE = {
    name: torch.arange(float(start), float(start) + 25).reshape(shape)
    for name, start, shape in (("first", 0, (5, 5)), ("second", 100, (25,)))
}


def write_rank(folder: Path, rank: int, content: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder.parent / "latest").write_text(folder.name)
    name = f"zero_pp_rank_{rank}_mp_rank_00"
    torch.save({"optimizer_state_dict": content}, folder / f"{name}_optim_states.pt")
    shapes = [{name: whole.shape for name, whole in WHOLE.items()}]
    torch.save({"param_shapes": shapes}, folder / f"{name}_model_states.pt")


def joined(source: Path, zero_stage: int) -> dict[str, torch.Tensor]:
    network = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros_like(whole)) for name, whole in WHOLE.items()}
    )
    described = {"engine": "deepspeed", "zero_stage": zero_stage}
    convert.write(source, described, trainer_of(network, tuple(WHOLE)), source)
    return load_file(source / convert.FILE)


def assert_whole(states: dict[str, torch.Tensor]) -> None:
    for name, whole in WHOLE.items():
        assert torch.equal(states[f"weight/{name}"], whole)
        assert torch.equal(states[f"exp_avg/{name}"], -whole)
        assert states[f"step/{name}"] == 3


def test_the_parts_of_zero_3_are_joined_in_the_order_of_the_ranks(tmp_path):
    """Each weight has a part of equal length on each rank, the last of which are padded."""
    padded = [
        torch.nn.functional.pad(whole.flatten(), (0, 8), value=-1.0) for whole in WHOLE.values()
    ]
    for rank in range(NUM_RANKS):
        flat = torch.cat([whole[3 * rank : 3 * rank + 3] for whole in padded])
        states = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": -flat}}}
        content = {"fp32_flat_groups": [flat], "optimizer_state_dict": states}
        write_rank(tmp_path / "global_step3", rank, content)
    assert_whole(joined(tmp_path, zero_stage=3))


def test_a_file_of_zero_3_that_lacks_a_group_of_weights_is_not_taken_for_whole(tmp_path):
    content = {"fp32_flat_groups": [], "optimizer_state_dict": {"state": {}}}
    write_rank(tmp_path / "global_step3", 0, content)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        joined(tmp_path, zero_stage=3)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_slices_of_zero_1_and_2_are_joined_in_the_order_of_the_ranks(tmp_path, zero_stage):
    """A rank has a slice of all weights, one behind the other."""
    flat = torch.cat([whole.flatten() for whole in WHOLE.values()])
    for rank in range(NUM_RANKS):
        first, last = 5 * rank, min(5 * rank + 5, 50)
        mapping = {}
        for number, name in enumerate(WHOLE):
            start, end = max(first, 25 * number), min(last, 25 * number + 25)
            if start < end:
                mapping[name] = SimpleNamespace(start=start - first, numel=end - start)
        part = flat[first:last]
        content = {
            "base_optimizer_state": {"state": {0: {"step": 3, "exp_avg": -part}}},
            "param_slice_mappings": [mapping],
            "single_partition_of_fp32_groups": [part],
        }
        write_rank(tmp_path / "global_step3", rank, content)
    assert_whole(joined(tmp_path, zero_stage))


def test_a_rank_of_zero_2_takes_its_slice_of_all_states(saved):
    """Its slice: the last 4 elements of the first weight, then the first bias."""
    of, source, described = saved
    convert.write(source, described, of, source)
    network, flat = Small(), torch.zeros(9)
    for parameter in network.parameters():
        parameter._hp_mapping = None  # pyright: ignore
    for parameter, (start, count), to in (
        (network.first.weight, (11, 4), 0),
        (network.first.bias, (0, 5), 4),
    ):
        parameter._hp_mapping = SimpleNamespace(  # pyright: ignore
            param_group_index=0,
            lp_fragment_address=SimpleNamespace(start=start, numel=count),
            hp_fragment_address=SimpleNamespace(start=to, numel=count),
        )
    base = torch.optim.AdamW([flat])
    zero = SimpleNamespace(optimizer=base, single_partition_of_fp32_groups=[flat])
    trainer = trainer_of(network, (*WEIGHTS, *BIASES))
    trainer.deepspeed = SimpleNamespace(optimizer=zero)
    on = plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2)).strategy
    assert convert.load(trainer, on, source) == []
    states = of.optimizer.optimizer.state
    weight, bias = of.model.first.weight, of.model.first.bias
    assert torch.equal(network.second.weight, of.model.second.weight)
    assert torch.equal(flat, torch.cat([weight.flatten()[11:], bias]))
    assert base.state[flat]["step"] == 3
    for key in ("exp_avg", "exp_avg_sq"):
        expected = torch.cat([states[weight][key].flatten()[11:], states[bias][key]])
        assert torch.equal(base.state[flat][key], expected)
