"""The private names of liger-kernel (0.8) that training uses."""

import inspect
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from training.compat.transformers_private import Network


def types() -> tuple[str, ...]:
    """The model types for which Liger has kernels."""
    return tuple(_library().MODEL_TYPE_TO_APPLY_LIGER_FN)


def switches(model_type: str) -> tuple[str, ...]:
    """The kernels and losses that Liger turns on for a type, by the keys of liger_kernel_config."""
    change = _library().MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    parameters = inspect.signature(change).parameters.values()
    return tuple(each.name for each in parameters if each.default is True)


def patch(model: Network, switches: dict[str, bool]) -> None:
    """Bind Liger's forward methods to modules of a model, but for all experts of a mixture, and put
    its classes and functions into the model's Python module."""
    _library()._apply_liger_kernel_to_instance(model, **switches)
    experts = import_module("liger_kernel.transformers.swiglu").LigerExperts
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is experts.forward:
            del module.forward, module._get_name


def kernels() -> list[tuple[Any, str]]:
    """(Python module, name) of each Triton kernel that Liger's functions launch."""
    _library()  # imports all of them
    kernel = import_module("triton.runtime.jit").KernelInterface
    return [
        (module, name)
        for path, module in sorted(sys.modules.items())
        if path.startswith("liger_kernel.ops.")
        for name, value in vars(module).items()
        if isinstance(value, kernel)
    ]


def is_installed() -> bool:
    return all(map(find_spec, ("liger_kernel", "triton")))


def _library() -> Any:
    """Liger's module that changes models, without its warnings on packages for other cards."""
    module = import_module("liger_kernel.transformers.monkey_patch")
    logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)
    return module
