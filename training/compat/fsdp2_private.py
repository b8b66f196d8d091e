"""The private names of Accelerate (1.15) and transformers (5.23) with which FSDP2 shares out
weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import accelerator
from transformers import core_model_loading, modeling_utils

from training.compat.transformers_private import Network


@contextmanager
def each_loaded(
    visit: Callable[[torch.Tensor], None], is_on_host: Callable[[str], bool]
) -> Iterator[None]:
    """Inside, from_pretrained() gives each parameter to `visit` once it is in its module, leaves
    those on the host whose names are said to be there, and reserves no block of the whole model's
    size on a card."""
    place, find_device = core_model_loading.set_param_for_module, core_model_loading.get_device
    reserve = modeling_utils.caching_allocator_warmup

    def place_and_visit(model: Network, target_name: str, *args: Any, **kwargs: Any) -> None:
        place(model, target_name, *args, **kwargs)
        visit(model.get_parameter_or_buffer(target_name))

    def device_of(device_map: Any, param_name: str, **kwargs: Any) -> Any:
        return "cpu" if is_on_host(param_name) else find_device(device_map, param_name, **kwargs)

    core_model_loading.set_param_for_module = place_and_visit
    core_model_loading.get_device = device_of
    modeling_utils.caching_allocator_warmup = lambda *args, **kwargs: None
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = place
        core_model_loading.get_device = find_device
        modeling_utils.caching_allocator_warmup = reserve


def around_division(
    divided_by: accelerator.Accelerator,
    divide: Callable[[Callable[[Network], Network], Network], Network],
) -> None:
    """Have `divide(library, network)` share out this accelerator's model, where `library` is
    Accelerate's own way to do it."""
    library = accelerator.fsdp2_prepare_model

    def prepare(asked_by: accelerator.Accelerator, network: Network) -> Network:
        if asked_by is not divided_by:
            return library(asked_by, network)
        return divide(partial(library, asked_by), network)

    accelerator.fsdp2_prepare_model = prepare
