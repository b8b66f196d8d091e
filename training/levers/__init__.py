"""Levers as a trainer applies them: modules that rows of launch.schema.levers.LEVERS name, in their
order. `apply` of each changes a trainer that is made; the recorder of a step goes the same way
(training/trace/step.py). Levers that TrainingArguments has are in training/loop/arguments.py."""

from importlib import import_module
from typing import Any

from launch.schema.levers import LEVERS, Levers

_NAMES = dict.fromkeys(row.module for row in LEVERS if row.module)
_MODULES = [import_module(f"{__name__}.{name}") for name in _NAMES]


def apply(trainer: Any, levers: Levers) -> None:
    """Change a trainer before it trains."""
    for module in _MODULES:
        module.apply(trainer, levers)
