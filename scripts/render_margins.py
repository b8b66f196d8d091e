#!/usr/bin/env python3
"""Write configs/seconds_margins.yaml: the margins of predicted seconds, of each class of cards that
benchmarks/results/seconds_of_cards.json has enough measured trainings of."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
# Run as a script: launch/ and benchmarks/ are beside scripts/, not on the path, so that they are
# imported behind this line (E402).
sys.path.insert(0, str(CODE))

from benchmarks.seconds_of_cards import DOUBTFUL, RESULT, read_evidence  # noqa: E402
from launch.predict.seconds_margins import CLASSES, COMPILED, FILE, class_of  # noqa: E402
from launch.probe import cards  # noqa: E402

RESULTS = CODE / "benchmarks" / "results" / f"{RESULT}.json"
FEWEST = 6  # trainings that make a margin
_SHARE = 0.9  # of them, that the margin holds
HEADING = """\
# Measured over predicted seconds of a step, by class of cards: what nine trainings in ten lie in.
# scripts/render_margins.py makes this file from benchmarks/results/seconds_of_cards.json.
"""


def factors() -> dict[str, list[float]]:
    """Measured over predicted seconds of the trainings on each class of cards, and of its compiled
    ones; those that wait for launches count, doubtful ones do not."""
    of_case = {row["id"]: row["card"] for row in read_evidence()["rows"] if "card" in row}
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    by_class: dict[str, list[float]] = {
        name + kind: [] for name in CLASSES for kind in ("", COMPILED)
    }
    for row in rows:
        name = class_of(cards.by_words(of_case[row["case"]]).name)
        if name and "ratio" in row and row["class"] != DOUBTFUL:
            kind = COMPILED if row["class"] == "compiled" else ""
            by_class[name + kind].append(1 / row["ratio"])
    return by_class


def margin(measured: Sequence[float]) -> tuple[float, float]:
    """The narrowest factors that hold the prediction itself and _SHARE of these."""
    ordered = sorted(measured)
    count = math.ceil(_SHARE * len(ordered))
    windows = (ordered[start : start + count] for start in range(len(ordered) - count + 1))
    spans = [(min(window[0], 1.0), max(window[-1], 1.0)) for window in windows]
    least, most = min(spans, key=lambda span: span[1] / span[0])
    return math.floor(100 * least) / 100, math.ceil(100 * most) / 100


def text(by_class: Mapping[str, Sequence[float]]) -> str:
    """The whole file."""
    return HEADING + "".join(_lines(by_class))


def _lines(by_class: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for name, measured in by_class.items():
        if len(measured) >= FEWEST:
            least, most = margin(measured)
            yield f"{name}: {{trainings: {len(measured)}, least: {least}, most: {most}}}\n"


if __name__ == "__main__":
    FILE.write_text(text(factors()), encoding="utf-8")
