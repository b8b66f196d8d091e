"""The operators of a step's passes, in runs that like layers share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import groupby
from typing import Any

from launch.predict.step.recorded import PASSES
from launch.schema.recorded_step import Log, Operator, Passes, operator_of

Run = tuple[str, tuple[int, ...]]  # phase, and numbers of operators


def of_runs(operators: Iterable[Operator], runs: Iterable[Run]) -> Passes:
    """The passes that are made of these runs, in their order; other phases are left out."""
    numbers: dict[tuple[int, ...], int] = {}
    micro_steps: list[list[tuple[int, int]]] = []
    before = ""
    for phase, run in runs:
        if not phase.startswith(PASSES):
            continue
        if phase != before and phase.startswith("forward"):
            micro_steps.append([])
        before, number = phase, numbers.setdefault(run, len(numbers))
        last, times = micro_steps[-1][-1] if micro_steps[-1] else (-1, 0)
        if last == number:
            micro_steps[-1].pop()
        micro_steps[-1].append((number, times + 1 if last == number else 1))
    return Passes([*operators], [*numbers], micro_steps)


def of_log(log: Log) -> Passes:
    """The passes of a recorded or composed step."""

    def runs() -> Iterator[Run]:
        for (phase, _), calls in groupby(log.calls, lambda call: (call.phase, call.layer)):
            yield phase, tuple(call.operator for call in calls)

    return of_runs(log.operators, runs())


def stored(passes: Passes) -> dict[str, Any]:
    """The passes as a file has them."""
    used = {number for run in passes.runs for number in run}
    operators = [
        astuple(operator) if number in used else None
        for number, operator in enumerate(passes.operators)
    ]
    return {"operators": operators, "runs": passes.runs, "micro_steps": passes.micro_steps}


def read(content: Mapping[str, Any]) -> Passes:
    """The passes of a file."""
    operators: Sequence[Any] = content["operators"]
    micro_steps = [[(run, times) for run, times in step] for step in content["micro_steps"]]
    return Passes(
        [operator_of(row) if row else Operator("", "view") for row in operators],
        content["runs"],
        micro_steps,
    )
