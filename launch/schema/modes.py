"""The launch modes: one row each, with all that the planner, the renderer and the ranks ask of it.

A new mode is its name in `Mode` and its row in `LAUNCH_MODES`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launch.schema.machine import Device

Mode = Literal[
    "cpu",
    "multi_cpu",
    "single_gpu",
    "dual_gpu_nccl",
    "dual_gpu_gloo",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero2_offload",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
    "fsdp2",
]

States = Literal["optimizer", "gradients", "parameters"]

# Refused combinations; the conditions and the messages are in launch/predict/sharding.py.
Refusal = Literal[
    "float16 beside fp16",
    "4-bit weights",
    "CPUs",
    "Gloo between GPUs",
    "one rank",
    "load_best_model_at_end",
    "optimizers of whole tensors",
    "half weights without autocast",
    "output chunks",
    "trained tokens",
    "weight lengths",
]


@dataclass(frozen=True)
class LaunchMode:
    """Facts about a launch mode: how its ranks start, and which states each rank holds."""

    engine: Literal["plain", "ddp", "deepspeed", "fsdp2"]
    distributed_type: str  # Accelerate's name, once the ranks run
    device: Device | None = None  # None: GPUs, or CPUs on a machine without
    processes: Literal["one", "several", "any"] = "any"
    backend: Literal["nccl", "gloo"] | None = None  # None: NCCL between GPUs, Gloo between CPUs
    zero_stage: int = 0  # DeepSpeed's ZeRO stage; 0: another engine
    shards: tuple[States, ...] = ()  # states of which each rank holds a part only
    # optimizer states stand in host RAM and are updated there; sharded parameters stand there too
    offloads: bool = False
    refuses: tuple[Refusal, ...] = ()
    # folders of a checkpoint that all ranks write into
    checkpoint_folders: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Each rank holds a full copy of the model's states."""
        return not self.shards

    @property
    def shards_parameters(self) -> bool:
        return "parameters" in self.shards


# trained as they are under autocast; adapters are float32
_WHOLE: tuple[Refusal, ...] = ("float16 beside fp16",)
# the bytes of several parameters lie in one slice, or a parameter's bytes on several ranks
_SHARDED: tuple[Refusal, ...] = (
    "4-bit weights",
    "Gloo between GPUs",
    "load_best_model_at_end",
    "optimizers of whole tensors",
)
_ZERO = LaunchMode("deepspeed", "DEEPSPEED", refuses=(*_SHARDED, "half weights without autocast"))
_ZERO_1 = replace(_ZERO, zero_stage=1, shards=("optimizer",))
_ZERO_2 = replace(_ZERO, zero_stage=2, shards=("optimizer", "gradients"))
_ZERO_3 = replace(
    _ZERO,
    zero_stage=3,
    shards=("optimizer", "gradients", "parameters"),
    refuses=(*_ZERO.refuses, "output chunks", "trained tokens", "weight lengths"),
)

# Fastest first where the states fit: of the modes for one device and number of ranks, each holds
# less on the device than the one before it and moves more bytes.
LAUNCH_MODES: Mapping[Mode, LaunchMode] = {
    "cpu": LaunchMode("plain", "NO", "cpu", "one", refuses=_WHOLE),
    "multi_cpu": LaunchMode("ddp", "MULTI_CPU", "cpu", "several", refuses=_WHOLE),
    "single_gpu": LaunchMode("plain", "NO", "cuda", "one", refuses=_WHOLE),
    "dual_gpu_nccl": LaunchMode("ddp", "MULTI_GPU", "cuda", "several", "nccl", refuses=_WHOLE),
    "dual_gpu_gloo": LaunchMode("ddp", "MULTI_GPU", "cuda", "several", "gloo", refuses=_WHOLE),
    "deepspeed_zero1": _ZERO_1,
    "deepspeed_zero2": _ZERO_2,
    "deepspeed_zero3": _ZERO_3,
    "deepspeed_zero2_offload": replace(_ZERO_2, offloads=True),
    "deepspeed_zero3_offload": replace(_ZERO_3, offloads=True),
    "fsdp2": LaunchMode(
        "fsdp2",
        "FSDP",
        shards=("optimizer", "gradients", "parameters"),
        refuses=(
            *_SHARDED,
            "CPUs",
            "one rank",
            "output chunks",
            "trained tokens",
            "weight lengths",
        ),
        checkpoint_folders=("pytorch_model_fsdp_0", "optimizer_0"),
    ),
}
