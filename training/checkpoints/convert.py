"""Convert a checkpoint for another engine or number of ranks: its trained weights and optimizer
states by name.

Only trained parameters are converted; the model already has its frozen weights. Rank 0 writes all
states to a safetensors file, `<state>/<parameter>`, and every rank reads its part of it."""

import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from launch.base.errors import CheckpointError
from launch.schema.plan import Strategy
from training.compat import deepspeed_private, torch_private
from training.compat.transformers_private import Network, OpenTrainer

FILE = "states.safetensors"
_WEIGHT = "weight"
# "<state>/<parameter>"; a state is weight, exp_avg, ..., or step, which is a scalar
States = dict[str, torch.Tensor]
# PEFT's names of a copied module and of the adapter, which it leaves out of its files
ADAPTER = re.compile(r"(\.modules_to_save)?\.default(?=\.|$)")
Shapes = Mapping[str, torch.Size]  # parameter -> shape


def is_needed(described: Mapping[str, Any], strategy: Strategy) -> bool:
    """True if this engine would misread the checkpoint's own files."""
    written_by, read_by = described["engine"], strategy.launch_mode.engine
    if {written_by, read_by} <= {"plain", "ddp"} or written_by == read_by == "fsdp2":
        return False
    # ZeRO 1 and 2 write the same slices, one a rank
    same_slices = (described["zero_stage"] == 3) == (strategy.launch_mode.zero_stage == 3)
    same_ranks = described["world_size"] == strategy.num_processes
    return not (written_by == read_by and same_slices and same_ranks)


def write(source: Path, described: Mapping[str, Any], trainer: OpenTrainer, folder: Path) -> None:
    """Write the states of a verified checkpoint to `folder`. Raises CheckpointError if weights of
    trained parameters are missing."""
    trained_shapes = {
        name: deepspeed_private.whole_shape(parameter) for name, parameter in trained(trainer)
    }
    states = READERS[described["engine"]](source, described, trained_shapes)
    missing = [name for name in trained_shapes if f"{_WEIGHT}/{name}" not in states]
    if missing:
        raise CheckpointError(
            f"{source}: has no weights for {missing[0]} and {len(missing) - 1} more of the"
            " parameters that this model trains; continue with the mode that wrote it, or start"
            " over with --resume never"
        )
    content = {
        key: tensor.reshape(trained_shapes[name]).contiguous() if tensor.dim() else tensor
        for key, tensor in states.items()
        if (name := key.partition("/")[2]) in trained_shapes
    }
    save_file(content, folder / FILE)


