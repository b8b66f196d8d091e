"""The division of a model's states by each engine: bytes on each rank and host, and the recipes
that the engine refuses."""

import math
from dataclasses import replace

from launch.predict import optimizers
from launch.predict.parameters import Shapes, total_elements
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.levers import LEVERS
from launch.schema.model_sections import DTYPE_BYTES, ModelSection
from launch.schema.modes import Refusal
from launch.schema.plan import MemoryEstimate, ModelFamily, Strategy
from launch.schema.recipe import Recipe

# ZeRO trains flat slices of all parameters joined together and FSDP2 rows of each: only an
# optimizer that treats every element alike gives the same result there. Adafactor keeps rows and
# columns, bitsandbytes blocks and whole embeddings.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# DeepSpeed trains a float32 copy of the weights, also where they are float32 already; FSDP2 under
# autocast float32 ones
MASTER_BYTES = 4


def refusal(recipe: Recipe, strategy: Strategy) -> str | None:
    """The reason why this mode cannot run the recipe as it is, or None."""
    training, dtype = recipe.training, recipe.model.dtype
    is_fp16 = dtype == "float16" and recipe.trains_model_dtype
    trained, half = f"model.dtype {dtype}", dtype
    # the adapters of 4-bit layers are in the type that these compute in
    if recipe.lora and recipe.quantization and not recipe.lora.autocast_adapter_dtype:
        computed = recipe.quantized(strategy.mixed_precision)
        assert computed is not None
        half = computed.bnb_4bit_compute_dtype or dtype
        is_fp16 |= half != "float32"
        trained = "lora.autocast_adapter_dtype: false"
    refusals: dict[Refusal, tuple[bool, str]] = {
        "float16 beside fp16": (
            is_fp16 and strategy.mixed_precision == "fp16",
            f"cannot train {trained} beside fp16 autocast, whose loss scaler takes no {half}"
            f" gradients; leave {trained.partition(' ')[0].rstrip(':')} out, or use a deepspeed"
            " mode, which trains a float32 copy of the weights",
        ),
        "4-bit weights": (
            # the row of fsdp2 still lists it: modes.py is changed with the next measurements of it
            recipe.quantization is not None and strategy.launch_mode.engine != "fsdp2",
            "cannot share out 4-bit weights, whose scales stand beside them; use fsdp2, or a mode"
            " whose ranks hold full copies of them: single_gpu, dual_gpu_nccl, multi_cpu or cpu",
        ),
        "CPUs": (
            strategy.device == "cpu",
            "needs GPUs: on CPUs Accelerate leaves FSDP out and trains plain DDP; use"
            " deepspeed_zero3, multi_cpu",
        ),
        "Gloo between GPUs": (
            strategy.device == "cuda" and strategy.backend == "gloo",
            "needs NCCL; over Gloo GPUs train with DDP only: use dual_gpu_gloo, or single_gpu",
        ),
        "one rank": (
            strategy.num_processes == 1,
            "shares the states out over ranks, and there is one; use single_gpu or"
            " deepspeed_zero2_offload",
        ),
        "load_best_model_at_end": (
            training.load_best_model_at_end,
            "has no whole weights in its checkpoints, and training.load_best_model_at_end wants"
            " them; leave it out, or use single_gpu, dual_gpu_nccl, multi_cpu or cpu",
        ),
        "optimizers of whole tensors": (
            strategy.levers.optim not in ELEMENTWISE,
            f"cuts tensors up, and training.optim {strategy.levers.optim} needs them whole; use"
            f" {', '.join(ELEMENTWISE)}",
        ),
        "half weights without autocast": (
            dtype != "float32" and strategy.mixed_precision == "no",
            f"with model.dtype {dtype} needs training.bf16 or training.fp16: DeepSpeed trains a"
            " float32 copy of the weights and casts",
        ),
        "weight lengths": (
            recipe.lora is not None and recipe.lora.use_dora,
            "shares the weights out, and lora.use_dora computes the length of whole weights; use a"
            " mode whose ranks hold full copies of the weights, or leave use_dora out",
        ),
        "trained tokens": (
            recipe.lora is not None and bool(recipe.lora.trainable_token_indices),
            "shares the embeddings out, and PEFT trains single rows of them only where a rank holds"
            " them whole (tokenizer.add_tokens, lora.trainable_token_indices); train all of their"
            " rows with --lora.modules_to_save=[embed_tokens,lm_head], use a mode whose ranks hold"
            " full copies of the weights, or train without lora",
        ),
    }
    for row in LEVERS:
        value = row.read(strategy.levers)
        if value != row.plain and (reason := row.mode_refusal(strategy.launch_mode, value)):
            return f"{strategy.mode} {reason}"
    texts = (refusals[name] for name in strategy.launch_mode.refuses if name in refusals)
    return next((f"{strategy.mode} {text}" for applies, text in texts if applies), None)


