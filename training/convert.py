"""A checkpoint of one engine or number of ranks, for another: its trained weights and optimizer states by name.

Only what is trained is carried: frozen weights are those that the model was built with. Rank 0 takes the files apart
into one safetensors file, `<state>/<parameter>`, and every rank takes its part of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Trainer

from launch.errors import CheckpointError
from launch.schema import Strategy

FILE = "states.safetensors"
WEIGHT = "weight"
States = dict[str, torch.Tensor]  # "<state>/<parameter>"; a state is weight, exp_avg, ..., or step, which is a scalar
ADAPTER = ".default."  # PEFT's name of the adapter, which it leaves out of its files


def is_needed(described: Mapping[str, Any], strategy: Strategy) -> bool:
    """Whether this engine would misread the checkpoint's own files."""
    then, now = described["engine"], strategy.engine
    if {then, now} <= {"plain", "ddp"}:
        return False
    if then == "fsdp2" or then != now:
        return then != now
    # ZeRO 1 and 2 write the same slices, one a rank
    same_slices = (described["zero_stage"] == 3) == (strategy.zero_stage == 3)
    return not (same_slices and described["world_size"] == strategy.num_processes)


def write(source: Path, described: Mapping[str, Any], trainer: Trainer, folder: Path) -> None:
    """The states of a checkpoint that has been verified, in `folder`. Raises CheckpointError when they are others."""
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in trained(trainer)}
    states = {"plain": _plain, "ddp": _plain, "deepspeed": _zero, "fsdp2": _fsdp2}[described["engine"]](
        source, described, shapes
    )
    missing = [name for name in shapes if f"{WEIGHT}/{name}" not in states]
    if missing:
        raise CheckpointError(
            f"{source}: has no weights for {missing[0]} and {len(missing) - 1} more of the parameters that this model"
            " trains; continue with the mode that wrote it, or start over with --resume never"
        )
    shaped = {
        key: tensor.reshape(shapes[key.partition("/")[2]]).contiguous() if tensor.dim() else tensor
        for key, tensor in states.items()
        if key.partition("/")[2] in shapes
    }
    save_file(shaped, folder / FILE)


