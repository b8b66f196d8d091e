"""Activations that a card keeps in pinned host memory, in a trace."""

from __future__ import annotations

import torch

from training.levers.offloading import LayerInput, Offloading
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
