"""Rows as they will be trained, for people to read."""

from __future__ import annotations

from dataclasses import dataclass


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
    is_held_out: bool = False  # by data.validation_size
    times: int = 1  # that an epoch trains it


@dataclass(frozen=True)
class ShownRows:
    """Some rows, and counts of the rows that were read for them."""

    template: str  # where the chat template comes from
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
    num_files: int = 1  # of which the first rows were read