def trained(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every trained parameter with its name in the model itself, whatever it is wrapped in."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    return ((name, one) for name, one in network.named_parameters() if one.requires_grad)


def optimizer_names(trainer: Trainer) -> list[list[str]]:
    """The names of the optimizer's parameters, by group: its file only numbers them."""
    names = {id(parameter): name for name, parameter in trained(trainer)}
    return [[names[id(one)] for one in group["params"]] for group in trainer.optimizer.param_groups]


# ---- out of the files of an engine ----------------------------------------------------------------------------------


def _plain(source: Path, described: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    files = sorted([*source.glob("model*.safetensors"), *source.glob("adapter_model.safetensors")])
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    found: States = {}
    for name in shapes:
        stored = name if name in weights else name.replace(ADAPTER, ".")
        if stored in weights:
            found[f"{WEIGHT}/{name}"] = weights[stored]
    state = torch.load(source / "optimizer.pt", weights_only=True, map_location="cpu")
    groups = zip(state["param_groups"], described["optimizer_parameters"], strict=True)
    numbered = [pair for group, names in groups for pair in zip(group["params"], names, strict=True)]
    for number, name in numbered:
        for key, value in state["state"].get(number, {}).items():
            found[f"{key}/{name}"] = torch.as_tensor(value)
    return found


def _rank_of(file: Path) -> int:
    return int(re.findall(r"zero_pp_rank_(\d+)_", file.name)[0])


def _zero(source: Path, described: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    """Joins the ranks' slices. Source: DeepSpeed 0.19 checkpoint/ds_to_universal.py, which does so through files."""
    folder = source / (source / "latest").read_text(encoding="utf-8")
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank_of)
    ranks = [_unpickled(file)["optimizer_state_dict"] for file in files]
    found: dict[str, list[torch.Tensor]] = {}
    if described["zero_stage"] == 3:
        order = _unpickled(next(folder.glob("*zero_pp_rank_0_*_model_states.pt")))["param_shapes"]
        for rank in ranks:
            states = rank["optimizer_state_dict"]["state"]
            for number, (sub_group, flat) in enumerate(zip(order, rank["fp32_flat_groups"], strict=True)):
                start = 0
                for name, shape in sub_group.items():
                    length = -(-shape.numel() // len(ranks))  # the last rank's is padded
                    _collect(found, name, {WEIGHT: flat, **states[number]}, start, length)
                    start += length
    else:
        for rank in ranks:
            states = rank["base_optimizer_state"]["state"]
            for number, mapping in enumerate(rank["param_slice_mappings"]):
                flat = rank["single_partition_of_fp32_groups"][number]
                for name, address in mapping.items():
                    _collect(found, name, {WEIGHT: flat, **states[number]}, address.start, address.numel)
    joined = {}
    for key, parts in found.items():
        size = shapes[key.partition("/")[2]].numel() if key.partition("/")[2] in shapes else None
        joined[key] = parts[0] if not parts[0].dim() else torch.cat(parts)[:size]
    return joined


def _collect(
    found: dict[str, list[torch.Tensor]], name: str, states: Mapping[str, Any], start: int, length: int
) -> None:
    """One rank's part of a parameter's states, cut out of the flat ones."""
    for key, value in states.items():
        if torch.is_tensor(value) and value.dim():
            found.setdefault(f"{key}/{name}", []).append(value.flatten()[start : start + length])
        elif key == "step":
            found.setdefault(f"{key}/{name}", []).append(torch.as_tensor(float(value)))


def _unpickled(file: Path) -> dict[str, Any]:
    """DeepSpeed's files hold objects of its own; the manifest's seal was verified before."""
    return torch.load(file, weights_only=False, map_location="cpu")


def _fsdp2(source: Path, described: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import format_utils

    def whole(folder: str) -> dict[str, Any]:
        content: dict[str, Any] = {}
        format_utils._load_state_dict(  # what torch's own dcp_to_torch_save does, without its file
            content,
            storage_reader=dcp.FileSystemReader(source / folder),
            planner=format_utils._EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
        return content

    found = {f"{WEIGHT}/{name}": tensor for name, tensor in whole("pytorch_model_fsdp_0")["model"].items()}
    for name, states in whole("optimizer_0")["optimizer"]["state"].items():
        found |= {f"{key}/{name}": torch.as_tensor(value) for key, value in states.items()}
    return found


# ---- into the engine that runs --------------------------------------------------------------------------------------


def load(trainer: Trainer, strategy: Strategy, folder: Path) -> list[str]:
    """Put this rank's part of the states where they belong; names of parameters whose optimizer states were not there.

    Collective."""
    with safe_open(folder / FILE, framework="pt") as file:
        keys: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118  not a dict
            state, _, name = key.partition("/")
            keys.setdefault(name, []).append(state)
        into = _into_zero if strategy.engine == "deepspeed" else _into_torch
        parameters = dict(trained(trainer))
        with torch.no_grad():
            for name, parameter in parameters.items():
                states = {state: file.get_tensor(f"{state}/{name}") for state in keys[name]}
                into(trainer, parameter, states)
    return [name for name in parameters if set(keys[name]) <= {WEIGHT}]


def _into_torch(trainer: Trainer, parameter: torch.nn.Parameter, states: States) -> None:
    """Plain, DDP and FSDP2: the optimizer has a state for each parameter, cut as the parameter is."""
    _local(parameter).copy_(_local(_placed(states.pop(WEIGHT), parameter)))
    if not states:
        return
    optimizer = trainer.optimizer.optimizer
    group = next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        key: _placed(value, parameter)
        if value.dim()
        else value.to(torch.float32).to(parameter.device if on_device else "cpu", copy=True)
        for key, value in states.items()
    }


def _placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor as `like` is: its type and device, and under FSDP2 this rank's part."""
    tensor = tensor.to(like.device, like.dtype, copy=True)
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _into_zero(trainer: Trainer, parameter: torch.nn.Parameter, states: States) -> None:
    import deepspeed
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    weight, step = states.pop(WEIGHT), states.pop("step", None)
    if hasattr(parameter, "ds_id"):  # ZeRO-3: safe_set_full_... fails where the ranks' parts are not equally long
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if trainer.args.process_index == 0:
                parameter.copy_(weight)
        safe_set_local_fp32_param(parameter, _my_part(weight, trainer.args))
        for key, value in states.items():
            safe_set_local_optimizer_state(parameter, _my_part(value, trainer.args), key)
    else:
        parameter.copy_(weight)
        safe_set_full_fp32_param(parameter, weight.float())
        for key, value in states.items():
            safe_set_full_optimizer_state(parameter, value.float(), key)
    if step is not None:
        _set_step(trainer.deepspeed.optimizer.optimizer, step)


def _my_part(tensor: torch.Tensor, args: Any) -> torch.Tensor:
    length = -(-tensor.numel() // args.world_size)
    padded = torch.zeros(length * args.world_size)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[args.process_index * length : (args.process_index + 1) * length]


def _set_step(optimizer: torch.optim.Optimizer, step: torch.Tensor) -> None:
    """ZeRO's flat slices share one count."""
    for held in [*optimizer.state.values(), *optimizer.param_groups]:
        if "step" in held:
            held["step"] = step.to(held["step"]) if torch.is_tensor(held["step"]) else type(held["step"])(step)
