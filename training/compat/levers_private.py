"""The private names of torch (2.11 to 2.13) and transformers (5.0 to 5.23) that levers use, and the
loading of weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import core_model_loading, modeling_utils

from training.compat.transformers_private import Network


class Compiled(NamedTuple):
    """Counts of what this process has compiled so far."""

    graphs: int
    breaks: int  # places between two graphs where Python runs
    eager: int  # pieces of code that were not compiled: too many kinds of inputs, or no graph


def is_view_of_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._base, torch.nn.Parameter)


def compiled() -> Compiled:
    """The counts of torch's compiler."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return Compiled(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        frames["total"] - frames["ok"],
    )


@contextmanager
def each_loaded(
    visit: Callable[[Network, str], None],
    is_on_host: Callable[[str], bool] = lambda name: False,
) -> Iterator[None]:
    """Inside, from_pretrained() loads one parameter after another and calls `visit(model, name)`
    once it is in its module, leaves those on the host whose names are said to be there, and
    reserves no block of the whole model's size on a card."""
    place, find_device = core_model_loading.set_param_for_module, core_model_loading.get_device
    reserve, materialize = (
        modeling_utils.caching_allocator_warmup,
        core_model_loading.spawn_materialize,
    )

    def place_and_visit(model: Network, target_name: str, *args: Any, **kwargs: Any) -> None:
        place(model, target_name, *args, **kwargs)
        visit(model, target_name)

    def device_of(device_map: Any, param_name: str, **kwargs: Any) -> Any:
        return "cpu" if is_on_host(param_name) else find_device(device_map, param_name, **kwargs)

    def materialize_later(thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
        # threads would bring packed weights to the card before they are asked for
        return materialize(None, *args, **kwargs)

    core_model_loading.set_param_for_module = place_and_visit
    core_model_loading.get_device = device_of
    core_model_loading.spawn_materialize = materialize_later
    modeling_utils.caching_allocator_warmup = lambda *args, **kwargs: None
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = place
        core_model_loading.get_device = find_device
        core_model_loading.spawn_materialize = materialize
        modeling_utils.caching_allocator_warmup = reserve
