"""What a recipe key affects: said once, at its field in launch/schema/recipe.py, and asked by all
who must know whether a changed key matters to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Effect = Literal[
    "weights",  # the trained weights
    "rows",  # which rows and tokens are trained, and in which order
    "memory",  # the allocations of a step of full-length rows: they name its trace
    "step_time",  # the seconds of such a step
    "plan",  # which strategies may be chosen
    "batch",  # how the effective batch is split: only the product counts
    "interruptions",  # logs, evaluations, saves, stops, restarts: all between steps
    "planned",  # the strategy that runs says what became of it
    "source",  # a path whose content is compared instead
    "name",  # a name, an address, or a folder that is written to
    "machine",  # each machine's own: ranks need not agree on it
]
# Of a key that only TrainingArguments knows, unless recipe.EXTRAS says otherwise.
EVERYTHING: frozenset[Effect] = frozenset({"weights", "rows", "memory", "step_time"})


@dataclass(frozen=True)
class Affects:
    """The mark in a field's annotation: Annotated[int, affects("memory")]."""

    effects: frozenset[Effect]


def affects(*effects: Effect) -> Affects:
    return Affects(frozenset(effects))


def marked(metadata: Iterable[object]) -> frozenset[Effect]:
    """The effects in a field's metadata; none: the field does not say."""
    return frozenset().union(*(mark.effects for mark in metadata if isinstance(mark, Affects)))
