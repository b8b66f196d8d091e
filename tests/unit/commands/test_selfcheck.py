"""The figures that a self-check keeps for later plans, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands.selfcheck import checks
from launch.commands.selfcheck.bench import Bench
from launch.commands.selfcheck.results import Finding, Results, lines, page
from launch.probe import import_memory
from launch.schema.machine import MIB, CardFigures

CARD = "NVIDIA GeForce RTX 3080"


def card_of(cache: Path) -> CardFigures:
    return import_memory.measured_or_assumed(cache, "cuda").card


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CardFigures(), CardFigures(CARD, 300 * MIB, "selfcheck")),
        (
            CardFigures(CARD, 200 * MIB, "doctor", 6e13, 12e9),
            CardFigures(CARD, 300 * MIB, "selfcheck", 6e13, 12e9),
        ),
        # a run that loads fewer kernels says nothing of the others
        (CardFigures(CARD, 310 * MIB), CardFigures(CARD, 310 * MIB)),
        (CardFigures("NVIDIA T4", 90 * MIB), CardFigures("NVIDIA T4", 90 * MIB)),
    ],
)
def test_the_largest_context_of_the_runs_is_kept(tmp_path: Path, before, after):
    import_memory.keep_card(tmp_path, before)
    checks.keep_context(Bench(tmp_path, tmp_path, 0.0), CARD, 300 * MIB)
    assert card_of(tmp_path) == after


def test_the_figures_of_imports_stay_when_a_card_is_kept(tmp_path: Path):
    before = import_memory.measured_or_assumed(tmp_path, "cuda")
    import_memory.keep_card(tmp_path, CardFigures(CARD, 300 * MIB))
    after = import_memory.measured_or_assumed(tmp_path, "cuda")
    assert (after.rank_bytes, after.reason) == (before.rank_bytes, before.reason)
    # a run on CPUs has no card
    assert import_memory.measured_or_assumed(tmp_path, "cpu").card == CardFigures()


def test_the_page_and_the_text_compare_the_context_and_the_whole_card():
    figures = {"context_bytes": [200 << 20, 300 << 20], "device_bytes": [4 << 30, 5 << 30]}
    finding = Finding("card", 1, 3.0, 0.0, figures)
    assert lines(finding)[1:] == [
        "  second step whole card predicted 4.00 GiB, measured 5.00 GiB (+25.0%)",
        "  a product   context    predicted 0.20 GiB, measured 0.29 GiB (+50.0%)",
    ]
    text = page(Results({"card": CARD}, (finding,)))
    for figure in ("whole card", "context"):
        assert f"<td>{figure}</td>" in text


def test_the_page_and_the_text_have_the_rates():
    found = Finding("card", 1, 3.0, 0.0, {"rates": {"copies to the card, GB/s": 12.345}})
    assert lines(found) == ["card: ok (3 s)", "  copies to the card, GB/s: 12.35"]
    text = page(Results({"card": CARD}, (found,)))
    assert "<td>copies to the card, GB/s</td><td>12.35</td>" in text
