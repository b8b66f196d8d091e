"""What differs between one process, DDP, DeepSpeed and FSDP2 once the ranks run: set-up, checks,
bytes, gathering."""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from pydantic import ValidationError
from transformers import TrainingArguments

from launch.base.errors import ConfigError, ResourceError
from launch.schema.plan import Strategy
from training.compat import deepspeed_private, transformers_private
from training.compat.transformers_private import Network, OpenTrainer
from training.model import four_bit

EXPECTED = {  # engine -> what Accelerate must have made of it, on (cpu, cuda)
    "plain": (DistributedType.NO, DistributedType.NO),
    "ddp": (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
    "deepspeed": (DistributedType.DEEPSPEED, DistributedType.DEEPSPEED),
    "fsdp2": (DistributedType.FSDP, DistributedType.FSDP),
}

# The folders of a checkpoint that all ranks write into: made before, so that no rank can fail alone
# at it.
CHECKPOINT_FOLDERS = {
    "plain": (),
    "ddp": (),
    "deepspeed": (),
    "fsdp2": ("pytorch_model_fsdp_0", "optimizer_0"),
}


def prepare(strategy: Strategy, deepspeed_file: Path | None, timeout_s: float) -> dict[str, Any]:
    """Before TrainingArguments is made: what a launcher has put into the environment gives way to
    the plan.

    Returns arguments for it. On CPUs the process group is made here: transformers forgets
    ddp_timeout there. Raises ResourceError where torch sees none of the GPUs that the plan is for:
    transformers would go on with the CPU.
    """
    if strategy.device == "cuda":
        _check_gpus()
    os.environ["ACCELERATE_MIXED_PRECISION"] = strategy.mixed_precision
    # training.torch_compile is the way to ask for it
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"
    # with it DeepSpeed is dropped without a word; use_cpu says the same
    os.environ.pop("ACCELERATE_USE_CPU", None)
    # torchrun's variables for one rank would make a process group of it
    if strategy.engine == "plain":
        for key in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(key, None)
    if strategy.engine == "deepspeed":
        assert deepspeed_file is not None
        _prepare_deepspeed(strategy, deepspeed_file)
    if strategy.device == "cuda" or strategy.backend is None:
        return {"ddp_backend": strategy.backend}
    PartialState(cpu=True, backend=strategy.backend, timeout=timedelta(seconds=timeout_s))
    return {"ddp_backend": strategy.backend, "accelerator_config": {"use_configured_state": True}}


def _check_gpus() -> None:
    """Raises ResourceError, in the driver's own words, where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        said = "it sees no GPU"
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        said = str(error).splitlines()[0]
    raise ResourceError(
        f"the plan is for GPUs, torch {torch.__version__} cannot use them: {said}; run `python -m"
        " launch doctor`, which says whether the driver or the build of torch has to change"
    )


def _prepare_deepspeed(strategy: Strategy, deepspeed_file: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads(deepspeed_file.read_bytes())
    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValidationError as error:
        words = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise ConfigError(f"the DeepSpeed file's zero_optimization: {words}") from error
    if "WORLD_SIZE" not in os.environ:  # a plain process: DeepSpeed wants a group of one
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # torchrun leaves it to the recipe
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(deepspeed_file)
    if strategy.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed_private.leave_out_compiled_all_reduce()


def check_agreement(mine: Mapping[str, Any]) -> None:
    """Every rank trains the same thing. Raises ConfigError on all of them, naming what differs:
    ranks of several machines come from lines that were typed apart. Collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, dict(mine))
    for rank, theirs in enumerate(found):
        differing = sorted(
            key for key in mine.keys() | theirs.keys() if found[0].get(key) != theirs.get(key)
        )
        if differing:
            words = "; ".join(
                f"{key} {found[0].get(key)} and {theirs.get(key)}" for key in differing[:6]
            )
            raise ConfigError(
                f"rank 0 and rank {rank} were started to train different things: {words}"
            )


def connect(strategy: Strategy) -> None:
    """After TrainingArguments is made: DeepSpeed's own view of the process group, which it needs to
    load in shards."""
    if strategy.engine == "deepspeed":
        from deepspeed import comm

        if not comm.is_initialized():
            comm.init_distributed(dist_backend=strategy.backend, auto_mpi_discovery=False)


