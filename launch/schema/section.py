"""The base of a recipe's sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from launch.schema.affects import affects

AFFECTS_STEP = affects("weights", "memory", "step_time")


def as_tuple(value: Any) -> Any:
    """A single text or a list as a tuple, which strict validation expects."""
    values = [value] if isinstance(value, str) else value
    return tuple(values) if isinstance(values, list) else values


class Section(BaseModel):
    """A strict, frozen part of a recipe. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
