"""Levers as a trainer applies them: a module for each row of launch.schema.levers.LEVERS, in their
order. `arguments` changes the values that TrainingArguments get, `apply` a trainer that is made; a
module has either or both. The recorder of a step goes the same way (training/trace/step.py)."""

from importlib import import_module
from typing import Any

from launch.schema.levers import LEVERS, Levers
from launch.schema.training_section import TrainingSection

_NAMES = dict.fromkeys(row.module for row in LEVERS if row.module)
_MODULES = [import_module(f"{__name__}.{name}") for name in _NAMES]


def arguments(training: TrainingSection, levers: Levers, values: dict[str, Any]) -> None:
    """Change the values of TrainingArguments, of which `values` has the recipe's own."""
    for module in _MODULES:
        if change := getattr(module, "arguments", None):
            change(training, levers, values)


def apply(trainer: Any, levers: Levers) -> None:
    """Change a trainer before it trains."""
    for module in _MODULES:
        if change := getattr(module, "apply", None):
            change(trainer, levers)
