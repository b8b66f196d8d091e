"""Margins of predicted seconds: how measured trainings on cards of a class compare with them
(configs/seconds_margins.yaml)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from launch.base.workspace import FILES
from launch.probe import cards
from launch.schema.machine import Gpu

FILE = FILES / "configs" / "seconds_margins.yaml"
# names of configs/cards.yaml that make a class
CLASSES = {
    "GeForce": cards.GEFORCE.pattern,
    "A100 and A800": r"(A100|A800)( .*)?",
    "H100 and newer": r"(H100|H200|H800|B200)( .*)?",
    "RTX A and A40": r"RTX A(4000|4500|5000|6000)|A40",
}
COMPILED = ", compiled"  # behind a class's name: its trainings that torch.compile compiled


@dataclass(frozen=True)
class SecondsMargin:
    """Measured over predicted seconds of a step, of nine measured trainings in ten."""

    cards: str  # their class
    trainings: int
    least: float
    most: float

    @property
    def reason(self) -> str:
        return (
            f"of {self.trainings} measured trainings on such cards ({self.cards}), nine in ten took"
            f" {self.least:g} to {self.most:g} times the predicted seconds"
        )


def class_of(name: str) -> str | None:
    """The class of a row of configs/cards.yaml; None for a card like which none was measured."""
    return next((each for each, form in CLASSES.items() if re.fullmatch(form, name)), None)


def of_cards(gpus: Sequence[Gpu], is_compiled: bool = False) -> SecondsMargin | None:
    """The margin for these cards; None unless all are of one class, of which enough trainings were
    measured. `is_compiled`: of compiled trainings, or of the others where too
    few of them were."""
    rows = [cards.look_up(gpu) for gpu in gpus]
    classes = {class_of(row.name) if row and is_named else None for row, is_named in rows}
    if len(classes) != 1:
        return None
    name = classes.pop() or ""
    plain = _table().get(name)
    if not is_compiled:
        return plain
    compiled = _table().get(name + COMPILED)
    return compiled or (plain and replace(plain, cards=f"{name}, not compiled"))


@cache
def _table() -> Mapping[str, SecondsMargin]:
    import yaml

    return {
        name: SecondsMargin(name, **figures)
        for name, figures in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
    }
