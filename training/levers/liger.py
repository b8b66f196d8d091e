"""Liger's kernels of norms, rotary embedding and gated MLPs in the modules of one model.

Liger also changes the Python module of the model's class, and the activations of transformers,
which other models share. That is taken back: attention gets a forward method of its own, which
finds Liger's rotary embedding. The experts of a mixture stay those of transformers: Liger's compute
in the type of their weights, whatever autocast says."""

import sys
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers.activations import ACT2FN

from launch.schema.levers import Levers
from launch.schema.training_section import LIGER_LOSSES
from training.compat import liger_private
from training.compat.transformers_private import Network


def apply(trainer: Any, levers: Levers) -> None:
    if levers.use_liger_kernel:
        model = trainer.model
        of_peft = getattr(model, "get_base_model", None)
        patch(of_peft() if of_peft else model, trainer.args.liger_kernel_config or {})


def patch(model: Network, switches: dict[str, bool]) -> list[torch.nn.Module]:
    """Let modules of a model compute with Liger's kernels, but for the loss, and return them."""
    python_module = sys.modules[type(model).__module__]
    shared, before = dict(vars(python_module)), _forwards(model)
    activations = dict(ACT2FN.items())
    liger_private.patch(model, {**switches, **dict.fromkeys(LIGER_LOSSES, False)})
    functions = _taken_back(python_module, shared)
    ACT2FN.update(activations)
    for module in model.modules():
        forward = type(module).forward
        if functions.keys() & set(forward.__code__.co_names):
            module.forward = MethodType(_with_globals(forward, functions), module)
    return [
        module
        for module, forward in _forwards(model).items()
        if before.get(module, 0) is not forward
    ]


def _forwards(model: Network) -> dict[torch.nn.Module, Any]:
    """The forward method that each module has for itself, or None."""
    return {module: vars(module).get("forward") for module in model.modules()}


def _taken_back(python_module: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Give a Python module the names that it had before, and return the functions among those that
    it has lost."""
    changed = {
        name: value for name, value in vars(python_module).items() if value is not before.get(name)
    }
    for name in changed:
        if name in before:
            setattr(python_module, name, before[name])
        else:
            delattr(python_module, name)
    return {name: value for name, value in changed.items() if not isinstance(value, type)}


def _with_globals(function: Any, values: dict[str, Any]) -> FunctionType:
    """The same code, which finds other values by these names."""
    copy = FunctionType(
        *(function.__code__, {**function.__globals__, **values}),
        *(function.__name__, function.__defaults__, function.__closure__),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
