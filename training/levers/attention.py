"""The kernels of attention, which a model is built with (training/model/build.py)."""

from __future__ import annotations

from typing import Any

from launch.schema.levers import Levers
from training.compat import transformers_private


def apply(trainer: Any, levers: Levers) -> None:
    """Assert that the model has the planned kernels, without which the estimate is worthless."""
    attention = transformers_private.attention(trainer.model)
    planned = levers.attn_implementation
    assert attention == planned, f"planned {planned}, got {attention}"
