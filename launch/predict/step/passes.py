"""The operators of a step, in runs that like layers share. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from itertools import groupby
from typing import Any

from launch.predict.step.recorded import PASSES
from launch.schema.recorded_step import Log, Operator, Passes, operator_of

Run = tuple[str, tuple[int, ...]]  # phase, and numbers of operators
# phases beside the passes -> their field of Passes
_FIELDS = {"optimizer": "update", "zero": "update", "evaluation": "evaluation"}
OF_STEP = (*PASSES, "optimizer", "zero")


def of_runs(operators: Iterable[Operator], runs: Iterable[Run]) -> Passes:
    """The passes that are made of these runs, in their order; phases that take no time are left
    out."""
    numbers: dict[tuple[int, ...], int] = {}
    sections: dict[str, list[tuple[int, int]]] = {name: [] for name in _FIELDS.values()}
    for phase, run in runs:
        if not phase.startswith((*PASSES, *_FIELDS)):
            continue
        section = sections.setdefault(_FIELDS.get(phase, phase.partition(":")[2]), [])
        number = numbers.setdefault(run, len(numbers))
        last, times = section[-1] if section else (-1, 0)
        if last == number:
            section.pop()
        section.append((number, times + 1 if last == number else 1))
    update, evaluation, *micro_steps = sections.values()
    return Passes([*operators], [*numbers], micro_steps, update, evaluation)


def of_log(log: Log) -> Passes:
    """The passes of a recorded or composed step."""
    runs = (
        (phase, tuple(call.operator for call in calls))
        for (phase, _), calls in groupby(log.calls, lambda call: (call.phase, call.layer))
    )
    return of_runs(log.operators, runs)


def stored(passes: Passes) -> dict[str, Any]:
    """The passes as a file has them."""
    used = {number for run in passes.runs for number in run}
    operators = [
        astuple(operator) if number in used else None
        for number, operator in enumerate(passes.operators)
    ]
    return {**vars(passes), "operators": operators}


def read(content: Mapping[str, Any]) -> Passes:
    """The passes of a file."""
    rows: Sequence[Any] = content["operators"]
    operators = [operator_of(row) if row else Operator("", "view") for row in rows]
    sections = [*content["micro_steps"], content["update"], content["evaluation"]]
    *micro_steps, update, evaluation = [[(run, n) for run, n in each] for each in sections]
    return Passes(operators, content["runs"], micro_steps, update, evaluation)