def per_rank(
    full_copy: MemoryEstimate,
    tensor_shapes: Shapes,
    recipe: Recipe,
    strategy: Strategy,
    family: ModelFamily,
) -> MemoryEstimate:
    """The part of one rank in states whose full copy is `full_copy`.

    Source: DeepSpeed 0.19 stage_1_and_2.py and stage3.py (the float32 slice is a clone); torch
    fully_shard (dimension 0 of each parameter). Padding of the slices is left out: below
    num_processes elements a tensor.
    """
    ranks, mode = strategy.num_processes, strategy.launch_mode
    if mode.is_whole:
        return full_copy
    trainable = trainable_shapes(tensor_shapes, recipe.model.freeze, recipe.lora, family)
    trained = total_elements(trainable)
    if mode.engine == "fsdp2":
        # Accelerate makes trained weights float32, as adapters are already
        if strategy.mixed_precision != "no":
            before = optimizers.trained_bytes(
                trainable,
                recipe.lora,
                recipe.model.dtype,
                recipe.quantized(strategy.mixed_precision),
                family,
            )
            state_bytes = optimizers.OPTIMIZERS[strategy.levers.optim]("", (trained,), MASTER_BYTES)
            full_copy = replace(
                full_copy,
                weights_bytes=full_copy.weights_bytes - before + trained * MASTER_BYTES,
                gradients_bytes=trained * MASTER_BYTES,
                optimizer_bytes=state_bytes,
            )
        scales_bytes = optimizers.scales_bytes(tensor_shapes, recipe.quantization, family)
        return replace(
            full_copy,
            weights_bytes=scales_bytes
            + math.ceil((full_copy.weights_bytes - scales_bytes) / ranks),
            gradients_bytes=math.ceil(full_copy.gradients_bytes / ranks),
            optimizer_bytes=math.ceil(full_copy.optimizer_bytes / ranks),
        )
    adapters = trained if recipe.lora else 0
    element_bytes = computed_element_bytes(recipe.model, strategy)
    weights = (total_elements(tensor_shapes) + adapters) * element_bytes
    gradients = trained * element_bytes
    states = trained * MASTER_BYTES + optimizers.OPTIMIZERS[strategy.levers.optim](
        "", (trained,), MASTER_BYTES
    )
    on_device = {
        "weights_bytes": math.ceil(weights / ranks) if mode.shards_parameters else weights,
        "gradients_bytes": (
            math.ceil(gradients / ranks) if "gradients" in mode.shards else gradients
        ),
        "optimizer_bytes": math.ceil(states / ranks),
    }
    if not mode.offloads:
        return replace(full_copy, **on_device)
    # the host holds the slice's states and its float32 gradients; under ZeRO-3 the slices of
    # weights and gradients too
    offloaded = on_device.pop("optimizer_bytes") + math.ceil(trained * MASTER_BYTES / ranks)
    on_device["gradients_bytes"] = 0
    if mode.shards_parameters:
        offloaded += on_device["weights_bytes"] + math.ceil(gradients / ranks)
        on_device["weights_bytes"] = 0
    return replace(full_copy, **on_device, optimizer_bytes=0, offloaded_bytes=offloaded)


def computed_element_bytes(model: ModelSection, strategy: Strategy) -> int:
    """Bytes of an element in the precision of a step; DeepSpeed casts the whole model to it."""
    return DTYPE_BYTES[model.dtype] if strategy.mixed_precision == "no" else 2


# reduced or gathered at once; DeepSpeed's own 500 million are 1 GB each in bf16
BUCKET_ELEMENTS = 50_000_000
