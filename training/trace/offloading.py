"""Activations that a card keeps in pinned host memory, in a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from training.trace.recorder import Recorder


class RecordedOnHost(saved_tensors_hooks):
    """torch.autograd.graph.save_on_cpu of a traced card: a saved tensor becomes bytes of the host,
    and a new tensor of the device when backward asks for it."""

    recorder: Recorder

    def __init__(self, **kwargs: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with self.recorder.suspended():
                packed = torch.empty_like(tensor)
            self.recorder.offload(tensor)
            return packed

        super().__init__(pack, torch.Tensor.clone)


def recorded_on_host(recorder: Recorder) -> type[RecordedOnHost]:
    """The class that tells this recorder."""
    return type("RecordedOnHost", (RecordedOnHost,), {"recorder": recorder})
