"""The division of tokenised rows into micro-batches, and the largest of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Division:
    """All that decides which rows of a part are computed at once, and how they are padded."""

    part: Literal["train", "validation"]
    micro_batch: int  # rows of a rank
    accumulation: int
    world_size: int
    groups_by_length: bool  # rows of similar lengths go together
    multiple: int  # to which lengths are padded
    flattens: bool  # rows follow one another without padding
    seed: int = 0  # of the order of training
    num_steps: int = 0  # of training


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of a micro-batch of a rank. Lengths are tokens of a padded row."""

    rows: int
    source: int
    target: int
    tokens: int  # of all rows; without padding between them if they are flattened
    targets: int  # positions that predict a token with a loss
    is_padded: bool  # some row's source is shorter, so that masks are needed


@dataclass(frozen=True)
class LargestMicroBatches:
    """The micro-batches of which any mixture of tokens and targets makes the most, with and without
    padding, of a whole part and of its first optimizer step."""

    sizes: list[MicroBatchSize] = field(default_factory=list)
    first_step: list[MicroBatchSize] = field(default_factory=list)
