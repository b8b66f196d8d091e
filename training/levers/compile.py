"""torch.compile of training steps. Evaluations and generation run eagerly: to compile anew for
their lengths takes minutes, and would save seconds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainingArguments

from launch.schema.levers import Levers
from launch.schema.training_section import COMPILE_KEYS, TrainingSection


def arguments(training: TrainingSection, levers: Levers, values: dict[str, Any]) -> None:
    if not levers.torch_compile:
        for key in COMPILE_KEYS:
            values.pop(key, None)


def eagerly(args: TrainingArguments) -> AbstractContextManager[Any]:
    """No compiled code within."""
    return torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext()
