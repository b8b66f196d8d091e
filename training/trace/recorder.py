"""What a step allocates, frees and computes: recorded by torch's dispatcher while fake tensors go
through it.

Nothing here has weights or a device. A storage's birth is seen as an operator returns it, its death
by a finalizer; FLOPs are those of torch.utils.flop_counter. Every size is split into a part that
grows with the batch and one that does not: the batch traced is a prime, so a size that it divides
is a number of bytes per sample.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from training.compat import torch_private
from training.compat.torch_private import TorchDispatchMode, tree_iter

aten = torch.ops.aten
BATCH = 1009  # prime: no width, vocabulary or length that is used divides by it
# sequence number that autograd gives to nodes that accumulate into a leaf
FINAL_NODE = (1 << 64) - 1
Layer = tuple[int, int]  # (stack, index in it)


@dataclass
class Block:
    """One storage. Its size at batch b is fixed_bytes + b * sample_bytes."""

    fixed_bytes: int
    sample_bytes: int
    kind: str  # "" until the whole log is known
    op: str
    born: str  # phase
    layer: Layer | None


@dataclass
class Event:
    """A block's birth or death, where it happens."""

    block: int
    birth: bool
    phase: str
    layer: Layer | None


@dataclass
class Work:
    """What kernels do in one section; each pair is (fixed, per sample)."""

    flops: dict[str, list[float]] = field(default_factory=dict)  # dtype -> of matrix products
    # dtype -> of fused attention
    attention_flops: dict[str, list[float]] = field(default_factory=dict)
    bytes: list[float] = field(default_factory=lambda: [0.0, 0.0])  # moved by all other kernels
    kernels: int = 0
    products: int = 0  # of the kernels

    def add(self, other: Work, times: int = 1) -> None:
        for mine, theirs in (
            (self.flops, other.flops),
            (self.attention_flops, other.attention_flops),
        ):
            for dtype, parts in theirs.items():
                _add(mine.setdefault(dtype, [0.0, 0.0]), parts, times)
        _add(self.bytes, other.bytes, times)
        self.kernels += times * other.kernels
        self.products += times * other.products


def _add(into: list[float], parts: Iterable[float], times: int = 1) -> None:
    for at, part in enumerate(parts):
        into[at] += times * part


