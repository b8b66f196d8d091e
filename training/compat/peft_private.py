"""The private names of PEFT (0.21) that training uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def leave_casts_to_autocast(network: torch.nn.Module) -> None:
    """Cast no input of a LoRA layer under autocast. PEFT casts it to the float32 of the adapters,
    and autocast casts that back before its product, with the same bits."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [each for each in network.modules() if isinstance(each, LoraLayer)]
    for layer in layers:
        layer._cast_input_dtype = partial(_cast, layer._cast_input_dtype)


def _cast(
    library: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    tensor: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    is_cast_later = torch.is_autocast_enabled(tensor.device.type)
    return tensor if is_cast_later else library(tensor, dtype)
