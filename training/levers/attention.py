"""The kernels of attention, which a model is built with (training/model/build.py)."""

from typing import Any

import torch

from launch.schema.levers import Levers
from training.compat import levers_private, transformers_private


def apply(trainer: Any, levers: Levers) -> None:
    """Assert that the model has the planned kernels, without which the estimate is worthless, and
    give grouped heads to those of them alone that this machine's cards have."""
    attention = transformers_private.attention(trainer.model)
    planned = levers.attn_implementation
    assert attention == planned, f"planned {planned}, got {attention}"
    if trainer.args.device.type == "cuda":
        setattr(*levers_private.grouped_heads(_have_flash()))


def _have_flash() -> bool:
    """True if each card that torch sees has PyTorch's flash attention."""
    cards = range(torch.cuda.device_count())
    return torch.version.hip is not None or all(
        torch.cuda.get_device_capability(card) >= (8, 0) for card in cards
    )
