"""The private names of torch's compiler (2.11 to 2.13) that training uses."""

from __future__ import annotations

from typing import NamedTuple


class Compiled(NamedTuple):
    """What this process has compiled so far."""

    graphs: int
    breaks: int  # of graphs, where Python runs between two of them
    eager: int  # pieces of code that were not compiled: too many kinds of inputs, or no graph


def counted() -> Compiled:
    """Torch's own counts."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return Compiled(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        frames["total"] - frames["ok"],
    )
