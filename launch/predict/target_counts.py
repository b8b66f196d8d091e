"""Positions with a target: where the output head computes logits for these alone, and how many of
them and of all tokens a micro-batch has. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from launch.schema.levers import PLAIN, ROWS
from launch.schema.plan import ModelFamily
from launch.schema.recipe import Recipe
from launch.schema.rows import MicroBatchSize


@dataclass(frozen=True)
class BatchCounts:
    """Rows of a micro-batch and targets of a part of its logits. Of shorter rows as many of the
    longest as have as many tokens."""

    rows: int | Fraction
    targets: int


@dataclass(frozen=True)
class MostTargets:
    """The largest micro-batches of some rows: those that a run will have, or the most targets that
    any could have, whatever the order of rows.

    `largest` are the most targets of a row, in descending order; (): not known, so that every
    position may have a target."""

    length: int  # positions of a row
    largest: tuple[int, ...] = ()
    parts: int = 1  # number of parts in which the head makes logits, one after another
    source: int = 0  # tokens of a row's source, of which `length` is a target; 0: the same
    flattens: bool = False  # rows follow one another without padding
    # rows of a micro-batch -> the run's largest of so many rows, if its order is known
    sizes: Mapping[int, Sequence[MicroBatchSize]] = field(default_factory=dict)
    first_step: Sequence[MicroBatchSize] = ()  # the largest of the run's first step, likewise

    @property
    def is_known(self) -> bool:
        return bool(self.largest or self.sizes)

    def count(self, num_samples: int) -> int:
        """Targets of a micro-batch of so many rows, at most."""
        if num_samples in self.sizes:
            return max(size.targets for size in self.sizes[num_samples])
        positions = num_samples * self.length
        if not self.largest:
            return positions
        num_further = max(num_samples - len(self.largest), 0) * self.largest[-1]
        # a micro-batch without a target computes one position
        return max(min(sum(self.largest[:num_samples]) + num_further, positions), 1)

    def of_part(self, num_samples: int) -> int:
        """Positions of a part of the logits, at most."""
        return math.ceil(self.count(num_samples) / self.parts)

    def batches(self, num_samples: int) -> list[BatchCounts]:
        """The largest micro-batches of so many rows, one of which takes the most memory."""
        if num_samples not in self.sizes:
            return [BatchCounts(num_samples, self.of_part(num_samples))]
        return [self.counts(size) for size in self.sizes[num_samples]]

    def batches_of_first_step(self, num_samples: int) -> list[BatchCounts]:
        """The same of the first optimizer step."""
        return list(map(self.counts, self.first_step)) or self.batches(num_samples)

    def counts(self, size: MicroBatchSize) -> BatchCounts:
        """A micro-batch in rows of this length."""
        return BatchCounts(self._rows(size), math.ceil(size.targets / self.parts))

    def _rows(self, size: MicroBatchSize) -> int | Fraction:
        source = self.source or self.length
        if self.flattens:
            return Fraction(size.tokens, source)
        if (size.source, size.target) == (source, self.length):
            return size.rows
        return size.rows * (Fraction(size.source, source) + Fraction(size.target, self.length)) / 2


NO_TARGETS = MostTargets(0)


def at_targets(recipe: Recipe, family: ModelFamily) -> bool:
    """True if logits are computed at positions with a target alone: as the recipe says, or unless
    there is a reason against it."""
    requested = recipe.training.logits_at_targets
    return no_logits_at_targets(recipe, family) is None if requested is None else requested


def no_logits_at_targets(recipe: Recipe, family: ModelFamily) -> str | None:
    """The reason why the plan computes the logits of every position; None: it does not."""
    if reason := ROWS["logits_at_targets"].refusal(PLAIN, family):
        return reason
    if recipe.task == "pretrain" and recipe.data.packing:
        return "every position of packed texts has a target"
    return None


def vary(counts: Mapping[str, Any] | None) -> bool:
    """True if one micro-batch may have more targets than another with as many positions. `counts`
    are those of tokenising."""
    return counts is None or counts["target_tokens"] < counts["rows"] * counts["most_targets"][0]