def check(strategy: Strategy, args: TrainingArguments) -> str:
    """What runs, in words, from torch.distributed and Accelerate. Raises ConfigError when it is not
    what was planned: several launchers give another number of ranks or another engine with exit
    code 0."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    if not started == args.world_size == strategy.num_processes:
        raise ConfigError(
            f"{strategy.num_processes} ranks were asked for, {started} were started and"
            f" {args.world_size} are in the process group; start them with `python -m launch run`,"
            " torchrun, or accelerate launch --multi_gpu"
        )
    if backend != strategy.backend:
        raise ConfigError(
            f"the plan says backend {strategy.backend}, torch.distributed runs {backend}"
        )
    if args.device.type != strategy.device:
        raise ConfigError(
            f"the plan says device {strategy.device}, transformers chose {args.device}"
        )
    return (
        f"rank {args.process_index} of {args.world_size} on {socket.gethostname()}: {args.device}, "
        + (f"backend {backend} (torch.distributed), " if backend else "no process group, ")
        + f"{torch.get_num_threads()} thread(s)"
    )


def check_engine(strategy: Strategy, trainer: OpenTrainer) -> None:
    """Raises ConfigError when Accelerate has not engaged the engine that was planned."""
    expected = EXPECTED[strategy.engine][strategy.device == "cuda"]
    found = trainer.accelerator.distributed_type
    if found != expected:
        raise ConfigError(
            f"the plan says {strategy.mode}, which is {expected.value} to Accelerate, but it runs"
            f" {found.value}; start the ranks with `python -m launch run`, or with the file of that"
            " mode in configs/accelerate"
        )
    if strategy.engine == "fsdp2" and not trainer.accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP version 1 was started; set fsdp_version: 2 in the Accelerate file's fsdp_config"
        )


def autocast_fsdp2(trainer: OpenTrainer) -> None:
    """Compute FSDP2's forwards under autocast, and add gradients up in float32, as DDP does.

    Accelerate (1.15) prepares a model for FSDP2 without autocast, and its policy casts what enters
    and leaves a layer, and what is summed over micro-steps and ranks, to half precision. Weights
    are still gathered in half precision: autocast's copies of float32 ones would stay whole on
    every rank from forward to backward. Before Trainer.train().
    """
    accelerator = trainer.accelerator
    if accelerator.mixed_precision == "no":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float16
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=half,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    network: Network = accelerator.unwrap_model(trainer.model)
    # which generate() calls
    base = network.get_base_model() if hasattr(network, "peft_config") else network
    plain_forward = base.forward

    @functools.wraps(plain_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return plain_forward(*args, **kwargs)

    base.forward = forward


def refuse_data_parallel(model: torch.nn.Module) -> None:
    """Raises ConfigError for a model that this process would run on several GPUs.

    There transformers multiplies the loss by their number, but ours is divided by all targets of
    the step already: gradients would be that many times too large."""
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError(
            f"one process would train on GPUs {model.device_ids} (nn.DataParallel), expected one"
            " GPU a process; start a process for each GPU (accelerate launch --multi_gpu"
            " --num_processes 2), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0; on AMD"
            " HIP_VISIBLE_DEVICES=0)"
        )


def whole_weights(strategy: Strategy) -> AbstractContextManager[None]:
    """Build a model whole on every rank inside, also under ZeRO-3."""
    return transformers_private.without_zero_init() if strategy.zero_stage == 3 else nullcontext()


def tie_by_module(network: Network) -> None:
    """Under FSDP2: modules whose weight is the input embedding's become that one module, except the
    output layer.

    fully_shard (torch 2.13) takes a shared parameter only where one group sees it, and Accelerate
    puts the input and the output embedding into one; T5's encoder and decoder have an embedding
    each, tied to the first by weight.
    """
    embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if (
                child not in (embedding, output)
                and getattr(child, "weight", None) is embedding.weight
            ):
                setattr(parent, name, embedding)


def numel(parameter: torch.Tensor) -> int:
    """Elements of a parameter, of which this rank may hold a part or none; or as 4 bits, two in a
    byte."""
    state = getattr(parameter, "quant_state", None)
    return (
        state.shape.numel()
        if state is not None
        else getattr(parameter, "ds_numel", parameter.numel())
    )


def held_bytes(
    strategy: Strategy, trainer: OpenTrainer, gradients_bytes: int
) -> dict[str, int | None]:
    """Bytes of states that this rank holds on its device, and on the host for it; None is not
    measured."""
    if strategy.engine == "deepspeed":
        return _deepspeed_bytes(strategy, trainer)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "weights_bytes": sum(
            local_bytes(tensor)
            for parameter in trainer.model.parameters()
            for tensor in (parameter, *four_bit.scales(parameter))
        ),
        "gradients_bytes": gradients_bytes,
        "optimizer_bytes": sum(local_bytes(value) for value in states if torch.is_tensor(value)),
        "offloaded_bytes": 0,
    }


def local_bytes(tensor: Any) -> int:
    """Bytes of a tensor on this rank, which may hold a part of it."""
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


def _deepspeed_bytes(strategy: Strategy, trainer: OpenTrainer) -> dict[str, int | None]:
    zero = deepspeed_private.optimizer(trainer)
    slices = deepspeed_private.master_slices(zero)
    states = [
        value
        for state in zero.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    optimizer_bytes = sum(tensor.nbytes for tensor in [*slices, *states])
    parts = map(deepspeed_private.local_part, trainer.model.parameters())
    weights_bytes = sum(part.nbytes for part in parts)
    gradients_bytes = (
        deepspeed_private.gradient_slices(zero).nbytes if strategy.zero_stage == 3 else None
    )  # else freed at once
    if not strategy.offloads:
        return {
            "weights_bytes": weights_bytes,
            "gradients_bytes": gradients_bytes,
            "optimizer_bytes": optimizer_bytes,
            "offloaded_bytes": 0,
        }
    on_host = optimizer_bytes + sum(
        tensor.grad.nbytes for tensor in slices if tensor.grad is not None
    )
    if strategy.zero_stage == 3:
        on_host += weights_bytes + (gradients_bytes or 0)
        weights_bytes, gradients_bytes = 0, 0
    return {
        "weights_bytes": weights_bytes,
        "gradients_bytes": gradients_bytes,
        "optimizer_bytes": 0,
        "offloaded_bytes": on_host,
    }


def gathered(strategy: Strategy, trainer: OpenTrainer) -> Any:
    """The whole state dict on rank 0's host where ranks hold parts of the weights; None where each
    holds them all. Collective."""
    if strategy.engine == "fsdp2" or strategy.zero_stage == 3:
        return trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return None
