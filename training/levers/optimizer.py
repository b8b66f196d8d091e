"""The optimizer: with states of 32 or 8 bits, on the card or in managed memory."""

from typing import Any

from launch.schema.levers import Levers
from launch.schema.training_section import TrainingSection


def arguments(training: TrainingSection, levers: Levers, values: dict[str, Any]) -> None:
    values["optim"] = levers.optim
