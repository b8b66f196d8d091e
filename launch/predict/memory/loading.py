"""The order in which engines bring a model to a card, as events of its allocator, and the choice of
it for a candidate. Pure.

The order leaves the holes in which a later step finds room. Each function takes the blocks that
stay, and puts those that are there for a moment between them. Sources: transformers 5.14
modeling_utils.py and core_model_loading.py; deepspeed 0.19.8 zero/partition_parameters.py,
stage3.py and stage_1_and_2.py; torch 2.13 fsdp/_fully_shard; accelerate 1.15 fsdp2_prepare_model.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from launch.predict.memory import host_memory
from launch.predict.memory.allocator import EMPTY_CACHE, FREED, Event
from launch.predict.memory.stored_weights import StoredWeights
from launch.predict.optimizers import has_4_bits
from launch.predict.parameters import Shapes, total_elements
from launch.predict.step.streamed import Streamed
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.levers import SLOTS
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import ModelFamily, Strategy
from launch.schema.recipe import Recipe

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Births:
    """The blocks that stay when a run is loaded, in the order of the trace. Blocks are named by
    their ids."""

    loaded: Sequence[Event]  # weights, buffers, slices
    engine: Sequence[Event]
    trained: Collection[int] = ()  # trained weights, or the flat tensor of them
    slices: Collection[int] = ()  # ZeRO's float32 part of them
    layers: Sequence[Collection[int]] = ()  # the weights of each layer
    packed: Collection[int] = ()  # weights of 4 bits
    scales: Collection[int] = ()  # their scales
    first_free_id: int = 1 << 40  # ids from here on are unused


Load = Callable[[Births], list[Event]]


@dataclass
class _Events:
    """Events with blocks that are there for a moment."""

    next_id: int
    events: list[Event] = field(default_factory=list)

    def begin(self, sizes: Sequence[int]) -> list[int]:
        """Allocate blocks that are not in the trace."""
        blocks = list(range(self.next_id, self.next_id + len(sizes)))
        self.next_id += len(sizes)
        self.events += zip(blocks, sizes, strict=True)
        return blocks

    def end(self, blocks: Sequence[int]) -> None:
        self.events += [(block, FREED) for block in blocks]

    def passes(self, *sizes: int) -> None:
        """Blocks that are there together for a moment."""
        self.end(self.begin(sizes))

    def beside(self, sizes: Sequence[int], lasting: Sequence[Event]) -> None:
        """Allocate blocks that stay, while others of these sizes are there."""
        passing = self.begin(sizes)
        self.events += lasting
        self.end(passing)


def plain(births: Births) -> list[Event]:
    """A model moves to the card tensor by tensor."""
    return [*births.loaded, *births.engine]


def ddp(births: Births, buckets: Sequence[int]) -> list[Event]:
    """`buckets`: sizes in which rank 0 sends the weights, together."""
    events = _Events(births.first_free_id, [*births.loaded])
    events.passes(*buckets)
    return [*events.events, *births.engine]


def four_bits(
    births: Births,
    warmup_bytes: int,
    sources: Mapping[int, int],
    leaving: Sequence[tuple[int, int]] = (),
    num_last: int = 0,
) -> list[Event]:
    """A folder whose weights are quantised on the card. `warmup_bytes`: the block by which
    transformers reserves the model. `sources`: bytes of a quantised weight -> before. `leaving`:
    bytes before and after of weights that go to the host; then come the first `num_last` blocks."""
    events = _Events(births.first_free_id)
    if warmup_bytes:
        events.passes(warmup_bytes)
    for block, size_bytes in births.loaded[num_last:]:
        source = [sources[size_bytes]] if size_bytes in sources else []
        events.beside(source, [(block, size_bytes)])
    for pair in leaving:
        events.passes(*pair)
    events.events += births.loaded[:num_last]
    return [*events.events, *births.engine]


def zero(births: Births, flattened: Sequence[int], element_bytes: int) -> list[Event]:
    """ZeRO-1 and 2. `flattened`: sizes of the weights that are copied into a flat tensor on the
    card, and then freed. The float32 part is cast from a copy, and the optimizer begins with
    gradients of it."""
    slices = [event for event in births.loaded if event[0] in births.slices]
    flat = [event for event in births.loaded if event[0] in births.trained]
    events = _Events(
        births.first_free_id,
        [event for event in births.loaded if event not in slices and event not in flat],
    )
    events.beside(flattened, flat)
    narrow = [size * element_bytes // _FLOAT32_BYTES for _, size in slices]
    events.beside(narrow if element_bytes < _FLOAT32_BYTES else [], slices)
    events.events.append(EMPTY_CACHE)
    events.passes(*(size for _, size in slices))
    return [*events.events, *births.engine]


def zero3(
    births: Births,
    built: Sequence[int],
    head_bytes: Sequence[int],
    gathered: Sequence[Sequence[int]],
    undivided: Sequence[int] = (),
) -> list[Event]:
    """ZeRO-3. `built`: sizes of the parts of the trained weights, while the model is built, and
    `head_bytes`: those of the weight that is built last, before it is divided. Or `undivided`: the
    sizes of all weights, if the model moves to the card before it is divided. The parts become a
    flat tensor, by way of the host. `gathered`: the sizes that are there together when a weight is
    gathered; each is, for a moment."""
    slices = [event for event in births.loaded if event[0] in births.slices]
    flat_bytes = sum(size for block, size in births.loaded if block in births.trained)
    events = _Events(births.first_free_id)
    events.events += (
        event for event in births.loaded if event not in slices and event[0] not in births.trained
    )
    moved = events.begin(undivided)
    parts: list[int] = []
    for index, size_bytes in enumerate(built):
        parts += events.begin([size_bytes])
        events.end(moved[index : index + 1])
    events.end(moved[len(built) :])
    events.passes(*head_bytes)
    events.end(parts)
    if built or not undivided:  # parts on the host need no flat tensor on the card
        events.events.append(EMPTY_CACHE)
    events.begin([flat_bytes])  # it stays until the run ends, in place of the blocks of the weights
    events.beside([size for _, size in slices], slices)
    events.passes(*(size for _, size in slices))
    events.events += births.engine
    for sizes in gathered:
        events.passes(*sizes)
    return events.events


def fsdp2(births: Births, ranks: int, sources: Mapping[int, int] | None = None) -> list[Event]:
    """FSDP2. The weights of a layer are on the card whole, until their parts are made; those
    outside the layers stay whole until all are divided.

    `sources`: of weights of 4 bits, bytes of a rank's part -> of the weight before it is quantised
    on the card, where a folder's parts are made one by one; empty for a model of a shape. All other
    frozen weights come last, divided on the host."""
    sizes, early, late = dict(births.loaded), set[int](), list[Event]()
    events = _Events(births.first_free_id)
    if sources is not None:
        early |= {*births.packed, *births.scales} if sources else set()
        frozen = sizes.keys() - births.trained - early
        late = [(block, size) for block, size in births.loaded if block in frozen]
    for block, size_bytes in births.loaded:
        if block in early:
            before = [sources[size_bytes]] if sources and block in births.packed else []
            events.beside([*before, *(size_bytes * ranks for _ in before)], [(block, size_bytes)])
    apart = early | {block for block, _ in late}
    inside = {block for layer in births.layers for block in layer}
    for layer in births.layers:
        parts = [each for each in sizes.items() if each[0] in layer and each[0] not in apart]
        events.beside([size * ranks for _, size in parts], parts)
    undivided: list[int] = []
    for block in (block for block in sizes if block not in inside | apart):
        undivided += events.begin([sizes[block] * ranks])
        events.events.append((block, sizes[block]))
    events.end(undivided)
    return [*events.events, *late, *births.engine]


# ---- chosen


def choose_order(
    recipe: Recipe,
    strategy: Strategy,
    tensor_shapes: Shapes,
    family: ModelFamily,
    weights_bytes: int,
    budget_bytes: int,
    stored: StoredWeights | None,
    streamed: Streamed,
) -> Load:
    """The order in which a candidate's engine brings the weights to the device.

    `weights_bytes`: of all weights on a rank, as they are loaded. `budget_bytes`: of its
    device. `stored`: the folder that the weights come from, if they do."""
    engine, is_stored = strategy.launch_mode.engine, stored is not None
    if engine == "ddp":
        sent = host_memory.BROADCAST_BYTES
        if streamed.layers or (is_stored and strategy.keeps_frozen_apart):
            trained = trainable_shapes(tensor_shapes, recipe.model.freeze, recipe.lora, family)
            weights_bytes = total_elements(trained) * DTYPE_BYTES[recipe.model.dtype]
        remaining_bytes = min(sent, weights_bytes - sent)
        return partial(ddp, buckets=(sent, remaining_bytes) if remaining_bytes > 0 else ())
    if engine == "fsdp2":
        ranks, sources = strategy.num_processes, None
        if recipe.quantization is not None:
            on_card = is_stored and strategy.device == "cuda"
            sources = _sources(recipe, tensor_shapes, family, ranks) if on_card else {}
        return partial(fsdp2, ranks=ranks, sources=sources)
    if engine == "deepspeed":
        return _of_zero(recipe, strategy, tensor_shapes, family, budget_bytes, stored)
    if recipe.quantization is None or not is_stored or strategy.device == "cpu":
        return plain
    return _of_four_bits(recipe, tensor_shapes, family, streamed)


def _of_four_bits(
    recipe: Recipe, tensor_shapes: Shapes, family: ModelFamily, streamed: Streamed
) -> Load:
    """Weights of a folder, which are quantised on the card one by one. Tied weights, buffers and
    scales are not in what transformers reserves; it reserves nothing where layers are streamed."""
    element_bytes = DTYPE_BYTES[recipe.model.dtype]
    quantised = {name: sides for name, sides in tensor_shapes.items() if has_4_bits(name, family)}
    num_unquantised = total_elements(tensor_shapes) - total_elements(quantised)
    reserved_bytes = num_unquantised * element_bytes + total_elements(quantised) // 2
    return partial(
        four_bits,
        warmup_bytes=0 if streamed.layers else reserved_bytes,
        sources=_sources(recipe, tensor_shapes, family),
        leaving=[pair for layer in streamed.layers for pair in layer.packed],
        num_last=SLOTS if streamed.layers else 0,
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
) -> Load:
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
        return partial(zero, flattened=sizes if is_copied else (), element_bytes=element_bytes)
    built_bytes = DTYPE_BYTES[recipe.model.dtype]
    head = math.prod(next(iter(tensor_shapes.values())))
    casts = [head * element_bytes] if built_bytes != element_bytes else []
    undivided = [math.prod(sides) * element_bytes for sides in tensor_shapes.values()]
    parts = [-(-size // ranks) for size in sizes]
    gathered = [*zip(sizes, parts, strict=True)] if mode.offloads else [(size,) for size in sizes]
    return partial(
        zero3,
        built=() if mode.offloads else parts,
        head_bytes=[head * built_bytes, *casts] if stored is not None else [],
        gathered=gathered,
        undivided=undivided if stored is None else (),
    )
