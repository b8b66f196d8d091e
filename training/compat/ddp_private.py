"""The private name of torch (2.11 to 2.13) by which DDP leaves parameters alone."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def leave_out_frozen(network: torch.nn.Module) -> None:
    """Let DDP send no frozen weight of rank 0 to the others. Sent, weights that are views of a
    mapped file become memory of each rank's own, as does the copy by which they are sent."""
    frozen = [name for name, part in network.named_parameters() if not part.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, frozen)
