"""Record what a step allocates, frees and computes, with torch's dispatcher, on fake tensors.

Nothing here has weights or a device. A storage is born when an operator returns it; a finalizer
reports its death. FLOPs are counted by the formulas of torch.utils.flop_counter. Every size is
split into a part that grows with the batch, a part that grows with its targets and a fixed part:
the numbers of traced samples and targets are primes, so a size that one of them divides is a number
of bytes per sample, or per target.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, zip_longest
from typing import Any, cast

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from launch.schema.recorded_step import (
    BATCH,
    LOSS,
    Block,
    Call,
    Event,
    Form,
    Layer,
    Log,
    Operator,
    Parts,
    Sum,
)
from training.compat import torch_private
from training.trace.cuda_semantics import Target
from training.trace.cuda_workspace import summed, workspace

aten = torch.ops.aten
_DEVICE, _UNSAFE_VIEW = torch.ops.prim.device.default, aten._unsafe_view.default
# its kernel of CUDA makes the mask before the result: native_dropout_cuda in Dropout.cu
_MASK_FIRST = "aten::native_dropout"
# operators that launch no kernel
_NO_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
# sequence number of autograd nodes that accumulate into a leaf
_FINAL_NODE = (1 << 64) - 1


class Recorder(torch_private.TorchDispatchMode):
    """Fills a Log while it is active. `phase` names the part of the step; hooks name the layer."""

    supports_higher_order_operators = True

    def __init__(
        self,
        batch: int = BATCH,
        padded: bool = True,
        vocabulary: int | None = None,
        target: Target | None = None,
    ) -> None:
        """`padded`: a row of the batch is shorter than the longest, so that masks are kept.
        `vocabulary`: tensors with this last size are logits or their loss. `target`: the card whose
        kernels have buffers; None: the CPU."""
        super().__init__()
        self.log = Log(batch=batch)
        self.phase = "start"
        self.padded, self.vocabulary, self.target = padded, vocabulary, target
        self.decompositions: Mapping[Any, Any] = {}  # operator -> its kernel, made of operators
        self._ids: dict[int, int] = {}  # storage -> block
        self._deaths: dict[int, weakref.ref[Any]] = {}  # block -> its storage, while it lives
        self._layers: list[Layer] = []  # layers that forward is in
        # sequence numbers of the autograd nodes that a layer made
        self._ranges: list[tuple[int, int, Layer]] = []
        self._backward = 0  # number of the first node that backward itself makes
        # layer of the autograd node, or of the update, that ran last
        self._last: Layer | None = None
        # the layer that has just returned: no operator has run since
        self._returned: Layer | None = None
        self._accumulated: list[tuple[int, int | None]] = []  # (sum, gradient that it is added to)
        self._suspended = 0
        self._closed = False
        self._operators: dict[Operator, int] = {}  # -> number

    # ---- layers

    def watch(self, stacks: Iterable[torch.nn.ModuleList]) -> None:
        """Tell the layers of these stacks apart, forward and backward."""
        for stack, layers in enumerate(stacks):
            for index, layer in enumerate(layers):
                layer.register_forward_pre_hook(partial(self._enter, (stack, index)))
                layer.register_forward_hook(self._leaving, always_call=True)

    def watch_parts(self, head: Any) -> None:
        """Tell the parts of the logits of a LossHead apart, forward and backward. A part is known
        by its place in what it is a part of."""
        part_sum, places = head.part_sum, dict[int, int]()

        def watched(smoothing: float, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            number = places.setdefault(int(hidden.storage_offset()), len(places))
            self._enter((LOSS, number), head, hidden)
            try:
                return part_sum(smoothing, hidden, labels)
            finally:
                self._leaving(head, hidden, None)

        head.part_sum = watched

    def _enter(self, layer: Layer, module: torch.nn.Module, args: Any) -> None:
        self._layers.append(layer)
        self._returned = None
        self._ranges.append((torch_private.next_node_number(), -1, layer))

    def _leaving(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        layer = self._returned = self._layers.pop()
        for index in reversed(range(len(self._ranges))):
            start, end, owner = self._ranges[index]
            if owner == layer and end < 0:
                self._ranges[index] = (start, torch_private.next_node_number(), layer)
                return

    def layer(self) -> Layer | None:
        """The layer that runs: its forward (or its recomputation), a node that its forward made, or
        the optimizer's update of one of its parameters."""
        if self.phase == "optimizer":
            return self._last
        if self._layers:
            return self._layers[-1]
        # the output of the layer that ran last is freed
        if self._returned is not None and not self.phase.startswith("backward"):
            return self._returned
        number = torch_private.current_node_number()
        if number != _FINAL_NODE:
            owners = (
                layer
                for start, end, layer in self._ranges
                if number is not None and start <= number < end
            )
            owner = next(owners, None)
            # a layer that computes a part of itself again in a node of its own goes back through it
            if owner is not None or number is None or number < self._backward:
                self._last = owner
        return self._last

    # ---- storages

    def mark(self, phase: str) -> None:
        self.phase = phase
        if phase.startswith("backward"):
            self._backward = torch_private.next_node_number()

    def point(self, op: str) -> None:
        """Record a moment, before which a value is read: a block without bytes."""
        self._called(Operator("aten::_local_scalar_dense", "wait"), None)
        self.log.events.append(Event(len(self.log.blocks), True, self.phase, None))
        self.log.blocks.append(Block(0, 0, "", op, self.phase, None))

    def hold(self, tensors: Iterable[tuple[str, torch.Tensor, Layer | None]], op: str) -> None:
        """Add the tensors that exist before the step: (kind, tensor, layer it belongs to)."""
        for kind, tensor, layer in tensors:
            self._add(tensor, op, layer, kind)

    def offload(self, tensor: torch.Tensor) -> None:
        """Add a tensor that forward copies to the host."""
        self._called(
            Operator("offload", "offload", bytes=self.log.split(tensor.nbytes)), self.layer()
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def _id(self, tensor: torch.Tensor) -> int | None:
        return self._ids.get(torch_private.storage_key(tensor.untyped_storage()))

    def _add(self, tensor: torch.Tensor, op: str, layer: Layer | None, kind: str = "") -> None:
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key in self._ids:
            return
        number = len(self.log.blocks)
        self._ids[key] = number
        block = self._block(self._size(tensor), kind, op, layer)
        is_wide = tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        if is_wide and not kind and (not block.is_fixed or block.all_target_bytes):
            block.kind = "logits"
        self.log.blocks.append(block)
        self.log.events.append(Event(number, True, self.phase, layer))
        self._deaths[number] = weakref.ref(storage, partial(self._free, key, number))

    def _block(
        self, size: int, kind: str, op: str, layer: Layer | None, document_bytes: int = 0
    ) -> Block:
        fixed, sample, target, all_targets = map(int, self.log.split(size))
        return Block(
            *(fixed, sample, kind, op, self.phase, layer),
            target_bytes=target,
            document_bytes=document_bytes,
            all_target_bytes=all_targets,
        )

    def _size(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's storage. A fake storage ends with the last visible element. If the
        samples lie further apart, as in a mask's gradient that is made in rows of 16, the last
        sample is counted like the others."""
        size, batch = tensor.untyped_storage().nbytes(), self.log.batch
        if size % batch and tensor.dim() and tensor.shape[0] == batch:
            sample = tensor.stride(0) * tensor.element_size()
            return batch * sample if 0 < batch * sample - size < sample else size
        return size

    def _free(self, key: int, number: int, storage: Any) -> None:
        if self._closed:
            return
        del self._deaths[number]
        if self._ids.get(key) == number:
            del self._ids[key]
        self.log.events.append(Event(number, False, self.phase, self.layer()))

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._returned = None
        if func is _DEVICE and type(args[0]) is torch_private.FakeTensor:  # two of three calls
            return args[0].fake_device
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it desugars to the local tensors first
        if self._suspended:
            return func(*args, **kwargs)
        if func in self.decompositions:  # its kernel is made of operators that allocate
            with self:
                return self.decompositions[func](*args, **kwargs)
        # item(), bool(): a fake tensor has no value
        if func is aten._local_scalar_dense.default:
            if self.phase != "optimizer":  # it counts its steps on the host
                self._called(Operator("aten::_local_scalar_dense", "wait"), self.layer())
            return self._value_of(args[0])
        # Autograd adds a second gradient in place where it holds the only reference to a tensor
        # that is no view; under a dispatch mode it never does. settle() takes the copy back.
        is_sum = (
            func is aten.add.Tensor
            and self.phase.startswith("backward")
            and not torch.is_grad_enabled()
            and isinstance(args[0], torch.Tensor)
            and not torch_private.is_view(args[0])
        )
        gradient = self._id(args[0]) if is_sum else None
        # torch finds the shape of an _unsafe_view anew each time, that of a view in its cache
        out = (aten.view.default if func is _UNSAFE_VIEW else func)(*args, **kwargs)
        if func is _DEVICE:
            return out
        operator = _facts_of(func)
        name = operator.name
        before = len(self.log.blocks)
        outputs = [out] if isinstance(out, torch.Tensor) else _tensors(out)
        if name == _MASK_FIRST:
            outputs.reverse()
        if self.phase == "optimizer":
            self._last = self._layer_of(args[0]) if args else None
        layer = self.layer()
        # an operator of the optimizer on a list updates the parameters of several layers
        is_list = (
            self.phase == "optimizer"
            and args
            and layer is None
            and isinstance(args[0], list | tuple)
        )
        updated = args[0] if is_list else ()
        for tensor, parameter in zip_longest(outputs, updated[: len(outputs)]):
            self._add(tensor, name, layer if layer is not None else self._layer_of(parameter))
        if is_sum and len(self.log.blocks) == before + 1:
            self._accumulated.append((before, gradient))
        self._count(operator, args, kwargs, out, outputs, layer)
        if self.target is not None:
            self._add_buffers(self.target, (name, args, kwargs, out), layer)
        return out

    def _add_buffers(
        self, target: Target, call: tuple[str, Any, Any, Any], layer: Layer | None
    ) -> None:
        """Add what the kernel of a call (name, args, kwargs, out) allocates inside."""
        name, args, *_ = call
        if sizes := workspace(target, *call):
            documents = target.documents and target.documents + 1
            more = workspace(replace(target, documents=documents), *call)
            self._transient(sizes, more, name, layer)
        if (size := summed(target, name, args)) is not None:
            rows, *of_card = size
            fixed, sample, of_target, _ = map(int, self.log.split(rows))
            buffer = Sum(fixed, sample, of_target, *of_card)
            self._pass([Block(0, 0, "workspace", name, self.phase, layer, sum=buffer)], layer)

    def _value_of(self, tensor: torch.Tensor) -> Any:
        """The value that code sees in a tensor: of a mask, that it masks nothing unless the batch
        is padded; of counts and losses, 1."""
        if tensor.dtype is torch.bool:
            return not self.padded
        return 1.0 if tensor.is_floating_point() else 1

    def _layer_of(self, tensor: Any) -> Layer | None:
        """The layer that the first argument of an update belongs to."""
        number = self._id(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if number is None else self.log.blocks[number].layer

    def _transient(
        self, sizes: Sequence[int], more: Sequence[int], name: str, layer: Layer | None
    ) -> None:
        """`more`: of a document more in each row."""
        blocks = [
            self._block(size, "workspace", name, layer, (with_one_more - size) // self.log.batch)
            for size, with_one_more in zip(sizes, more, strict=True)
        ]
        self._pass(blocks, layer)

    def _pass(self, blocks: Iterable[Block], layer: Layer | None) -> None:
        """Add blocks that are freed before the next event."""
        first = len(self.log.blocks)
        self.log.blocks += blocks
        self.log.events += [
            Event(block, birth, self.phase, layer)
            for birth in (True, False)
            for block in range(first, len(self.log.blocks))
        ]

    def kernel(self, name: str, tensors: Sequence[torch.Tensor], workspace: Sequence[int]) -> None:
        """Add a kernel that no operator launches, by the tensors that it reads or writes, each as
        often as it does, and the sizes of what it has beside them."""
        self._returned = None
        layer, dtype = self.layer(), str(tensors[0].dtype).removeprefix("torch.")
        self._called(Operator(name, "other", dtype, (0, 0, 0, 0), self._moved(tensors), 1), layer)
        if workspace:
            self._transient(workspace, workspace, name, layer)

    def module(self, module: torch.nn.Module, args: Any) -> None:
        """Record that a module is called."""
        if not self._suspended:
            self._called(Operator("module", "module"), self.layer())

    def _called(self, operator: Operator, layer: Layer | None) -> None:
        number = self._operators.setdefault(operator, len(self._operators))
        if number == len(self.log.operators):
            self.log.operators.append(operator)
        self.log.calls.append(Call(number, self.phase, layer))

    def _count(
        self,
        operator: "_OperatorFacts",
        args: Any,
        kwargs: Any,
        out: Any,
        outputs: list[torch.Tensor],
        layer: Layer | None,
    ) -> None:
        if self.phase.startswith("start"):
            return
        name = operator.name
        written = (operator.argument(each, args, kwargs) for each in operator.written)
        lists = [outputs] if outputs else [*written]
        outputs = _tensors(lists)
        if operator.is_view or not outputs:  # a view moves nothing
            self._called(Operator(name, "view"), layer)
            return
        dtype = str(outputs[0].dtype).removeprefix("torch.")
        if self.phase == "optimizer":
            if args and isinstance(args[0], list | tuple):
                return self._count_lists(name, dtype, [*args, *kwargs.values(), *lists])
            layer = self._layer_of(next(iter(_tensors(args)), None))
        moved = self._moved([*_tensors((args, kwargs)), *outputs])
        flops = None
        if operator.is_of_documents:
            flops = _flops_of_documents(args, operator.is_backward)
        elif operator.is_attention:
            sides = [tensor.shape for tensor in args if isinstance(tensor, torch.Tensor)]
            flops = _attention_flops(sides[: 4 if operator.is_backward else 3])
        elif operator.flops is not None:
            flops = operator.flops(*args, **kwargs, out_val=out)
            dtype += _alignment(args, outputs)
        launches = 0 if name in _NO_KERNEL else 1
        if flops is None:
            form = _form([*_tensors((args, kwargs)), *outputs])
            self._called(Operator(name, "other", dtype, (0, 0, 0, 0), moved, launches, form), layer)
            return
        kind = "attention" if operator.is_attention else "product"
        if operator.is_attention and operator.is_causal(args, kwargs):
            flops //= 2  # the kernel skips what is masked
        counted = self.log.split(float(flops))
        self._called(Operator(name, kind, dtype, counted, moved, launches), layer)

    def _count_lists(self, name: str, dtype: str, arguments: Sequence[Any]) -> None:
        """Count a kernel on lists of tensors, which are those of many layers: its launch, and the
        tensors of each layer apart."""
        self._called(Operator(name, "other", dtype, launches=1), None)
        rows = zip_longest(*(each for each in arguments if isinstance(each, list | tuple)))
        for layer, group in groupby(rows, lambda row: self._layer_of(row[0])):
            of_layer = [*group]
            sizes = (0, 0, 0, 0), self._moved(_tensors(of_layer)), len(of_layer)
            self._called(Operator(name, "other", dtype, *sizes, form="list"), layer)

    def _moved(self, tensors: Iterable[torch.Tensor]) -> Parts:
        sizes = [self.log.split(each.nbytes) for each in tensors]
        return cast(Parts, tuple(map(sum, zip(*sizes, strict=True))))

    # ---- after the step

    def settle(self) -> Log:
        """The log as it would be without a dispatch mode: autograd adds gradients in place."""
        log, self._closed = self.log, True
        born = {event.block: index for index, event in enumerate(log.events) if event.birth}
        replaced: dict[int, int] = {}
        dropped: set[int] = set()
        for result, gradient in self._accumulated:
            total = log.blocks[result]
            for index in range(born[result] + 1, len(log.events)):
                event = log.events[index]
                if event.birth:
                    break
                block = log.blocks[event.block]
                if event.block == gradient and block.sizes == total.sizes:
                    dropped |= {born[result], index}
                    replaced[result] = event.block
                    break
        for event in log.events:
            while event.block in replaced:
                event.block = replaced[event.block]
        log.events = [event for index, event in enumerate(log.events) if index not in dropped]
        return log


@dataclass(frozen=True)
class _OperatorFacts:
    """Facts of an operator that are asked each time that it runs."""

    name: str
    is_view: bool  # its result is a part of an argument
    is_attention: bool
    is_of_documents: bool  # attention within each of them
    is_backward: bool
    flops: Any  # FLOPs of a product, of its arguments and out_val; None: it is no product
    places: Mapping[str, int]  # argument -> its place
    written: Sequence[str]  # arguments that it changes

    def is_causal(self, args: Any, kwargs: Any) -> bool:
        """True if attention looks at no position behind its own."""
        causal, window = (
            self.argument(name, args, kwargs) for name in ("is_causal", "window_size")
        )
        return bool(causal) or bool(window and window[1] == 0)

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)


@cache
def _facts_of(func: Any) -> _OperatorFacts:
    schema = torch_private.schema(func)
    alias = schema.returns[0].alias_info if schema.returns else None
    is_of_documents = "_varlen_attn" in schema.name
    is_attention = is_of_documents or "scaled_dot_product" in schema.name
    return _OperatorFacts(
        schema.name,
        func is _UNSAFE_VIEW or (alias is not None and not alias.is_write),
        is_attention,
        is_of_documents,
        "backward" in schema.name,
        None if is_attention else _FLOPS.get(func) or flop_registry.get(torch_private.packet(func)),
        {argument.name: place for place, argument in enumerate(schema.arguments)},
        [
            argument.name
            for argument in schema.arguments
            if argument.alias_info
            and argument.alias_info.is_write
            and argument.name != "grads"  # a fused optimizer writes them for a scaler alone
        ],
    )


def _form(tensors: Sequence[torch.Tensor]) -> Form:
    """The way in which tensors of a kernel differ, the slowest one; single elements do not."""
    wide = [tensor for tensor in tensors if tensor.numel() > 1]
    if len({tensor.shape for tensor in wide}) > 1:
        return "broadcast"
    if len({tensor.stride() for tensor in wide}) > 1 or not all(map(_is_dense, wide)):
        return "strided"
    return "cast" if len({tensor.dtype for tensor in wide}) > 1 else ""


def _is_dense(tensor: torch.Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def _alignment(args: Any, outputs: Sequence[torch.Tensor]) -> str:
    """ " by 4", " by 2" or " by 1" of a product in 16 bits whose rows this number of elements
    divides, "" of all others: 8 elements are the 16 bytes that the fastest kernels load at once."""
    if outputs[0].element_size() != 2:
        return ""
    strides = [
        stride
        for tensor in [*_tensors(args), *outputs]
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride > 1
    ]
    divisor = math.gcd(8, *strides)
    return f" by {divisor}" if divisor < 8 else ""


def _linear_flops(inputs: torch.Tensor, weight: torch.Tensor, *bias: Any, out_val: Any) -> int:
    return 2 * inputs.numel() * weight.size(0)


# FLOPs beside torch's formulas: within a kernel, as that of a 4-bit weight, it is made of no others
_FLOPS = {aten.linear.default: _linear_flops}


def _flops_of_documents(args: Any, is_backward: bool) -> int:
    """FLOPs of varlen_attn, all of whose documents are as long as the longest. The same as torch's
    formula, which adds the documents up one by one: half of the time of a trace."""
    if is_backward:
        _, query, key, value, _, _, starts, _, query_length, key_length, *_ = args
    else:
        query, key, value, starts, _, query_length, key_length, *_ = args
    lengths = query_length, key_length, key_length
    sizes = [
        (1, tensor.shape[1], length, tensor.shape[2])
        for tensor, length in zip((query, key, value), lengths, strict=True)
    ]
    document = _attention_flops([sizes[0], *sizes] if is_backward else sizes)
    return (starts.shape[0] - 1) * document


def _attention_flops(sizes: Sequence[Sequence[int]]) -> int:
    """FLOPs by the sizes (rows, heads, length, width) of query, key and value; of backward, with
    the gradient's before them. Each head of the query has its key and value: the formulas of torch
    2.11 and older refuse fewer of these."""
    heads = max(size[1] for size in sizes)
    of_heads = [(rows, heads, length, width) for rows, _, length, width in sizes]
    is_backward = len(sizes) == 4
    return sdpa_backward_flop_count(*of_heads) if is_backward else sdpa_flop_count(*of_heads)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    is_nested = isinstance(inner, list | tuple) or inner is not values
    return [tensor for value in inner for tensor in _tensors(value)] if is_nested else []


# Set behind the class: torch would wrap it so that torch.compile leaves it alone, which takes time
# in each call, and a trace compiles nothing.
Recorder.__torch_dispatch__ = Recorder.dispatch
