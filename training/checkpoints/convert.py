"""A checkpoint of one engine or number of ranks, for another: its trained weights and optimizer
states by name.

Only what is trained is carried: frozen weights are those that the model was built with. Rank 0
takes the files apart into one safetensors file, `<state>/<parameter>`, and every rank takes its
part of it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from launch.base.errors import CheckpointError
from launch.schema.plan import Strategy
from training.compat import deepspeed_private, torch_private
from training.compat.transformers_private import Network, OpenTrainer

FILE = "states.safetensors"
WEIGHT = "weight"
# "<state>/<parameter>"; a state is weight, exp_avg, ..., or step, which is a scalar
States = dict[str, torch.Tensor]
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


def write(source: Path, described: Mapping[str, Any], trainer: OpenTrainer, folder: Path) -> None:
    """The states of a checkpoint that has been verified, in `folder`. Raises CheckpointError when
    they are others."""
    shapes = {name: deepspeed_private.whole_shape(one) for name, one in trained(trainer)}
    states = {"plain": _plain, "ddp": _plain, "deepspeed": _zero, "fsdp2": _fsdp2}[
        described["engine"]
    ](source, described, shapes)
    missing = [name for name in shapes if f"{WEIGHT}/{name}" not in states]
    if missing:
        raise CheckpointError(
            f"{source}: has no weights for {missing[0]} and {len(missing) - 1} more of the"
            " parameters that this model trains; continue with the mode that wrote it, or start"
            " over with --resume never"
        )
    shaped = {
        key: tensor.reshape(shapes[key.partition("/")[2]]).contiguous() if tensor.dim() else tensor
        for key, tensor in states.items()
        if key.partition("/")[2] in shapes
    }
    save_file(shaped, folder / FILE)


def trained(trainer: OpenTrainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every trained parameter with its name in the model itself, whatever it is wrapped in."""
    network: Network = trainer.accelerator.unwrap_model(trainer.model)
    return ((name, one) for name, one in network.named_parameters() if one.requires_grad)


def optimizer_names(trainer: OpenTrainer) -> list[list[str]]:
    """The names of the optimizer's parameters, by group: its file only numbers them."""
    names = {id(parameter): name for name, parameter in trained(trainer)}
    return [[names[id(one)] for one in group["params"]] for group in trainer.optimizer.param_groups]


# ---- out of the files of an engine
# ---------------------------------------------------------------------------


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
    numbered = [
        pair for group, names in groups for pair in zip(group["params"], names, strict=True)
    ]
    for number, name in numbered:
        for key, value in state["state"].get(number, {}).items():
            found[f"{key}/{name}"] = torch.as_tensor(value)
    return found


def _rank_of(file: Path) -> int:
    return int(re.findall(r"zero_pp_rank_(\d+)_", file.name)[0])


def _zero(source: Path, described: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    """Joins the ranks' slices. Source: DeepSpeed 0.19 checkpoint/ds_to_universal.py, which does so
    through files."""
    folder = source / (source / "latest").read_text(encoding="utf-8")
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank_of)
    ranks = [read_pickle(file)["optimizer_state_dict"] for file in files]
    found: dict[str, list[torch.Tensor]] = {}
    if described["zero_stage"] == 3:
        order = read_pickle(next(folder.glob("*zero_pp_rank_0_*_model_states.pt")))["param_shapes"]
        for rank in ranks:
            states = rank["optimizer_state_dict"]["state"]
            for number, (sub_group, flat) in enumerate(
                zip(order, rank["fp32_flat_groups"], strict=True)
            ):
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
                    _collect(
                        found, name, {WEIGHT: flat, **states[number]}, address.start, address.numel
                    )
    joined = {}
    for key, parts in found.items():
        size = shapes[key.partition("/")[2]].numel() if key.partition("/")[2] in shapes else None
        joined[key] = parts[0] if not parts[0].dim() else torch.cat(parts)[:size]
    return joined


def _collect(
    found: dict[str, list[torch.Tensor]],
    name: str,
    states: Mapping[str, Any],
    start: int,
    length: int,
) -> None:
    """One rank's part of a parameter's states, cut out of the flat ones."""
    for key, value in states.items():
        if torch.is_tensor(value) and value.dim():
            found.setdefault(f"{key}/{name}", []).append(value.flatten()[start : start + length])
        elif key == "step":
            found.setdefault(f"{key}/{name}", []).append(torch.as_tensor(float(value)))


class _Unpickler(pickle.Unpickler):
    """Tensors and containers; any other object becomes an empty one, and no code of its own
    runs."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = (module, name) in PLAIN or torch_private.rebuilds_tensor(module, name)
        if is_plain or (module.startswith("torch") and name.endswith("Storage")):
            return super().find_class(module, name)
        return _StandIn


class _StandIn:
    """For an object of DeepSpeed's: its attributes."""

    def __init__(self, *args: Any) -> None:
        pass


PLAIN = {
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
}
PLAIN |= {("torch", name) for name in ("Tensor", "float32", "float16", "bfloat16", "int64")} | {
    ("builtins", "dict")
}
# calls only what is here
PLAIN |= {("torch.nn.parameter", "Parameter")}


