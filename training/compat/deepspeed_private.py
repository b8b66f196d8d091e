"""The private names and undocumented attributes of DeepSpeed (0.19) that training uses or
replaces."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def optimizer(trainer: Any) -> Any:
    """The optimizer of ZeRO, around the recipe's own."""
    return trainer.deepspeed.optimizer


def master_slices(zero: Any) -> list[torch.Tensor]:
    """This rank's flat float32 copies of the weights that are trained, by group."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO 3
        return zero.fp32_partitioned_groups_flat
    return zero.single_partition_of_fp32_groups


def gradient_slices(zero: Any) -> torch.Tensor:
    """This rank's gradients under ZeRO 3, in one buffer."""
    return zero.grad_partitions_flat_buffer


def slice_mapping(parameter: torch.Tensor) -> Any:
    """The place of the parameter's part in this rank's flat slice, for ZeRO 1 and 2; None: the
    slice has no part of it."""
    return parameter._hp_mapping  # pyright: ignore


@contextmanager
def gathered(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, each rank has these parameters whole, also under ZeRO-3; rank 0's changes stay."""
    if not hasattr(parameters[0], "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


def local_part(parameter: Any) -> Any:
    """The part of a parameter that this rank holds under ZeRO 3; elsewhere the parameter."""
    return getattr(parameter, "ds_tensor", parameter)


def whole_shape(parameter: Any) -> torch.Size:
    """The shape of a full parameter, of which this rank may hold a part."""
    return getattr(parameter, "ds_shape", parameter.shape)


def watch_step(
    zero: Any,
    see_norms: Callable[[list[Any]], None],
    overflowed: Callable[[], object],
    may_step: Callable[[], bool],
) -> None:
    """Call `see_norms` with the norms of a step's gradients before the step, `overflowed` before
    the loss scale falls; step only if `may_step`."""
    update_scale, step_group = zero._update_scale, zero._optimizer_step
    # ZeRO 1, 2; 3
    name = "scaled_global_norm" if hasattr(zero, "scaled_global_norm") else "_get_norm_groups"
    norm_of = getattr(zero, name)

    def norm(*args: Any, **kwargs: Any) -> Any:
        norms = norm_of(*args, **kwargs)
        see_norms(norms if isinstance(norms, list) else [norms])
        return norms

    def scale(has_overflow: bool = False) -> None:
        if has_overflow:
            overflowed()
        update_scale(has_overflow)

    def step(group: int) -> None:
        if may_step():
            step_group(group)

    setattr(zero, name, norm)
    zero._update_scale, zero._optimizer_step = scale, step


@contextmanager
def saving_with(engine: Any, writer: Any) -> Iterator[None]:
    """Inside, the engine saves through `writer` and copies no Python script into checkpoints."""
    copies, engine._copy_recovery_script = engine._copy_recovery_script, lambda folder: None
    own, engine.checkpoint_engine = engine.checkpoint_engine, writer
    try:
        yield
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = own, copies


def ask_cuda_for_free_memory() -> None:
    """Let DeepSpeed ask CUDA for the free memory of a card. It asks NVML, by a number that it reads
    in CUDA_VISIBLE_DEVICES, where cards may be named by UUID."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def available_memory(self: Any, device_index: Any = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    CUDA_Accelerator.available_memory = available_memory


def pin_nothing() -> None:
    """Let DeepSpeed pin no host memory. `pin_memory` of its file alone does not: ZeRO-3 pins the
    weights that it offloads in any case (deepspeed 0.19.8 stage3.py)."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def pin_memory(self: Any, tensor: torch.Tensor, *copies: bool, **named: bool) -> torch.Tensor:
        return tensor

    CUDA_Accelerator.pin_memory = pin_memory


def leave_out_compiled_all_reduce() -> None:
    """Leave out DeepSpeed's all-reduce through shared memory. It is compiled at the first start (25
    s; it hangs if an earlier compilation was killed). Gloo gives the same bits without a
    compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
