"""Frozen weights of decoder layers in host memory, which is pinned where it can be. They come to
the device before their layer computes, on a stream of their own, while other layers compute.

All of a layer's frozen weights lie side by side on the host, and come in one copy to one of two
slots on the device, where its parameters are views for good. Adapters, what else is trained, and
the scales of 4-bit weights stay on the device. Nothing is copied back, so that the ranks of a
machine share the weights on the host. The first of them fills this memory, which has no name and
goes with the last process that maps it, however that ends.

Forward: when a streamed layer begins, the slot of the one before it is free, and the copy of the
one behind it begins. Backward goes the other way: what backward copies serves the layer while it is
computed again and while its gradients are, so that a micro-batch copies a layer twice. The last two
layers of forward, and the first two, are still there when the direction turns.

A copy waits for all kernels that were launched before it, which may read its slot, and a layer
waits for its copy; the host waits for neither. A layer that is checkpointed keeps no weight from
forward to backward but as a view of its slot, which has the same weights again by then: backward
fetches them before its first kernel, also where that kernel reads a weight that autograd has not
saved (bitsandbytes' MatMul4Bit)."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from launch.base.text import size
from launch.schema.levers import SLOTS, Levers, aligned_bytes
from training.compat import torch_private
from training.levers.offloading import CopyStream, Event
from training.model import build

# the original beside a copy that is trained (lora.modules_to_save)
_UNUSED = ".original_module."


class _Layer:
    """The frozen weights of a layer, and their places in its part of the host's buffer and in its
    slot."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.weights = [
            parameter
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and _UNUSED not in name
        ]
        self._sizes = [weight.nbytes for weight in self.weights]
        self._kinds = [(weight.dtype, weight.shape) for weight in self.weights]
        self.bytes = sum(map(aligned_bytes, self._sizes))

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each weight as a part of a buffer of bytes."""
        views, begin = [], 0
        for size_bytes, (dtype, sides) in zip(self._sizes, self._kinds, strict=True):
            views.append(buffer[begin : begin + size_bytes].view(dtype).view(sides))
            begin += aligned_bytes(size_bytes)
        return views

    def point_to(self, buffer: torch.Tensor) -> None:
        for weight, view in zip(self.weights, self.views(buffer), strict=True):
            weight.data = view


class Streaming:
    """The streamed layers of a network: their buffer on the host, the slots, and the copies.

    Raises RuntimeError if the host does not lock the memory, torch.OutOfMemoryError for a slot."""

    def __init__(
        self,
        network: torch.nn.Module,
        levers: Levers,
        device: torch.device,
        pin_memory: bool = True,
        local_rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Move the frozen weights of the layers to the host's buffer, wherever they are, one layer
        after another, and all else of these layers to the device. So many `ranks` of this machine
        share the buffer, which `local_rank` 0 fills; the others drop their weights."""
        self._device = device
        self._copies = CopyStream(device)
        self._pins = pin_memory and self._copies.stream is not None
        self._layers = [_Layer(module) for module in build.streamed_layers(network, levers)]
        self.bytes = sum(layer.bytes for layer in self._layers)  # on the host
        self.slots = self._empty_slots(max(layer.bytes for layer in self._layers))
        self._on_host = self._moved(local_rank, ranks).split([each.bytes for each in self._layers])
        self._places = [-1] * SLOTS  # the layer in each slot, or on its way there
        self._copied: list[Event] = [None] * SLOTS  # of a slot's last copy
        self._entered = -1  # the layer that has begun last
        self._hooks: list[Any] = []

    def _empty_slots(self, size_bytes: int) -> list[torch.Tensor]:
        try:
            return [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(SLOTS)
            ]
        except torch.OutOfMemoryError as error:
            error.add_note(f"training.streamed_layers: {SLOTS} slots of {size(size_bytes)} each")
            raise

    def _moved(self, local_rank: int, ranks: int) -> torch.Tensor:
        """The buffer with the weights of all layers, which are views of their slots from now on."""
        is_first, is_shared, file, begin = local_rank == 0, ranks > 1, "", 0
        buffer = torch.empty(0 if is_shared else self.bytes, dtype=torch.uint8)
        if is_shared and is_first:
            file = f"/proc/{os.getpid()}/fd/{os.memfd_create('streamed layers')}"
            buffer = _mapped(file, self.bytes)
        for place, layer in enumerate(self._layers):
            views = layer.views(buffer[begin : begin + layer.bytes]) if is_first else ()
            for view, weight in zip(views, layer.weights, strict=is_first):
                view.copy_(weight.data)
            begin += layer.bytes
            layer.point_to(self.slots[place % SLOTS])
            if self._copies.stream is not None:
                layer.module.to(self._device)
        if is_shared:
            store = torch_private.default_store()
            key = f"lowmem/streamed layers/{torch.distributed.get_rank() - local_rank}"
            if is_first:
                store.set(key, file)
            else:  # waits for the first rank of this machine
                buffer = _mapped(store.get(key).decode(), self.bytes)
        if self._pins:
            _pin(buffer)
        return buffer

    @property
    def bytes_not_held(self) -> int:
        """Bytes of parameters that are views of the slots, beyond those of the slots."""
        views = (weight.nbytes for layer in self._layers for weight in layer.weights)
        return sum(views) - sum(slot.nbytes for slot in self.slots)

    def attach(self) -> None:
        """Let the layers fetch their weights, forward and backward."""
        for place, layer in enumerate(self._layers):
            self._hooks += [
                layer.module.register_forward_pre_hook(partial(self._before_forward, place)),
                layer.module.register_forward_hook(partial(self._behind_forward, place)),
            ]

    def give_back(self) -> None:
        """Give the layers their weights back, on the host, for good: they are merged or saved."""
        for hook in self._hooks:
            hook.remove()
        for layer, buffer in zip(self._layers, self._on_host, strict=True):
            layer.point_to(buffer)
        self.slots.clear()

    def _before_forward(self, place: int, module: torch.nn.Module, args: Any) -> None:
        is_backward = torch_private.current_node_number() is not None  # it is computed again
        self._begin(place, -1 if is_backward else 1)

    def _behind_forward(
        self, place: int, module: torch.nn.Module, args: Any, output: torch.Tensor | Sequence[Any]
    ) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._begin(place, -1))

    def _begin(self, place: int, direction: int) -> None:
        """Let the kernels that are launched from now on have this layer's weights, and begin to
        copy those of the next one in this direction."""
        if place == self._entered:
            return
        self._entered = place
        for wanted in (place, place + direction):
            if 0 <= wanted < len(self._layers) and self._places[wanted % SLOTS] != wanted:
                self._places[wanted % SLOTS] = wanted
                self.copy(wanted)
        self._copies.wait(self._copied[place % SLOTS])

    def copy(self, place: int) -> None:
        """Begin to copy a layer to its slot, behind the kernels that were launched so far."""
        target = self.slots[place % SLOTS][: self._layers[place].bytes]
        self._copied[place % SLOTS] = self._copies.copied(target, self._on_host[place])


def apply(trainer: Any, levers: Levers) -> None:
    """Let the layers fetch their weights. They are placed before a trainer moves the model."""
    if levers.streamed_layers:
        trainer.streaming.attach()


def _mapped(file: str, size_bytes: int) -> torch.Tensor:
    return torch.from_file(file, shared=True, size=size_bytes, dtype=torch.uint8)


def _pin(buffer: torch.Tensor) -> None:
    """Lock a buffer in its exact size: PyTorch's own pinned memory is rounded to a power of two."""
    try:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
    except RuntimeError as error:
        raise RuntimeError(
            f"the host does not lock {size(buffer.nbytes)} for a rank"
            f" ({str(error).splitlines()[0]}), which training.streamed_layers pins"
        ) from error
