"""Activations and weights that a card keeps in pinned host memory, in a trace."""

import torch

from launch.schema.levers import Levers
from training.levers.offloading import LayerInput, Offloading
from training.levers.streaming import Streaming
from training.trace.recorder import Recorder


class RecordedOffloading(Offloading):
    """The copies of a traced card: host memory is no block of the device, and a copy is no kernel
    among those that compute."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"))
        self._recorder = recorder

    def sent(self, tensor: torch.Tensor) -> LayerInput:
        self._recorder.offload(tensor)
        with self._recorder.suspended():
            return super().sent(tensor)

    def fetch(self, layer_input: LayerInput) -> None:
        if layer_input.on_device is None:
            layer_input.on_device = self.empty_on_device(layer_input)


class RecordedStreaming(Streaming):
    """The streamed layers of a traced card, whose weights are the slots'; they are copied by no
    kernel among those that compute."""

    def __init__(self, recorder: Recorder, network: torch.nn.Module, levers: Levers) -> None:
        super().__init__(network, levers, torch.device("cpu"))
        self._recorder = recorder

    def copy(self, place: int) -> None:
        with self._recorder.suspended():
            super().copy(place)
