"""The private names of PEFT (0.21) that training uses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


def with_adapter(network: torch.nn.Module, folder: Path) -> Any:
    """The network with the adapter of a folder. PEFT asks for is_gradient_checkpointing, of which
    transformers 5.23 warns: the property that replaces it answers."""
    from peft import PeftModel

    if current := getattr(PreTrainedModel, "is_activation_checkpointing", None):
        PreTrainedModel.is_gradient_checkpointing = current  # pyright: ignore[reportAttributeAccessIssue]
    return PeftModel.from_pretrained(network, folder, local_files_only=True)


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