def trained(trainer: OpenTrainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every trained parameter with its name in the model without wrappers."""
    network: Network = trainer.accelerator.unwrap_model(trainer.model)
    return (pair for pair in network.named_parameters() if pair[1].requires_grad)


def optimizer_names(trainer: OpenTrainer) -> list[list[str]]:
    """The names of the optimizer's parameters, by group: its file only numbers them."""
    names = {id(parameter): name for name, parameter in trained(trainer)}
    return [
        [names[id(parameter)] for parameter in group["params"]]
        for group in trainer.optimizer.param_groups
    ]


# ---- out of the files of an engine
# ---------------------------------------------------------------------------


def _plain(source: Path, described: Mapping[str, Any], trained_shapes: Shapes) -> States:
    files = sorted([*source.glob("model*.safetensors"), *source.glob("adapter_model.safetensors")])
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    optimizer = torch.load(source / "optimizer.pt", weights_only=True, map_location="cpu")
    groups = zip(optimizer["param_groups"], described["optimizer_parameters"], strict=True)
    of_optimizer = {
        name: optimizer["state"].get(number, {})
        for group, names in groups
        for number, name in zip(group["params"], names, strict=True)
    }
    return _joined(weights, of_optimizer, trained_shapes)


def _joined(
    weights: States, of_optimizer: Mapping[str, Mapping[str, Any]], trained_shapes: Shapes
) -> States:
    """The weights of trained parameters, under the model's names or PEFT's, and the states of the
    optimizer (parameter -> states)."""
    states: States = {}
    for name in trained_shapes:
        stored = name if name in weights else ADAPTER.sub("", name)
        if stored in weights:
            states[f"{_WEIGHT}/{name}"] = weights[stored]
    for name, of_parameter in of_optimizer.items():
        states |= {f"{key}/{name}": torch.as_tensor(value) for key, value in of_parameter.items()}
    return states


def _zero(source: Path, described: Mapping[str, Any], trained_shapes: Shapes) -> States:
    """Join the ranks' slices. Source: DeepSpeed 0.19 checkpoint/ds_to_universal.py, which joins
    them through files."""
    folder = source / (source / "latest").read_text(encoding="utf-8")
    files = {
        int(re.findall(r"zero_pp_rank_(\d+)_", file.name)[0]): file
        for file in folder.glob("*_optim_states.pt")
    }
    ranks = [read_pickle(file)["optimizer_state_dict"] for _, file in sorted(files.items())]
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)

    def collect(name: str, flat: torch.Tensor, states: States, start: int, length: int) -> None:
        """Take a rank's part of a parameter's states out of the flat states."""
        for key, value in {_WEIGHT: flat, **states}.items():
            if torch.is_tensor(value) and value.dim():
                parts[f"{key}/{name}"].append(value.flatten()[start : start + length])
            elif key == "step":
                parts[f"{key}/{name}"].append(torch.as_tensor(float(value)))

    if described["zero_stage"] == 3:
        order = read_pickle(next(folder.glob("*zero_pp_rank_0_*_model_states.pt")))["param_shapes"]
        for rank in ranks:
            states = rank["optimizer_state_dict"]["state"]
            for number, (sub_group, flat) in enumerate(
                zip(order, rank["fp32_flat_groups"], strict=True)
            ):
                start = 0
                for name, full_shape in sub_group.items():
                    length = -(-full_shape.numel() // len(ranks))  # the last rank's part is padded
                    collect(name, flat, states[number], start, length)
                    start += length
    else:
        for rank in ranks:
            states = rank["base_optimizer_state"]["state"]
            for number, mapping in enumerate(rank["param_slice_mappings"]):
                flat = rank["single_partition_of_fp32_groups"][number]
                for name, address in mapping.items():
                    collect(name, flat, states[number], address.start, address.numel)
    sizes = {name: full_shape.numel() for name, full_shape in trained_shapes.items()}
    return {
        key: torch.cat(tensors)[: sizes.get(key.partition("/")[2])]
        if tensors[0].dim()
        else tensors[0]
        for key, tensors in parts.items()
    }


class _Unpickler(pickle.Unpickler):
    """Reads tensors and containers. Any other object becomes an empty object, and its code does not
    run."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = (module, name) in PLAIN or torch_private.rebuilds_tensor(module, name)
        if is_plain or (module.startswith("torch") and name.endswith("Storage")):
            return super().find_class(module, name)
        return _StandIn


class _StandIn:
    """Has the attributes of an object of DeepSpeed."""

    def __init__(self, *args: Any) -> None:
        """Take what the object was made of, and leave it."""


PLAIN = {
    *(("torch", name) for name in ("Size", "device", "Tensor")),
    *(("torch", name) for name in ("float32", "float16", "bfloat16", "int64")),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "dict"),
    ("torch.nn.parameter", "Parameter"),  # it calls nothing outside this set
}


def read_pickle(file: Path) -> dict[str, Any]:
    """Read a file of DeepSpeed without DeepSpeed."""
    return torch.load(file, weights_only=False, map_location="cpu", pickle_module=_PickleModule)


class _PickleModule:
    """The names that torch.load uses of the module pickle."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> Any:
        return _Unpickler(file, **kwargs).load()


def _fsdp2(source: Path, described: Mapping[str, Any], trained_shapes: Shapes) -> States:
    weights = torch_private.read_sharded(source / "pytorch_model_fsdp_0")["model"]
    optimizer = torch_private.read_sharded(source / "optimizer_0")["optimizer"]
    return _joined(weights, optimizer["state"], trained_shapes)


READERS = {"plain": _plain, "ddp": _plain, "deepspeed": _zero, "fsdp2": _fsdp2}  # engine -> reader


# ---- into the engine that runs
# ---------------------------------------------------------------------------


def load(trainer: OpenTrainer, strategy: Strategy, folder: Path) -> list[str]:
    """Load this rank's part of the states. Returns the parameters without optimizer states.

    Collective."""
    parameters = dict(trained(trainer))
    with safe_open(folder / FILE, framework="pt") as file, torch.no_grad():
        state_names: dict[str, list[str]] = defaultdict(list)
        for key in file.keys():  # noqa: SIM118  not a dict
            state, _, name = key.partition("/")
            state_names[name].append(state)

        def read(name: str) -> States:
            return {state: file.get_tensor(f"{state}/{name}") for state in state_names[name]}

        into = _into_torch
        if strategy.launch_mode.engine == "deepspeed":
            into = _into_zero3 if strategy.launch_mode.zero_stage == 3 else _into_zero
            _begin_zero(trainer, read(next(iter(parameters))))
        for name, parameter in parameters.items():
            into(trainer, parameter, read(name))
    return [name for name in parameters if state_names[name] == [_WEIGHT]]


def load_schedule(trainer: OpenTrainer, state: dict[str, Any]) -> None:
    """Restore the schedule, and set its learning rate in the optimizer: all groups have the same
    rate.

    DeepSpeed leaves out a group without parameters, such as the group without weight decay under
    LoRA."""
    groups = trainer.optimizer.param_groups
    for key in torch_private.SCHEDULE_LISTS:
        if key in state:
            state[key] = state[key][:1] * len(groups)
    trainer.lr_scheduler.load_state_dict(state)
    for group in groups:
        group["lr"] = state["_last_lr"][0]


def apply_schedule(trainer: OpenTrainer) -> None:
    """Set the learning rate of the schedule's step in the optimizer. A checkpoint that another run
    wrote holds the rate of its own schedule."""
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if isinstance(schedule, LambdaLR):
        rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](schedule.last_epoch)
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate


