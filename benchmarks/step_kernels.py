"""Kernels of a training step on a card that is only described: bytes, launches and milliseconds by
kind of kernel, and the modules that casts, copies and elementwise kernels come from.

Each training is one of tests/data/time_evidence/rows.json, so that a profile of it stands beside.
The step is recorded as a plan's steps are, with all layers; milliseconds are those of the rates
that plans have. Nothing is computed, and no card is needed. The first record stays: the table
compares with it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import recording, seconds_of_cards
from launch.plan import candidates
from launch.predict.facts import Facts
from launch.predict.time import operators, rates, timing
from launch.schema.plan import DataFormat, MemoryEstimate, Plan, Strategy
from launch.schema.recorded_step import BATCH, Layer, Operator
from training.compat import torch_private
from training.compat.levers_private import replaced
from training.trace import step
from training.trace.cuda_semantics import Target
from training.trace.recorder import Recorder

RESULT = "step_kernels"
PLACED = ("casts and copies", "elementwise")  # kinds whose places are written
MOST_PLACES = 40
COPIES = ("_to_copy", "clone", "copy_", "cat", "contiguous", "slice_backward", "select_backward")
FILLS = ("zeros", "ones", "fill_", "zero_", "full", "arange", "new_zeros")
UPDATE = ("optimizer", "zero")  # phases
# of a row's recipe: the levers that plans turn on are those of today
TODAY = {"training": {"num_output_chunks": 1}, "launch": seconds_of_cards.FIXED["launch"]}
OUTSIDE = ("start", "evaluation")
FIGURES = ("GB", "launches", "ms")


@dataclass
class Sum:
    """The figures of kernels that are counted together."""

    bytes: float = 0.0
    launches: int = 0
    ms: float = 0.0

    def add(self, moved: float, seconds: float, launches: int) -> None:
        self.bytes += moved
        self.launches += launches
        self.ms += 1e3 * seconds


@dataclass(frozen=True)
class Case:
    """A row of the evidence, and the mean length of its rows."""

    row: str
    title: str
    length: int
    is_padded: bool


CASES = (
    Case("h200-c3-ours", "QLoRA r16, 7B's width, 8 layers, 4 rows of 2,048", 2048, False),
    Case("h200-c2-lowmem-grouped", "LoRA r16, llama3.2-1b, 16 rows of 152", 152, True),
)


class PlacedRecorder(Recorder):
    """A recorder that notes the modules that each call is made by: of backward, those that made
    its node in forward."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.places: list[str] = []  # of the log's calls
        self._inside: list[tuple[str, int]] = []  # modules, and the nodes that were there before
        self._made: list[tuple[int, int, str]] = []  # first and last node of a module

    def module(self, module: torch.nn.Module, args: Any) -> None:
        self._inside.append((type(module).__name__, torch_private.next_node_number()))
        super().module(module, args)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        place = self._place()
        _, first = self._inside.pop()
        self._made.append((first, torch_private.next_node_number(), place))

    def _called(self, operator: Operator, layer: Layer | None) -> None:
        super()._called(operator, layer)
        self.places.append(self._place())

    def _place(self) -> str:
        if self._inside:
            again = "again: " if self.phase.startswith("backward") else ""
            return again + ".".join(name for name, _ in self._inside[-2:])
        number = torch_private.current_node_number()
        inner = (
            (first, place) for first, end, place in self._made if number and first <= number < end
        )
        return "backward: " + max(inner, default=(0, "no module"))[1].removeprefix("again: ")


def recorded(case: Case, facts: Facts, strategy: Strategy) -> PlacedRecorder:
    """The recorder of a step of this strategy."""
    plan = Plan(
        recipe_name="kernels",
        strategy=strategy,
        shape=facts.model.size,
        data_format=DataFormat("text", {}, "text", ""),
        estimate=MemoryEstimate(0, 0, 0),
        budget_bytes=0,
        lora_targets=facts.model.lora_targets,
    )
    recorder = PlacedRecorder(BATCH)
    leaving = register_module_forward_hook(recorder.leave, always_call=True)
    lengths, target = (case.length, case.length), Target("9.0", cudnn=0)
    with replaced([(step, "Recorder", lambda batch: recorder)]):
        step.step(facts.recipe, plan, lengths, case.is_padded, target=target)
    leaving.remove()
    return recorder


