"""Rows that are chosen by their numbers: those that data.validation_size holds out, and those of a
source whose weight is no whole number.

A choice depends on the number of a row and the number of rows alone. So each start, each process
that tokenises and `show` choose the same rows."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from launch.base.errors import DataError

Part = Literal["train", "validation"]


@dataclass(frozen=True)
class EvenChoice:
    """`chosen` of `total` rows: the rows are divided into `chosen` stretches of equal length, and
    one row of each is chosen by a hash."""

    chosen: int
    total: int
    seed: str

    def holds(self, number: int) -> bool:
        """True if a row is chosen; rows are numbered from 0."""
        return self.chosen > 0 and number == self._place(self._stretch(number))

    def before(self, number: int) -> int:
        """The number of rows that are chosen before this row."""
        if not self.chosen:
            return 0
        stretch = self._stretch(number)
        return stretch + (self._place(stretch) < number)

    def _stretch(self, number: int) -> int:
        return number * self.chosen // self.total

    def _place(self, stretch: int) -> int:
        """The row of a stretch that is chosen."""
        begin, end = (-(-i * self.total // self.chosen) for i in (stretch, stretch + 1))
        digest = hashlib.sha256(f"{self.seed} {stretch}".encode()).digest()
        return begin + int.from_bytes(digest[:8], "little") % (end - begin)


@dataclass(frozen=True)
class RowChoice:
    """The rows of a source that a part of the data takes."""

    held_out: EvenChoice
    part: Part
    begin: int = 0  # the number of the source's first row
    # choice of the rows that are trained; None: all of the source's rows
    share: EvenChoice | None = None

    def takes(self, number: int) -> bool:
        if self.part == "validation" or self.held_out.holds(number):
            return self.part == "validation" and self.held_out.holds(number)
        if self.share is None:
            return True
        held_out = self.held_out.before(number) - self.held_out.before(self.begin)
        return self.share.holds(number - self.begin - held_out)


def held_out(size: float, total: int, file: object) -> EvenChoice:
    """The rows that data.validation_size holds out of `total` rows. Raises DataError if no row
    would be left for one of the parts."""
    chosen = size if isinstance(size, int) else round(size * total)
    if not 0 < chosen < total:
        raise DataError(
            f"{file}: data.validation_size {size:,} holds {chosen:,} of {total:,} rows out, and"
            f" leaves {max(total - chosen, 0):,} to train on; expected at least 1 row for each,"
            " e.g. --data.validation_size=1"
        )
    return EvenChoice(chosen, total, "held out")


def shares(weight: float, num_rows: int, file: object) -> list[EvenChoice | None]:
    """The rows of a source in each pass over it: all of them (None) as often as the weight is
    whole, then the rest of the weight. Raises DataError if no row would be trained."""
    passes: list[EvenChoice | None] = [None] * math.floor(weight)
    if chosen := round((weight - len(passes)) * num_rows):
        passes.append(EvenChoice(chosen, num_rows, f"pass {len(passes)}"))
    if not passes or not num_rows:
        raise DataError(
            f"{file}: weight {weight:g} of {num_rows:,} rows is no row; raise the weight, or leave"
            " the source out"
        )
    return passes
