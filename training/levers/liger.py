"""Liger's kernels of norms, rotary embedding and SwiGLU, which Trainer puts into the model."""

from __future__ import annotations

from typing import Any

from launch.schema.levers import Levers
from launch.schema.training_section import LIGER_LOSSES, TrainingSection


def arguments(training: TrainingSection, levers: Levers, values: dict[str, Any]) -> None:
    """Without its losses: the trainer computes the loss."""
    values.pop("use_liger_kernel", None)
    if levers.use_liger_kernel:
        losses = dict.fromkeys(LIGER_LOSSES, False)
        values["use_liger_kernel"] = True
        values["liger_kernel_config"] = {**(values.get("liger_kernel_config") or {}), **losses}