def read_pickle(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed's, without DeepSpeed."""
    return torch.load(file, weights_only=False, map_location="cpu", pickle_module=_PickleModule)


class _PickleModule:
    """What torch.load asks of a module."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> Any:
        return _Unpickler(file, **kwargs).load()


def _fsdp2(source: Path, described: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    weights = torch_private.read_sharded(source / "pytorch_model_fsdp_0")["model"]
    states = {f"{WEIGHT}/{name}": tensor for name, tensor in weights.items()}
    optimizer = torch_private.read_sharded(source / "optimizer_0")["optimizer"]
    for name, of_parameter in optimizer["state"].items():
        states |= {f"{key}/{name}": torch.as_tensor(value) for key, value in of_parameter.items()}
    return states


# ---- into the engine that runs
# ---------------------------------------------------------------------------


def load(trainer: OpenTrainer, strategy: Strategy, folder: Path) -> list[str]:
    """Put this rank's part of the states where they belong; names of parameters whose optimizer
    states were not there.

    Collective."""
    parameters = dict(trained(trainer))
    with safe_open(folder / FILE, framework="pt") as file, torch.no_grad():
        keys: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118  not a dict
            state, _, name = key.partition("/")
            keys.setdefault(name, []).append(state)
        into = _into_torch
        if strategy.engine == "deepspeed":
            into = _into_zero3 if strategy.zero_stage == 3 else _into_zero
            first = next(iter(parameters))
            _begin_zero(
                trainer, {state: file.get_tensor(f"{state}/{first}") for state in keys[first]}
            )
        for name, parameter in parameters.items():
            into(
                trainer,
                parameter,
                {state: file.get_tensor(f"{state}/{name}") for state in keys[name]},
            )
    return [name for name in parameters if set(keys[name]) <= {WEIGHT}]


def load_schedule(trainer: OpenTrainer, state: dict[str, Any]) -> None:
    """The schedule where it stood, and its rate in the optimizer: all groups have the same one.

    DeepSpeed leaves out a group without parameters, such as that without weight decay under
    LoRA."""
    groups = trainer.optimizer.param_groups
    for key in torch_private.SCHEDULE_LISTS:
        if key in state:
            state[key] = state[key][:1] * len(groups)
    trainer.lr_scheduler.load_state_dict(state)
    for group in groups:
        group["lr"] = state["_last_lr"][0]


def _into_torch(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """Plain, DDP and FSDP2: the optimizer has a state for each parameter, cut as the parameter
    is."""
    _local(parameter).copy_(_local(_placed(states.pop(WEIGHT), parameter)))
    if not states:
        return
    optimizer = trainer.optimizer.optimizer
    group = next(
        group
        for group in optimizer.param_groups
        if any(one is parameter for one in group["params"])
    )
    on_device = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        key: (
            _placed(value, parameter)
            if value.dim()
            else value.to(torch.float32).to(parameter.device if on_device else "cpu", copy=True)
        )
        for key, value in states.items()
    }


def _placed(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """The whole tensor as `like` is: its type and device, and under FSDP2 this rank's part."""
    tensor = tensor.to(like.device, like.dtype, copy=True)
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _begin_zero(trainer: OpenTrainer, like: States) -> None:
    """Empty states for this rank's flat slices, which the optimizer makes at its first step only,
    and their step."""
    zero = deepspeed_private.optimizer(trainer)
    step = like.get("step")
    for group in zero.optimizer.param_groups:
        if "step" in group:
            group["step"] = int(step) if step is not None else group["step"]
    for flat in deepspeed_private.master_slices(zero):
        state: dict[str, Any] = {
            key: torch.zeros_like(flat) for key, one in like.items() if one.dim() and key != WEIGHT
        }
        if step is not None:
            of_torch = type(zero.optimizer).__module__.startswith("torch.")
            on_device = any(zero.optimizer.defaults.get(word) for word in ("fused", "capturable"))
            state["step"] = (
                step.to(flat.device if on_device else "cpu", torch.float32, copy=True)
                if of_torch
                else int(step)
            )
        if state:
            zero.optimizer.state[flat] = state


def _into_zero(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """ZeRO 1 and 2: a slice of all parameters joined, of which this parameter may have a part on
    this rank."""
    parameter.copy_(states[WEIGHT])
    mapping = deepspeed_private.slice_mapping(parameter)
    if mapping is None:
        return
    zero = deepspeed_private.optimizer(trainer)
    flat = deepspeed_private.master_slices(zero)[mapping.param_group_index]
    inside, of_slice = mapping.lp_fragment_address, mapping.hp_fragment_address
    for key, value in states.items():
        if value.dim():
            target = flat if key == WEIGHT else zero.optimizer.state[flat][key]
            part = value.flatten()[inside.start : inside.start + inside.numel]
            target[of_slice.start : of_slice.start + of_slice.numel].copy_(part)


def _into_zero3(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """Each parameter is cut into equal parts, the last one padded."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if trainer.args.process_index == 0:
            parameter.copy_(states[WEIGHT])
    ranks, rank = trainer.args.world_size, trainer.args.process_index
    length = -(-states[WEIGHT].numel() // ranks)
    for key, value in states.items():
        if value.dim():
            padded = torch.zeros(length * ranks)
            padded[: value.numel()] = value.flatten()
            part = padded[rank * length : (rank + 1) * length]
            if key == WEIGHT:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, key)