def kind_of(operator: Operator, phase: str) -> str:
    """The kind of an operator's kernel."""
    if operator.kind != "other":
        return operator.kind
    if phase in UPDATE:
        return "update"
    name = operator.name.removeprefix("aten::")
    if name.startswith("bitsandbytes::"):
        return "dequantisation"
    if name in COPIES:
        return "casts and copies"
    if name in FILLS:
        return "fills"
    named = (kind for part, kind in rates.NAMED.items() if part in operator.name)
    return next(named, "elementwise")


def row_of(case: Case, folder: Path) -> dict[str, Any]:
    """The kernels of a step, by kind, and the places of casts, copies and elementwise kernels."""
    evidence = seconds_of_cards.read_evidence()
    row = next(each for each in evidence["rows"] if each["id"] == case.row)
    facts = seconds_of_cards.facts_of(row, evidence, folder, TODAY)
    (strategy,), _ = candidates.possible(facts)
    recorder = recorded(case, facts, strategy)
    samples = strategy.per_device_train_batch_size
    targets = samples * case.length
    pace = timing.speed_of(strategy, rates.look_up(facts.machine, strategy), None).pace
    cost_of = operators.cost_of(pace, samples, targets, 1.0)
    kinds: dict[str, Sum] = {}
    places: dict[tuple[str, str, str], Sum] = {}
    for call, place in zip(recorder.log.calls, recorder.places, strict=True):
        operator = recorder.log.operators[call.operator]
        if call.phase.startswith(OUTSIDE) or not operator.launches:
            continue
        fixed, sample, target, _ = operator.bytes
        moved = fixed + samples * sample + targets * target
        kind = kind_of(operator, call.phase)
        sums = [kinds.setdefault(kind, Sum())]
        if kind in PLACED:
            sums.append(places.setdefault((kind, place, operator.name), Sum()))
        for each in sums:
            # the launch of a list is another operator
            each.add(moved, cost_of(operator).device_s, int(operator.form != "list"))
    longest = sorted(places.items(), key=lambda item: -item[1].ms)
    return {
        "case": case.row,
        "title": case.title,
        "launches": sum(each.launches for each in kinds.values()),
        "kinds": {kind: asdict(each) for kind, each in sorted(kinds.items())},
        "places": [
            {"kind": kind, "place": place, "operator": name, **asdict(each)}
            for (kind, place, name), each in longest[:MOST_PLACES]
        ],
    }


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables of kinds, beside the first record, and of places."""
    parts = []
    for row in rows:
        first = row["first"]
        lines = [
            [kind, *_figures(first["kinds"].get(kind)), *_figures(row["kinds"].get(kind))]
            for kind in sorted({*first["kinds"], *row["kinds"]})
        ]
        lines.append(["all", "", first["launches"], "", "", row["launches"], ""])
        head = ["kind", *(f"{when}{name}" for when in ("first: ", "") for name in FIGURES)]
        places = [
            [place["kind"], place["place"], place["operator"], *_figures(place)]
            for place in row["places"]
        ]
        parts.append(f"## {row['title']}\n\n" + recording.table(head, lines))
        parts.append(recording.table(["kind", "place", "operator", *FIGURES], places))
    return "\n".join(parts)


def _figures(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return ["0", "0", "0"]
    return [f"{figures['bytes'] / 1e9:.2f}", str(figures["launches"]), f"{figures['ms']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their name; not written")
    only = parser.parse_args().only
    before, rows = recording.rows(RESULT), []
    for case in CASES:
        if only in case.row:
            with tempfile.TemporaryDirectory() as folder:
                row = row_of(case, Path(folder))
            first = before.get(case.row, {}).get("first") or {
                name: row[name] for name in ("launches", "kinds")
            }
            rows.append({**row, "first": first})
    if only:
        print(text(rows))
    else:
        recording.write(RESULT, {"rows": rows}, text(rows))


if __name__ == "__main__":
    main()
