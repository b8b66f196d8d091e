"""The private names of torch (2.11 to 2.13) that levers use."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
