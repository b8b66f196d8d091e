"""Layers whose frozen weights are streamed from host memory: their bytes on either side, and a step
with them, made of a step with all weights on the device. Pure."""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from launch.predict.optimizers import has_4_bits, held_bytes
from launch.predict.parameters import Shapes
from launch.predict.step.rewrite_log import Rewriting
from launch.predict.trained_parameters import COPY, trainable_shapes
from launch.schema.levers import SLOTS, Levers, aligned_bytes
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import ModelFamily
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import FROZEN, PACKED, SLOT, Log, grouped

_IN_LAYER = re.compile(r"(.*?)\.(\d+)\.")  # the list that a parameter's layer is in, and its place


@dataclass(frozen=True)
class LayerWeights:
    """The frozen weights of a decoder layer, as a device holds them, and before they got 4 bits."""

    sizes: tuple[int, ...]
    packed: tuple[tuple[int, int], ...]  # (bytes before, bytes of 4 bits) of each such weight

    @property
    def bytes(self) -> int:
        """Bytes of the layer's buffer on the host, or of a slot."""
        return sum(map(aligned_bytes, self.sizes))


@dataclass(frozen=True)
class Streamed:
    """The layers that a step streams; (): none."""

    layers: tuple[LayerWeights, ...]

    @property
    def host_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a device holds less."""
        slots_bytes = SLOTS * max((layer.bytes for layer in self.layers), default=0)
        return sum(sum(layer.sizes) for layer in self.layers) - slots_bytes


def frozen_layers(recipe: Recipe, tensor_shapes: Shapes, family: ModelFamily) -> list[LayerWeights]:
    """The frozen weights of each decoder layer beside LoRA; none of other trainings, whose
    checkpoints have all weights, and of encoder-decoders."""
    training, lora = recipe.training, recipe.lora
    if lora is None or family.is_encoder_decoder:
        return []
    copied = {
        name.replace(COPY, ".")
        for name in trainable_shapes(tensor_shapes, (), lora, family)
        if COPY in name
    }
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "no"
    quantization, element_bytes = recipe.quantized(precision), DTYPE_BYTES[recipe.model.dtype]
    lists: dict[str, dict[int, LayerWeights]] = defaultdict(dict)
    for name, sides in tensor_shapes.items():
        match = _IN_LAYER.match(name)
        if match is None or name in copied:
            continue
        size_bytes = held_bytes(name, sides, quantization, family, element_bytes)
        packed = ()
        if quantization is not None and has_4_bits(name, family) and name.endswith(".weight"):
            packed = ((math.prod(sides) * element_bytes, size_bytes),)
        layers, index = lists[match[1]], int(match[2])
        before = layers.get(index, LayerWeights((), ()))
        layers[index] = LayerWeights((*before.sizes, size_bytes), (*before.packed, *packed))
    decoder = max(lists.values(), key=len, default={})
    return [decoder[index] for index in sorted(decoder)]


def streamed(layers: list[LayerWeights], levers: Levers) -> Streamed:
    """The layers that are streamed, of all."""
    return Streamed(tuple(layers[place] for place in levers.streamed_of(len(layers))))


def stream(log: Log, levers: Levers) -> Log:
    """The same step with the frozen weights of its streamed layers on the host. The slots in their
    place are there before all other weights. Work is not changed."""
    if not levers.streamed_layers:
        return log
    layers = grouped(  # weights
        (block.layer[1], event.block)
        for event in log.events
        for block in [log.blocks[event.block]]
        if event.birth and block.born == "start:weights" and block.layer and not block.layer[0]
    )
    rewriting, slot_bytes = Rewriting(log), 0
    for index in levers.streamed_of(len(layers)):
        frozen = [each for each in layers[index] if log.blocks[each].op in (FROZEN, PACKED)]
        sizes = [log.blocks[number].fixed_bytes for number in frozen]
        slot_bytes = max(slot_bytes, sum(map(aligned_bytes, sizes)))
        for number in frozen:
            rewriting.drop(number)
    for _ in range(SLOTS):
        rewriting.born(slot_bytes, "weights", SLOT, 0)
    return rewriting.result()
