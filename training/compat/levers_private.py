"""The private names of torch (2.11 to 2.13) and transformers (5.0 to 5.23) that levers use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import modeling_utils


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
def packing_to_host(
    streamed: Callable[[torch.nn.Module], tuple[str, ...]], keeps: bool
) -> Iterator[None]:
    """Inside, transformers gives weights 4 bits on a card one by one, and those whose names begin
    as `streamed` says of a model leave it at once. A rank that does not keep them has one value in
    the place of all. No memory is reserved for the whole model."""
    from transformers.integrations import bitsandbytes as integration

    quantize, warm_up = integration.Bnb4bitQuantize.convert, modeling_utils.caching_allocator_warmup

    def convert(operation: Any, weights: Any, *, model: Any, **kwargs: Any) -> Any:
        packed: dict[str, Any] = quantize(operation, weights, model=model, **kwargs)
        for name, weight in packed.items():
            if name.startswith(streamed(model)):
                values = weight.data if keeps else weight.data.flatten()[:1]
                weight.data = values.cpu().expand(weight.shape)
        return packed

    integration.Bnb4bitQuantize.convert = convert  # pyright: ignore[reportAttributeAccessIssue]
    modeling_utils.caching_allocator_warmup = lambda *args: None
    try:
        yield
    finally:
        integration.Bnb4bitQuantize.convert = quantize
        modeling_utils.caching_allocator_warmup = warm_up
