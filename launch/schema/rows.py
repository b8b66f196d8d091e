"""Rows of the data: as people read them, and divided into micro-batches."""

from dataclasses import dataclass, field
from typing import Literal

# ---- as they will be trained, for people to read


@dataclass(frozen=True)
class ShownPart:
    """Neighbouring tokens that are all targets, or none of them, as text."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class ShownRow:
    """A row of the data. Without parts it is left out."""

    place: str  # file:line
    parts: list[ShownPart]
    num_tokens: int = 0
    num_targets: int = 0
    is_truncated: bool = False
    left_out: str = ""  # the reason
    has_escapes: bool = False  # a backslash before text that looks like a special token
    is_held_out: bool = False  # data.validation_size holds it out
    times: int = 1  # repetitions in an epoch


@dataclass(frozen=True)
class ShownRows:
    """Some rows, and counts of the rows that were read for them."""

    template: str  # origin of the chat template
    rows: list[ShownRow]
    num_read: int
    left_out: dict[str, int]  # reason -> rows
    num_truncated: int
    num_targets: int
    lengths: list[int]  # tokens of each row that is trained
    methods: dict[str, int]  # the way in which targets were found -> conversations
    contents: dict[str, int]  # role or key of a message -> messages that have it
    bad: list[str]  # errors of rows that cannot be read
    num_bad: int = 0
    num_held_out: int = 0  # rows that data.validation_size holds out
    num_files: int = 1  # files whose first rows were read


# ---- micro-batches of tokenised rows, and the largest of these


@dataclass(frozen=True)
class Division:
    """All that decides which rows of a part are computed at once, and how they are padded."""

    part: Literal["train", "validation"]
    micro_batch: int  # rows of a rank
    accumulation: int
    world_size: int
    groups_by_length: bool  # rows of similar lengths go together
    multiple: int  # multiple to which lengths are padded
    flattens: bool  # rows follow one another without padding
    seed: int = 0  # seed of the order of training
    num_steps: int = 0  # optimizer steps of the training


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of a micro-batch of a rank. Lengths are tokens of a padded row."""

    rows: int
    source: int
    target: int
    tokens: int  # tokens of all rows, without padding between them if they are flattened
    targets: int  # positions that predict a token with a loss
    is_padded: bool  # some row's source is shorter, so that masks are needed


@dataclass(frozen=True)
class LargestMicroBatches:
    """The micro-batches of which any mixture of tokens and targets makes the most, with and without
    padding, of a whole part and of its first optimizer step."""

    sizes: list[MicroBatchSize] = field(default_factory=list)
    first_step: list[MicroBatchSize] = field(default_factory=list)
