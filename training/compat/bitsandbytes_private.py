"""The private names of bitsandbytes (0.50) that training uses."""

from __future__ import annotations

from typing import Any

import torch


def quantized(like: Any, weight: torch.Tensor) -> Any:
    """A 4-bit parameter of this weight, with the settings of the parameter `like`, which has no
    values."""
    return type(like)(weight, **vars(like))._quantize(weight.device)


def gemm_4bit() -> Any:
    """The kernel of a product with a 4-bit weight, made of torch's operators."""
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    return _gemm_4bit_default_impl