def _into_torch(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """Plain, DDP and FSDP2: the optimizer has a state for each parameter, divided like the
    parameter."""
    _local(parameter).copy_(_local(_placed(states.pop(_WEIGHT), parameter)))
    if not states:
        return
    optimizer = trainer.optimizer.optimizer
    group = next(
        group
        for group in optimizer.param_groups
        if any(member is parameter for member in group["params"])
    )
    device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
    optimizer.state[parameter] = {
        key: _placed(value, parameter)
        if value.dim()
        else value.to(device, torch.float32, copy=True)
        for key, value in states.items()
    }


def _placed(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """The full tensor with the type and device of `like`; under FSDP2 this rank's part of it."""
    tensor = tensor.to(like.device, like.dtype, copy=True)
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _begin_zero(trainer: OpenTrainer, like: States) -> None:
    """Make empty states for this rank's flat slices, which the optimizer would make at its first
    step, and set their step."""
    zero = deepspeed_private.optimizer(trainer)
    optimizer, step = zero.optimizer, like.get("step")
    for group in optimizer.param_groups:
        if "step" in group and step is not None:
            group["step"] = int(step)
    of_torch = type(optimizer).__module__.startswith("torch.")
    on_device = any(optimizer.defaults.get(option) for option in ("fused", "capturable"))
    names = [key for key, value in like.items() if value.dim() and key != _WEIGHT]
    for flat in deepspeed_private.master_slices(zero):
        state: dict[str, Any] = {key: torch.zeros_like(flat) for key in names}
        if step is not None:
            device = flat.device if on_device else "cpu"
            state["step"] = step.to(device, torch.float32, copy=True) if of_torch else int(step)
        if state:
            optimizer.state[flat] = state


def _into_zero(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """ZeRO 1 and 2: a rank has a slice of all parameters joined, and maybe a part of this parameter
    in it."""
    parameter.copy_(states[_WEIGHT])
    mapping = deepspeed_private.slice_mapping(parameter)
    if mapping is None:
        return
    zero = deepspeed_private.optimizer(trainer)
    flat = deepspeed_private.master_slices(zero)[mapping.param_group_index]
    inside, of_slice = mapping.lp_fragment_address, mapping.hp_fragment_address
    for key, value in states.items():
        if value.dim():
            target = flat if key == _WEIGHT else zero.optimizer.state[flat][key]
            part = value.flatten()[inside.start : inside.start + inside.numel]
            target[of_slice.start : of_slice.start + of_slice.numel].copy_(part)


def _into_zero3(trainer: OpenTrainer, parameter: torch.nn.Parameter, states: States) -> None:
    """ZeRO 3: each parameter is divided into equal parts, of which the last part is padded."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if trainer.args.process_index == 0:
            parameter.copy_(states[_WEIGHT])
    ranks, rank = trainer.args.world_size, trainer.args.process_index
    length = -(-states[_WEIGHT].numel() // ranks)
    for key, value in states.items():
        if value.dim():
            padding = length * ranks - value.numel()
            padded = torch.nn.functional.pad(value.flatten().float(), (0, padding))
            part = padded[rank * length : (rank + 1) * length]
            if key == _WEIGHT:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, key)
