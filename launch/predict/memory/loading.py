"""The order in which engines bring a model to a card, as events of its allocator. Pure.

The order leaves the holes in which a later step finds room. Each function takes the blocks that
stay, and puts those that are there for a moment between them. Sources: transformers 5.14
modeling_utils.py and core_model_loading.py; deepspeed 0.19.8 zero/partition_parameters.py,
stage3.py and stage_1_and_2.py; torch 2.13 fsdp/_fully_shard; accelerate 1.15 fsdp2_prepare_model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from launch.predict.memory.allocator import EMPTY_CACHE, FREED, Event

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
    unsliced = [event for event in births.loaded if event not in slices and event not in flat]
    events = _Events(births.first_free_id, unsliced)
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
