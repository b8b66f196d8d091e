"""What each engine does with a model's states: which rank or host holds how many bytes of them, and
what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

from launch.predict import optimizers, parameters
from launch.predict.parameters import Shapes
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.recipe import DTYPE_BYTES, ModelSection, Recipe

# ZeRO trains flat slices of all parameters joined together and FSDP2 rows of each: only an
# optimizer that treats every element alike gives the same result there. Adafactor keeps rows and
# columns, bitsandbytes blocks and whole embeddings.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# DeepSpeed trains a float32 copy of the weights, also where they are float32 already; FSDP2 under
# autocast float32 ones
MASTER_BYTES = 4


def refusal(recipe: Recipe, strategy: Strategy) -> str | None:
    """Why this engine cannot run the recipe as it was asked for, or None."""
    mode, training = strategy.mode, recipe.training
    if strategy.engine in ("plain", "ddp"):
        is_half = recipe.model.dtype == "float16" and recipe.lora is None  # adapters are float32
        if is_half and strategy.mixed_precision == "fp16":
            return (
                f"{mode} cannot train model.dtype float16 beside fp16 autocast, whose loss scaler"
                " takes no float16 gradients; leave model.dtype out, or use a deepspeed mode, which"
                " trains a float32 copy of the weights"
            )
        return None
    if recipe.quantization is not None:
        return (
            f"{mode} cannot share out 4-bit weights, whose scales stand beside them; use a mode"
            " whose ranks hold them whole: single_gpu, dual_gpu_nccl, multi_cpu or cpu"
        )
    if strategy.device == "cpu" and strategy.engine == "fsdp2":
        return (
            "fsdp2 needs GPUs: on CPUs Accelerate leaves FSDP out and trains plain DDP; use"
            " deepspeed_zero3, multi_cpu"
        )
    if strategy.device == "cuda" and strategy.backend == "gloo":
        return (
            f"{mode} needs NCCL; over Gloo GPUs train with DDP only: use dual_gpu_gloo, or"
            " single_gpu"
        )
    if strategy.engine == "fsdp2" and strategy.num_processes == 1:
        return (
            "fsdp2 shares the states out over ranks, and there is one; use single_gpu or"
            " deepspeed_zero2_offload"
        )
    if training.load_best_model_at_end:
        return (
            f"{mode} has no whole weights in its checkpoints, and training.load_best_model_at_end"
            " wants them; leave it out, or use single_gpu, dual_gpu_nccl, multi_cpu or cpu"
        )
    if training.optim not in ELEMENTWISE:
        known = ", ".join(ELEMENTWISE)
        return (
            f"{mode} cuts tensors up, and training.optim {training.optim} needs them whole; use"
            f" {known}"
        )
    if (
        strategy.engine == "deepspeed"
        and recipe.model.dtype != "float32"
        and strategy.mixed_precision == "no"
    ):
        return (
            f"{mode} with model.dtype {recipe.model.dtype} needs training.bf16 or training.fp16:"
            " DeepSpeed trains a float32 copy of the weights and casts"
        )
    return None


def per_rank(
    whole: MemoryEstimate, shapes: Shapes, recipe: Recipe, strategy: Strategy, model_type: str
) -> MemoryEstimate:
    """What one rank holds of states that a full copy would hold as `whole`.

    Source: DeepSpeed 0.19 stage_1_and_2.py and stage3.py (the float32 slice is a clone); torch
    fully_shard (dimension 0 of each parameter). Padding of the slices is left out: below
    num_processes elements a tensor.
    """
    ranks = strategy.num_processes
    if strategy.engine in ("plain", "ddp"):
        return whole
    trainable = parameters.trainable_shapes(shapes, recipe.model.freeze, recipe.lora, model_type)
    trained = sum(math.prod(shape) for shape in trainable.values())
    if strategy.engine == "fsdp2":
        # Accelerate makes trained weights float32
        if strategy.mixed_precision != "no" and not recipe.lora:
            added = trained * (MASTER_BYTES - DTYPE_BYTES[recipe.model.dtype])
            state_bytes = optimizers.OPTIMIZERS[recipe.training.optim]("", (trained,), MASTER_BYTES)
            whole = replace(
                whole,
                weights_bytes=whole.weights_bytes + added,
                gradients_bytes=trained * MASTER_BYTES,
                optimizer_bytes=state_bytes,
            )
        return replace(
            whole,
            weights_bytes=math.ceil(whole.weights_bytes / ranks),
            gradients_bytes=math.ceil(whole.gradients_bytes / ranks),
            optimizer_bytes=math.ceil(whole.optimizer_bytes / ranks),
        )
    adapters = trained if recipe.lora else 0
    element_bytes = _deepspeed_element_bytes(recipe.model, strategy)
    weights = (sum(math.prod(shape) for shape in shapes.values()) + adapters) * element_bytes
    gradients = trained * element_bytes
    states = trained * MASTER_BYTES + optimizers.OPTIMIZERS[recipe.training.optim](
        "", (trained,), MASTER_BYTES
    )
    stage = strategy.zero_stage
    on_device = {
        "weights_bytes": math.ceil(weights / ranks) if stage == 3 else weights,
        "gradients_bytes": math.ceil(gradients / ranks) if stage >= 2 else gradients,
        "optimizer_bytes": math.ceil(states / ranks),
    }
    if not strategy.offloads:
        return replace(whole, **on_device)
    # the host holds the slice's states and its float32 gradients; under ZeRO-3 the slices of
    # weights and gradients too
    offloaded = on_device.pop("optimizer_bytes") + math.ceil(trained * MASTER_BYTES / ranks)
    on_device["gradients_bytes"] = 0
    if stage == 3:
        offloaded += on_device["weights_bytes"] + math.ceil(gradients / ranks)
        on_device["weights_bytes"] = 0
    return replace(whole, **on_device, optimizer_bytes=0, offloaded_bytes=offloaded)


def _deepspeed_element_bytes(model: ModelSection, strategy: Strategy) -> int:
    """DeepSpeed casts the whole model to the precision it computes in."""
    return DTYPE_BYTES[model.dtype] if strategy.mixed_precision == "no" else 2


# reduced or gathered at once; DeepSpeed's own 500 million are 1 GB each in bf16
BUCKET_ELEMENTS = 50_000_000
