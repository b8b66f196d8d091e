"""The private name of torch (2.11 to 2.13) for the tensor that another one is a view of."""

from __future__ import annotations

import torch


def is_view_of_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._base, torch.nn.Parameter)
