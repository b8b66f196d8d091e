"""Margins of predicted seconds: the file is made of the results, and each card finds its class."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import seconds_of_cards
from launch.predict import seconds_margins
from launch.probe import cards, described
from scripts import render_margins
from tests.builders import gpu

FACTORS = render_margins.factors()


def test_the_file_is_what_its_script_makes_of_the_results():
    assert seconds_margins.FILE.read_text(encoding="utf-8") == render_margins.text(FACTORS)


@pytest.mark.parametrize(
    "name", [name for name, measured in FACTORS.items() if len(measured) >= render_margins.FEWEST]
)
def test_nine_measured_trainings_in_ten_and_the_prediction_lie_in_a_margin(name):
    least, most = render_margins.margin(FACTORS[name])
    assert sum(least <= each <= most for each in FACTORS[name]) >= 0.9 * len(FACTORS[name])
    assert least <= 1 <= most


@pytest.mark.parametrize(
    ("measured", "span"),
    [
        ([0.5, 0.9, *[1.0] * 7, 1.5], (0.9, 1.5)),  # of ten the farthest counts nothing
        ([0.5, 0.9, *[1.0] * 6, 1.5], (0.5, 1.5)),  # of nine all count
        ([1.201] * 6, (1.0, 1.21)),
    ],
)
def test_a_margin_is_the_narrowest_rounded_outwards(measured, span):
    assert render_margins.margin(measured) == span


def test_five_trainings_make_no_margin():
    written = render_margins.text({"GeForce": [1.0] * 5, "A100 and A800": [1.0] * 6})
    assert "GeForce" not in written
    assert written.endswith("A100 and A800: {trainings: 6, least: 1.0, most: 1.0}\n")


def test_classes_of_cards_are_those_of_the_results():
    for row in seconds_of_cards.read_evidence()["rows"]:
        if "recipe" in row and (name := seconds_of_cards.class_of(row)) in seconds_margins.CLASSES:
            assert seconds_margins.class_of(cards.by_words(row["card"]).name) == name


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("RTX 3090", "GeForce"),
        ("RTX 4070 Ti SUPER", "GeForce"),
        ("RTX 4090 Laptop", None),  # its power is the laptop's
        ("RTX 5000 Ada", None),
        ("RTX A6000", None),  # no training that is not compiled was measured on such cards
        ("RTX A5000 Laptop", None),
        ("A100 SXM 80GB", "A100 and A800"),
        ("A10", None),
        ("H100 PCIe", "H100 and newer"),
        ("B200", "H100 and newer"),
        ("RX 7900 XTX", None),
    ],
)
def test_a_card_has_the_margin_of_its_class(words, name):
    margin = seconds_margins.of_cards(described.from_words(words, 2, 64).gpus)
    assert (margin and margin.cards) == name


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("RTX A6000", "RTX A and A40, compiled"),
        ("A100 SXM 80GB", "A100 and A800, compiled"),
        ("RTX 3090", "GeForce, not compiled"),  # of which few were compiled
        ("RTX A5000 Laptop", None),
    ],
)
def test_a_compiled_training_has_the_margin_of_compiled_ones_where_enough_were_measured(
    words, name
):
    margin = seconds_margins.of_cards(described.from_words(words, 1, 64).gpus, is_compiled=True)
    assert (margin and margin.cards) == name


def test_cards_of_two_classes_or_of_no_row_have_none():
    cards_of_two = (gpu(), replace(gpu(), name="A100"))
    assert seconds_margins.of_cards([gpu()]) is not None
    assert seconds_margins.of_cards(cards_of_two) is None
    assert seconds_margins.of_cards([replace(gpu(), name="RTX 3091")]) is None