@dataclass
class Log:
    """The recorded step."""

    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # (forward or backward, layer)
    work: dict[tuple[str, Layer | None], Work] = field(default_factory=dict)
    batch: int = BATCH

    def split(self, size: float) -> tuple[float, float]:
        """(fixed part, part per sample) of a size seen at this log's batch; one sample is all there
        is of itself."""
        return (size, 0) if self.batch == 1 or size % self.batch else (0, size // self.batch)


class Recorder(TorchDispatchMode):
    """Fills a Log while it is active. `phase` says where in the step; layers are told apart by
    hooks."""

    supports_higher_order_operators = True

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__()
        self.log = Log(batch=batch)
        self.phase = "start"
        # whether some row of the batch is shorter than the longest: masks are kept then
        self.padded = True
        self.widest: int | None = None  # the vocabulary: what has it as last size is logits or loss
        # (name, args, kwargs, out) -> sizes that a kernel allocates inside
        self.kernel_workspace: Any = None
        self.decompositions: Mapping[Any, Any] = {}  # operator -> what its kernel does
        self._ids: dict[int, int] = {}
        self._layers: list[Layer] = []
        # sequence numbers of autograd nodes that a layer made
        self._ranges: list[tuple[int, int, Layer]] = []
        self._last: Layer | None = None
        # the layer that has just returned: no operator has run since
        self._left: Layer | None = None
        self._accumulated: list[tuple[int, list[int | None]]] = []
        self._suspended = 0
        self._closed = False

    # ---- layers

    def watch(self, stacks: Iterable[torch.nn.ModuleList]) -> None:
        """Tell the layers of these stacks apart, forward and backward."""
        for stack, layers in enumerate(stacks):
            for index, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._entering((stack, index)))
                layer.register_forward_hook(self._leaving, always_call=True)

    def _entering(self, layer: Layer) -> Any:
        def enter(module: torch.nn.Module, args: Any) -> None:
            self._layers.append(layer)
            self._left = None
            self._ranges.append((torch_private.next_node_number(), -1, layer))

        return enter

    def _leaving(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        layer = self._left = self._layers.pop()
        for at in reversed(range(len(self._ranges))):
            start, end, of = self._ranges[at]
            if of == layer and end < 0:
                self._ranges[at] = (start, torch_private.next_node_number(), of)
                return

    def layer(self) -> Layer | None:
        """Where the step is: in a layer's forward (or its recomputation), in a node that its
        forward made, or in the optimizer's update of one of its parameters."""
        if self.phase == "optimizer":
            return self._last
        if self._layers:
            return self._layers[-1]
        # the last one's output is let go
        if self._left is not None and not self.phase.startswith("backward"):
            return self._left
        number = torch_private.current_node_number()
        if number is None:
            self._last = None
            return None
        if number != FINAL_NODE:
            self._last = next(
                (of for start, end, of in self._ranges if start <= number < end), None
            )
        return self._last

    # ---- storages

    def mark(self, phase: str) -> None:
        self.phase = phase

    def hold(self, tensors: Iterable[tuple[str, torch.Tensor, Layer | None]], op: str) -> None:
        """What is there before the step: (kind, tensor, layer it belongs to)."""
        for kind, tensor, layer in tensors:
            block = self._add(tensor, op, layer)
            if block is not None:
                self.log.blocks[block].kind = kind

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def _id(self, tensor: torch.Tensor) -> int | None:
        return self._ids.get(torch_private.storage_key(tensor.untyped_storage()))

    def _add(self, tensor: torch.Tensor, op: str, layer: Layer | None) -> int | None:
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key in self._ids:
            return None
        number = len(self.log.blocks)
        self._ids[key] = number
        fixed, sample = self.log.split(self._size(tensor))
        is_wide = (
            self.widest is not None
            and tensor.dim() > 1
            and tensor.shape[-1] == self.widest
            and sample > 0
        )
        kind = "logits" if is_wide else ""
        self.log.blocks.append(Block(int(fixed), int(sample), kind, op, self.phase, layer))
        self.log.events.append(Event(number, True, self.phase, layer))
        weakref.finalize(storage, self._free, key, number).atexit = False
        return number

    def _size(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's storage. A fake one ends with the last element that is seen: where
        more is there of each sample, as of a mask's gradient that is made in rows of 16, the last
        is as large as the others."""
        size, batch = tensor.untyped_storage().nbytes(), self.log.batch
        if size % batch and tensor.dim() and tensor.shape[0] == batch:
            sample = tensor.stride(0) * tensor.element_size()
            if 0 < batch * sample - size < sample:
                return batch * sample
        return size

    def _free(self, key: int, number: int) -> None:
        if self._closed:
            return
        if self._ids.get(key) == number:
            del self._ids[key]
        self.log.events.append(Event(number, False, self.phase, self.layer()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._left = None
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it desugars to the local tensors first
        if self._suspended:
            return func(*args, **kwargs)
        if func in self.decompositions:  # its kernel is made of operators that allocate
            with self:
                return self.decompositions[func](*args, **kwargs)
        # item(), bool(): a fake tensor has no value
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        into: list[int | None] | None = None
        if (
            func is torch.ops.aten.add.Tensor
            and self.phase.startswith("backward")
            and not torch.is_grad_enabled()
        ):
            # Autograd adds a second gradient in place where it holds the only reference to a tensor
            # that is no view; under a dispatch mode never. Remembered, and taken back in settle().
            into = (
                [self._id(args[0])]
                if isinstance(args[0], torch.Tensor) and not torch_private.is_view(args[0])
                else []
            )
        out = func(*args, **kwargs)
        name = torch_private.schema(func).name
        if name == "prim::device":
            return out
        before = len(self.log.blocks)
        outputs = [tensor for tensor in tree_iter(out) if isinstance(tensor, torch.Tensor)]
        if self.phase == "optimizer":
            self._last = self._layer_of(args[0]) if args else None
        layer = self.layer()
        for index, tensor in enumerate(outputs):
            is_list = (
                layer is None
                and self.phase == "optimizer"
                and args
                and isinstance(args[0], list | tuple)
            )
            of_list = self._layer_of(args[0][index]) if is_list and index < len(args[0]) else None
            self._add(tensor, name, layer if layer is not None else of_list)
        if into and len(self.log.blocks) == before + 1:
            self._accumulated.append((before, into))
        self._count(func, args, kwargs, out, outputs, layer)
        if self.kernel_workspace is not None:
            self._transient(self.kernel_workspace(name, args, kwargs, out), name, layer)
        return out

    def _answer(self, tensor: torch.Tensor) -> Any:
        """What code that looks at a value is told: whether a mask masks nothing; counts and losses
        do not matter."""
        if tensor.dtype is torch.bool:
            return not self.padded
        return 1.0 if tensor.is_floating_point() else 1

    def _layer_of(self, tensor: Any) -> Layer | None:
        """The layer that a tensor, which an update takes first, belongs to."""
        number = self._id(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if number is None else self.log.blocks[number].layer

    def _transient(self, sizes: Iterable[int], name: str, layer: Layer | None) -> None:
        first = len(self.log.blocks)
        for size in sizes:
            fixed, sample = self.log.split(size)
            self.log.blocks.append(
                Block(int(fixed), int(sample), "workspace", name, self.phase, layer)
            )
        for birth in (True, False):
            self.log.events += [
                Event(at, birth, self.phase, layer) for at in range(first, len(self.log.blocks))
            ]

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        outputs: list[torch.Tensor],
        layer: Layer | None,
    ) -> None:
        if not self.phase.startswith(("forward", "backward")):
            return
        work = self.log.work.setdefault((self.phase.partition(":")[0], layer), Work())
        returned = torch_private.schema(func).returns
        if not outputs or (
            returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        ):
            return  # a view moves nothing
        work.kernels += 1
        is_attention = "scaled_dot_product" in torch_private.schema(func).name
        formula = flop_registry.get(torch_private.packet(func))
        flops: float | None = None
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
        elif is_attention:  # the CPU's kernel, which the registry leaves out
            sizes = [tensor.shape for tensor in args if isinstance(tensor, torch.Tensor)]
            backward = "backward" in torch_private.schema(func).name
            flops = (
                sdpa_backward_flop_count(*sizes[:4]) if backward else sdpa_flop_count(*sizes[:3])
            )
        if flops is not None:
            work.products += 1
            kind = work.attention_flops if is_attention else work.flops
            known = kind.setdefault(str(outputs[0].dtype).removeprefix("torch."), [0.0, 0.0])
            _add(known, self.log.split(float(flops)))
            return
        for tensor in [
            *(one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)),
            *outputs,
        ]:
            _add(work.bytes, self.log.split(float(tensor.numel() * tensor.element_size())))

    # ---- after the step

    def settle(self) -> Log:
        """The log as it would be without a dispatch mode: gradients that autograd adds in place are
        added in place."""
        log, self._closed = self.log, True
        position = {event.block: at for at, event in enumerate(log.events) if event.birth}
        renamed: dict[int, int] = {}
        dropped: set[int] = set()
        for result, candidates in self._accumulated:
            at = position[result] + 1
            while at < len(log.events) and not log.events[at].birth:
                freed, block = log.events[at].block, log.blocks[log.events[at].block]
                same = (block.fixed_bytes, block.sample_bytes) == (
                    log.blocks[result].fixed_bytes,
                    log.blocks[result].sample_bytes,
                )
                if freed in candidates and same:
                    dropped |= {position[result], at}
                    renamed[result] = freed
                    break
                at += 1
        for at, event in enumerate(log.events):
            while event.block in renamed:
                event.block = renamed[event.block]
            assert event.block < len(log.blocks), at
        log.events = [event for at, event in enumerate(log.events) if at not in dropped]
        return log
