"""The private names of liger-kernel (0.8) that training uses."""

from __future__ import annotations

import inspect
from typing import Any

from training.compat.transformers_private import Network


def types() -> tuple[str, ...]:
    """The model types for which Liger has kernels."""
    return tuple(_table())


def switches(model_type: str) -> tuple[str, ...]:
    """The kernels and losses that Liger turns on for a type, by the keys of liger_kernel_config."""
    parameters = inspect.signature(_table()[model_type]).parameters.values()
    return tuple(each.name for each in parameters if each.default is True)


def patch(model: Network, switches: dict[str, bool]) -> None:
    """Bind Liger's forward methods to modules of a model, and put its classes and functions into
    the model's Python module."""
    from liger_kernel.transformers import monkey_patch

    monkey_patch._apply_liger_kernel_to_instance(model, **switches)


def is_of_experts(forward: Any) -> bool:
    """True for a forward method of all experts of a mixture."""
    from liger_kernel.transformers.swiglu import LigerExperts

    return getattr(forward, "__func__", None) is LigerExperts.forward


def _table() -> dict[str, Any]:
    from liger_kernel.transformers import monkey_patch

    return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
