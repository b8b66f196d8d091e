"""Set up one process, DDP, DeepSpeed or FSDP2 in a rank: environment, checks, bytes, gathering."""

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

# torchrun's variables of a process group with a single rank
SINGLE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def prepare(strategy: Strategy, deepspeed_file: Path | None, timeout_s: float) -> dict[str, Any]:
    """Prepare the environment for TrainingArguments: the plan overrides a launcher's variables.

    Returns arguments for it. On CPUs the process group is made here, because transformers ignores
    ddp_timeout there. Raises ResourceError if the plan is for GPUs and torch sees no GPU, where
    transformers would use the CPU.
    """
    if strategy.device == "cuda":
        _check_gpus()
    os.environ["ACCELERATE_MIXED_PRECISION"] = strategy.mixed_precision
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"  # training.torch_compile decides
    # DeepSpeed would be dropped with it, without a message; use_cpu has the same meaning
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if strategy.launch_mode.engine == "plain":  # torchrun's variables would make a process group
        for key in (*SINGLE_RANK, "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(key, None)
    if strategy.launch_mode.engine == "deepspeed":
        assert deepspeed_file is not None
        _prepare_deepspeed(strategy, deepspeed_file)
    if strategy.device == "cuda" or strategy.backend is None:
        return {"ddp_backend": strategy.backend}
    PartialState(cpu=True, backend=strategy.backend, timeout=timedelta(seconds=timeout_s))
    return {"ddp_backend": strategy.backend, "accelerator_config": {"use_configured_state": True}}


def _check_gpus() -> None:
    """Raises ResourceError with the driver's message if torch sees no GPU."""
    if torch.cuda.is_available():
        return
    cause = "it sees no GPU"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        cause = str(error).splitlines()[0]
    raise ResourceError(
        f"the plan is for GPUs, torch {torch.__version__} cannot use them: {cause}; run `python -m"
        " launch doctor`, which says whether the driver or the build of torch has to change"
    )


def _prepare_deepspeed(strategy: Strategy, deepspeed_file: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads(deepspeed_file.read_bytes())
    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise ConfigError(f"the DeepSpeed file's zero_optimization: {problems}") from error
    if "WORLD_SIZE" not in os.environ:  # DeepSpeed needs a process group
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= SINGLE_RANK | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # torchrun does not set it
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(deepspeed_file)
    if strategy.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed_private.leave_out_compiled_all_reduce()
    else:
        deepspeed_private.ask_cuda_for_free_memory()
        if not strategy.pin_memory:
            deepspeed_private.pin_nothing()


def check_agreement(facts: Mapping[str, Any]) -> None:
    """Check that every rank trains the same: ranks of several machines are started by separate
    command lines. Raises ConfigError with the differences on all ranks. Collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, dict(facts))
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        differences = [
            f"{key} {first.get(key)} and {other.get(key)}"
            for key in sorted(first.keys() | other.keys())
            if first.get(key) != other.get(key)
        ]
        if differences:
            raise ConfigError(
                f"rank 0 and rank {rank} were started to train different things:"
                f" {'; '.join(differences[:6])}"
            )


def connect(strategy: Strategy) -> None:
    """Give DeepSpeed its own view of the process group, which it needs to load in shards. After
    TrainingArguments is made."""
    if strategy.launch_mode.engine == "deepspeed":
        from deepspeed import comm

        if not comm.is_initialized():
            comm.init_distributed(dist_backend=strategy.backend, auto_mpi_discovery=False)


def wait_for_ranks(device: torch.device) -> None:
    """Wait until all ranks have come here. NCCL would guess the device of its barrier."""
    is_nccl = torch.distributed.get_backend() == "nccl"
    torch.distributed.barrier(device_ids=[device.index] if is_nccl else None)


def check(strategy: Strategy, args: TrainingArguments) -> str:
    """Describe this rank's process group and device. Raises ConfigError if they are not as planned:
    several launchers start another number of ranks or another engine with exit code 0."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    if not world_size == args.world_size == strategy.num_processes:
        raise ConfigError(
            f"{strategy.num_processes} ranks were asked for, {world_size} were started and"
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
    """Raises ConfigError if Accelerate runs another engine than the planned engine."""
    expected = DistributedType(strategy.launch_mode.distributed_type)
    engine = trainer.accelerator.distributed_type
    if engine != expected:
        raise ConfigError(
            f"the plan says {strategy.mode}, which is {expected.value} to Accelerate, but it runs"
            f" {engine.value}; start the ranks with `python -m launch run`, or with the file of"
            " that mode in configs/accelerate"
        )
    if strategy.launch_mode.engine == "fsdp2" and not trainer.accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP version 1 was started; set fsdp_version: 2 in the Accelerate file's fsdp_config"
        )


def autocast_fsdp2(trainer: OpenTrainer) -> None:
    """Compute FSDP2's forwards under autocast, and add gradients up in float32, as DDP does.

    Accelerate (1.15) prepares a model for FSDP2 without autocast. Its policy casts to half
    precision the inputs and outputs of a layer, and the sums over micro-steps and ranks. Weights
    are still gathered in half precision: of float32 weights, autocast would keep full copies on
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
    # PEFT's generate() calls the base model's forward
    base = network.get_base_model() if hasattr(network, "peft_config") else network
    plain_forward = base.forward

    @functools.wraps(plain_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return plain_forward(*args, **kwargs)

    base.forward = forward


def refuse_data_parallel(model: torch.nn.Module) -> None:
    """Raises ConfigError for a model that this process would run on several GPUs.

    There transformers multiplies the loss by the number of GPUs, but ours is already divided by all
    targets of the step: gradients would be too large by that factor."""
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError(
            f"one process would train on GPUs {model.device_ids} (nn.DataParallel), expected one"
            " GPU a process; start a process for each GPU (accelerate launch --multi_gpu"
            " --num_processes 2), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0; on AMD"
            " HIP_VISIBLE_DEVICES=0)"
        )


def whole_weights(strategy: Strategy) -> AbstractContextManager[None]:
    """Inside, build the full model on every rank, also under ZeRO-3."""
    return (
        transformers_private.without_zero_init()
        if strategy.launch_mode.zero_stage == 3
        else nullcontext()
    )


def tie_by_module(network: Network) -> None:
    """Replace modules that share the input embedding's weight, except the output layer, by that
    embedding: for FSDP2.

    fully_shard (torch 2.13) takes a shared parameter only if a single group has it. Accelerate puts
    the input and the output embedding into the same group; T5's encoder and decoder each have an
    embedding that shares the weight.
    """
    embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
    ends = {*embedding.modules(), *output.modules()}  # also PEFT's copies in them
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if child not in ends and getattr(child, "weight", None) is embedding.weight:
                setattr(parent, name, embedding)


def unify_trained(network: Network, strategy: Strategy) -> None:
    """Cast adapters to the type of the modules that PEFT copied, for ZeRO-3 under mixed precision.

    Stage 3 (DeepSpeed 0.19) joins all trained parameters in one buffer. It loads the weights of a
    folder, and so PEFT copies them, in the computing precision, and does not cast the adapters, as
    it does if it did not load the weights. Its master weights are float32 in any case.
    """
    if strategy.launch_mode.zero_stage != 3 or strategy.mixed_precision == "no":
        return
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    dtypes = {parameter.dtype for parameter in trained}
    if len(dtypes) > 1:
        (half,) = dtypes - {torch.float32}
        for parameter in trained:
            parameter.data = parameter.data.to(half)


def numel(parameter: torch.Tensor) -> int:
    """Elements of a full parameter, also if this rank holds a part of it or holds it in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return state.shape.numel()
    return getattr(parameter, "ds_numel", parameter.numel())


def held_bytes(
    strategy: Strategy, trainer: OpenTrainer, gradients_bytes: int
) -> dict[str, int | None]:
    """Bytes of states that this rank holds on its device, and on the host for it; None is not
    measured."""
    optimizer, slices, measured_gradients = trainer.optimizer, [], gradients_bytes
    if strategy.launch_mode.engine == "deepspeed":
        zero = deepspeed_private.optimizer(trainer)
        optimizer, slices = zero.optimizer, deepspeed_private.master_slices(zero)
        # ZeRO 1 and 2 free gradients at once
        is_kept = strategy.launch_mode.zero_stage == 3
        measured_gradients = deepspeed_private.gradient_slices(zero).nbytes if is_kept else None
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*slices, *(value for value in states if torch.is_tensor(value))]
    optimizer_bytes, offloaded_bytes = sum(map(local_bytes, tensors)), 0
    weights_bytes = sum(
        local_bytes(tensor)
        for parameter in trainer.model.parameters()
        for tensor in (deepspeed_private.local_part(parameter), *four_bit.scales(parameter))
    )
    if strategy.launch_mode.offloads:
        gradients = (flat.grad for flat in slices if flat.grad is not None)
        offloaded_bytes, optimizer_bytes = optimizer_bytes + sum(map(local_bytes, gradients)), 0
        if strategy.launch_mode.shards_parameters:
            offloaded_bytes += weights_bytes + (measured_gradients or 0)
            weights_bytes = measured_gradients = 0
    return {
        "weights_bytes": weights_bytes,
        "gradients_bytes": measured_gradients,
        "optimizer_bytes": optimizer_bytes,
        "offloaded_bytes": offloaded_bytes,
    }


def local_bytes(tensor: Any) -> int:
    """Bytes of a tensor on this rank, which may hold a part of it."""
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


def gathered(strategy: Strategy, trainer: OpenTrainer) -> Any:
    """The full state dict on rank 0's host if ranks hold parts of the weights; None if each rank
    holds all of them. Collective."""
    if strategy.launch_mode.shards_parameters:
        return trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return None
