"""The base of a recipe's sections, and the effects of recipe keys: each field names its effects
once, and all code that compares recipes asks for them."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

Effect = Literal[
    "weights",  # the trained weights
    "rows",  # the rows and tokens that are trained, and their order
    "memory",  # the allocations of a step with rows of full length, which identify its trace
    "step_time",  # the seconds of such a step
    "plan",  # the strategies that may be chosen
    "batch",  # the division of the effective batch: only the product counts
    "interruptions",  # everything between steps: logs, evaluations, saves, stops, restarts
    "planned",  # the strategy that runs contains the final value
    "source",  # a path; its content is compared instead
    "name",  # a name, an address, or a folder that is written to
    "machine",  # a value of each machine, on which ranks need not agree
]
# The effects of a key that only TrainingArguments knows, unless recipe_keys.EXTRAS names others.
EVERYTHING: frozenset[Effect] = frozenset({"weights", "rows", "memory", "step_time"})


def affects(*effects: Effect) -> frozenset[Effect]:
    """The mark of effects in a field's annotation: Annotated[int, affects("memory")]."""
    return frozenset(effects)


def marked(metadata: Iterable[object]) -> frozenset[Effect]:
    """The effects in a field's metadata; empty if the field has no mark."""
    return frozenset().union(*(mark for mark in metadata if isinstance(mark, frozenset)))


AFFECTS_STEP = affects("weights", "memory", "step_time")


def as_tuple(value: Any) -> Any:
    """A single text or a list as a tuple, which strict validation expects."""
    values = [value] if isinstance(value, str) else value
    return tuple(values) if isinstance(values, list) else values


class Section(BaseModel):
    """A strict, frozen part of a recipe. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def _faults(self) -> Sequence[tuple[object, str]]:
        """Rows for keys that are right one by one: what makes them wrong together if it is true,
        and a sentence on it with what to do."""
        return ()

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if faults := [text for is_wrong, text in self._faults() if is_wrong]:
            raise ValueError("\n".join(faults))
        return self
