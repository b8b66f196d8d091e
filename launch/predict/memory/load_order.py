"""The order in which a candidate's engine brings the weights to the device, with their sizes."""

import math
from functools import partial

from launch.predict.memory import host_memory, loading
from launch.predict.memory.stored_weights import StoredWeights
from launch.predict.optimizers import has_4_bits
from launch.predict.parameters import Shapes, total_elements
from launch.predict.step.streamed import Streamed
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.levers import SLOTS
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import ModelFamily, Strategy
from launch.schema.recipe import Recipe


def choose_order(
    recipe: Recipe,
    strategy: Strategy,
    tensor_shapes: Shapes,
    family: ModelFamily,
    weights_bytes: int,
    budget_bytes: int,
    stored: StoredWeights | None,
    streamed: Streamed | None = None,
) -> loading.Load:
    """`weights_bytes`: of all weights on a rank, as they are loaded. `budget_bytes`: of its
    device. `stored`: the folder that the weights come from, if they do."""
    engine, is_stored = strategy.launch_mode.engine, stored is not None
    if engine == "ddp":
        sent = host_memory.BROADCAST_BYTES
        if streamed or (is_stored and strategy.keeps_frozen_apart):
            trained = trainable_shapes(tensor_shapes, recipe.model.freeze, recipe.lora, family)
            weights_bytes = total_elements(trained) * DTYPE_BYTES[recipe.model.dtype]
        remaining_bytes = min(sent, weights_bytes - sent)
        return partial(loading.ddp, buckets=(sent, remaining_bytes) if remaining_bytes > 0 else ())
    if engine == "fsdp2":
        ranks, sources = strategy.num_processes, None
        if recipe.quantization is not None:
            on_card = is_stored and strategy.device == "cuda"
            sources = _sources(recipe, tensor_shapes, family, ranks) if on_card else {}
        return partial(loading.fsdp2, ranks=ranks, sources=sources)
    if engine == "deepspeed":
        return _of_zero(recipe, strategy, tensor_shapes, family, budget_bytes, stored)
    if recipe.quantization is None or not is_stored or strategy.device == "cpu":
        return loading.plain
    return _of_four_bits(recipe, tensor_shapes, family, streamed)


def _of_four_bits(
    recipe: Recipe, tensor_shapes: Shapes, family: ModelFamily, streamed: Streamed | None
) -> loading.Load:
    """Weights of a folder, which are quantised on the card one by one. Tied weights, buffers and
    scales are not in what transformers reserves; it reserves nothing where layers are streamed."""
    element_bytes = DTYPE_BYTES[recipe.model.dtype]
    quantised = {name: sides for name, sides in tensor_shapes.items() if has_4_bits(name, family)}
    num_unquantised = total_elements(tensor_shapes) - total_elements(quantised)
    sources = _sources(recipe, tensor_shapes, family)
    if streamed is not None:
        leaving = [pair for layer in streamed.layers for pair in layer.packed]
        return partial(
            loading.four_bits, warmup_bytes=0, sources=sources, leaving=leaving, num_last=SLOTS
        )
    return partial(
        loading.four_bits,
        warmup_bytes=num_unquantised * element_bytes + total_elements(quantised) // 2,
        sources=sources,
    )


def _sources(
    recipe: Recipe, tensor_shapes: Shapes, family: ModelFamily, ranks: int = 1
) -> dict[int, int]:
    """Bytes of a rank's part of a weight of 4 bits -> of the whole weight before."""
    counts = {math.prod(sides) for name, sides in tensor_shapes.items() if has_4_bits(name, family)}
    element_bytes = DTYPE_BYTES[recipe.model.dtype]
    return {math.ceil(count // 2 / ranks): count * element_bytes for count in counts}


def _of_zero(
    recipe: Recipe,
    strategy: Strategy,
    tensor_shapes: Shapes,
    family: ModelFamily,
    budget_bytes: int,
    stored: StoredWeights | None,
) -> loading.Load:
    """Weights that DeepSpeed divides. ZeRO-1 and 2 copy them into a flat tensor on the card if it
    fits there; of weights that a CPU has mapped no tensor is there to copy. Source: deepspeed
    0.19.8 stage_1_and_2.py, flatten_on_accelerator.

    ZeRO-3 builds the weights of a folder divided, in the recipe's type, and casts them. A model of
    a shape is built whole (engines/setup.py) and moves to the card before it is divided (engine.py,
    _configure_distributed_model)."""
    mode, ranks = strategy.launch_mode, strategy.num_processes
    trained = trainable_shapes(tensor_shapes, recipe.model.freeze, recipe.lora, family)
    element_bytes = 4 if strategy.mixed_precision == "no" else 2
    sizes = [math.prod(sides) * element_bytes for sides in trained.values()]
    if mode.zero_stage < 3:
        is_mapped = stored is not None and not stored.converted_bytes(recipe.model.dtype)
        is_copied = 2 * sum(sizes) < budget_bytes and not (strategy.device == "cpu" and is_mapped)
        flattened = sizes if is_copied else ()
        return partial(loading.zero, flattened=flattened, element_bytes=element_bytes)
    built_bytes = DTYPE_BYTES[recipe.model.dtype]
    head = math.prod(next(iter(tensor_shapes.values())))
    casts = [head * element_bytes] if built_bytes != element_bytes else []
    undivided = [math.prod(sides) * element_bytes for sides in tensor_shapes.values()]
    parts = [-(-size // ranks) for size in sizes]
    pairs = zip(sizes, parts, strict=True)
    gathered = list(pairs) if mode.offloads else [(size,) for size in sizes]
    return partial(
        loading.zero3,
        built=() if mode.offloads else parts,
        head_bytes=[head * built_bytes, *casts] if stored is not None else [],
        gathered=gathered,
        undivided=undivided if stored is None else (),
    )
