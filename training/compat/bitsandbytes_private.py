"""The private names of bitsandbytes (0.50) that training uses."""

from functools import partial
from typing import Any

import torch


def quantized(like: Any, weight: torch.Tensor) -> Any:
    """A 4-bit parameter of this weight, with the settings of the parameter `like`, which has no
    values."""
    return type(like)(weight, **vars(like))._quantize(weight.device)


def load_paged(optimizer: Any) -> None:
    """Let a paged optimizer load its states to host RAM, not to the card, for page_states()."""
    if getattr(optimizer, "is_paged", False):
        optimizer.load_state_dict = partial(optimizer.load_state_dict, move_to_device=False)


def is_paged(optimizer: Any, parameter: torch.Tensor, key: str) -> bool:
    """True if a card's optimizer makes this state of the parameter in pages, outside PyTorch's
    allocator. Source: get_state_buffer in bitsandbytes/optim/optimizer.py."""
    return (
        getattr(optimizer, "is_paged", False)
        and key in ("state1", "state2")
        and parameter.numel() >= 1e5
    )


def page_states(optimizer: Any) -> None:
    """Put the states that a paged optimizer has loaded into pages, as it makes them itself: its own
    loading puts them on the card for good."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    if not getattr(optimizer, "is_paged", False):
        return
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_made_paged = key in ("state1", "state2") and parameter.device.type == "cuda"
            if is_made_paged and not getattr(value, "is_paged", False):
                pages = optimizer.get_state_buffer(parameter, dtype=value.dtype)
                torch.cuda.synchronize(parameter.device)  # a kernel has filled it with zeros
                state[key] = pages.copy_(value)


def gemm_4bit() -> Any:
    """The kernel of a product with a 4-bit weight, made of torch's operators."""
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    return _gemm_4bit_default_impl
