"""Inputs of checkpointed layers in host memory, which is pinned where it can be. They are copied on
a stream of their own, while other layers compute.

Forward: a layer's input goes to the host while the layer computes. The next checkpointed layer
waits for that copy and gives the input's memory back, so that one layer's input is on its way at
any time. Backward: while a layer is computed again, the input of the layer before it comes back.
The input of the last layer is still on the device.

All device memory belongs to the stream that computes: a copy waits for the work that was in it
before, and that stream waits for the copy before it uses the memory or gives it back. So the
allocator needs to know of no other stream (Tensor.record_stream would hold a block for as long as
the host does not look). Host memory is taken once and used again in every step."""

import sys
import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import modeling_utils

from launch.schema.levers import Levers
from training.compat import levers_private

# the name in transformers of the hooks within which it checkpoints a layer with `offload`
SAVE_ON_CPU = (modeling_utils, "save_on_cpu")

Event = Any  # CUDA event; None: copies end before they return, on a CPU


class CopyStream:
    """Copies between host and device beside the kernels that compute. They follow one another."""

    def __init__(self, device: torch.device) -> None:
        # None on a CPU, where a copy ends before it returns
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin a copy behind the kernels that were launched so far."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copied: Event) -> None:
        """Let kernels that are launched from now on run behind a copy; the host does not wait."""
        if copied is not None:
            assert self.stream is not None
            torch.cuda.current_stream(self.stream.device).wait_event(copied)


class LayerInput:
    """A tensor that a layer was given: on the host, and on the device while it is copied."""

    def __init__(self, owner: "Offloading", buffer: torch.Tensor, on_device: torch.Tensor) -> None:
        self._owner, self._buffer, self.device = owner, buffer, on_device.device
        self.host = buffer[: on_device.nbytes].view(on_device.dtype).view(on_device.shape)
        self.on_device: torch.Tensor | None = on_device
        self.copied: Event = None  # the last copy, in either direction

    def __del__(self) -> None:
        """Its part of the graph is used up, or given up while the input was on its way."""
        if not sys.is_finalizing():
            if self.on_device is not None:
                self._owner.copies.wait(self.copied)
            self._owner.take_back(self._buffer)


class _InputHooks(saved_tensors_hooks):
    """Hooks for the inputs of one layer: within them what autograd saves is kept on the host."""

    def __init__(self, offloading: "Offloading") -> None:
        self._offloading = offloading
        self._inputs: list[weakref.ref[LayerInput]] = []
        self._before: weakref.ref[_InputHooks] | None = None  # hooks of the layer that ran before
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | LayerInput:
        if not _is_activation(tensor):
            return tensor
        if not self._inputs:
            self._before = self._offloading.enter(self)
        layer_input = self._offloading.sent(tensor.detach().contiguous())
        self._inputs.append(weakref.ref(layer_input))
        return layer_input

    def _unpack(self, packed: torch.Tensor | LayerInput) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._offloading.leave()
        self._offloading.fetch(packed)
        tensor = self._offloading.received(packed)
        before = self._before and self._before()
        for layer_input in before.inputs() if before is not None else ():
            self._offloading.fetch(layer_input)
        return tensor

    def inputs(self) -> list[LayerInput]:
        """The inputs that backward has not used up."""
        return [
            layer_input for reference in self._inputs if (layer_input := reference()) is not None
        ]


class Offloading:
    """The host memory and the copies of a model's layers."""

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        self.copies = CopyStream(device)
        self._pin_memory = pin_memory and self.copies.stream is not None
        self._free: list[torch.Tensor] = []  # host memory that no input is in
        self._sending: list[LayerInput] = []  # inputs of the layer that ran last in forward
        # hooks of the layer that ran last in forward
        self._last: weakref.ref[_InputHooks] | None = None

    def hooks(self, **unused: Any) -> _InputHooks:
        """The hooks of the next layer."""
        return _InputHooks(self)

    def enter(self, layer: _InputHooks) -> weakref.ref[_InputHooks] | None:
        """Give the memory of the input of the layer before back. Returns that layer."""
        for layer_input in self._sending:
            self.copies.wait(layer_input.copied)
            layer_input.on_device = None
        self._sending = []
        before, self._last = self._last, weakref.ref(layer)
        return before

    def leave(self) -> None:
        """Begin the backward pass: the next layer that runs forward has none before it."""
        self._sending, self._last = [], None

    def sent(self, tensor: torch.Tensor) -> LayerInput:
        """An input whose copy to the host has begun."""
        layer_input = LayerInput(self, self.buffer(tensor.nbytes), tensor)
        layer_input.copied = self.copies.copied(layer_input.host, tensor)
        self._sending.append(layer_input)
        return layer_input

    def fetch(self, layer_input: LayerInput) -> None:
        """Begin to copy an input to the device, unless it is there."""
        if layer_input.on_device is None:
            layer_input.on_device = self.empty_on_device(layer_input)
            layer_input.copied = self.copies.copied(layer_input.on_device, layer_input.host)

    def empty_on_device(self, layer_input: LayerInput) -> torch.Tensor:
        """Memory of the stream that computes."""
        return torch.empty_like(layer_input.host, device=layer_input.device, pin_memory=False)

    def received(self, layer_input: LayerInput) -> torch.Tensor:
        """The input on the device, for the kernels that are launched from now on."""
        self.copies.wait(layer_input.copied)
        tensor, layer_input.on_device = layer_input.on_device, None
        assert tensor is not None
        return tensor

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory of at least so many bytes: the smallest that is free. If all that is free is
        smaller, as at the first long rows, it is given back to the system first."""
        fitting = [buffer for buffer in self._free if len(buffer) >= size_bytes]
        if fitting:
            smallest = min(fitting, key=len)
            self._free[:] = [buffer for buffer in self._free if buffer is not smallest]
            return smallest
        if self._free and self.copies.stream is not None:
            self._free.clear()
            _empty_host_cache()
        power_of_two = 1 << (size_bytes - 1).bit_length()  # PyTorch pins no other sizes
        return torch.empty(power_of_two, dtype=torch.uint8, pin_memory=self._pin_memory)

    def take_back(self, buffer: torch.Tensor) -> None:
        """Let another input have this host memory. Its copy follows those of the last one."""
        self._free.append(buffer)


def apply(trainer: Any, levers: Levers) -> None:
    """Let transformers checkpoint layers within these hooks. Its own, save_on_cpu of torch, copy on
    the stream that computes."""
    if levers.activation_offloading:
        setattr(*SAVE_ON_CPU, trainer.host_copies().hooks)


def _is_activation(tensor: torch.Tensor) -> bool:
    """False for weights and their views, for masks and numbers of positions, and for nothing."""
    is_weight = isinstance(tensor, torch.nn.Parameter) or levers_private.is_view_of_weight(tensor)
    return tensor.is_floating_point() and tensor.numel() > 0 and not is_weight


def _empty_host_cache() -> None:
    """Give pinned memory that nothing uses back to the system, if this torch can (2.13 can)."""
    if empty := getattr(torch.accelerator, "empty_host_cache", None):
        empty()
