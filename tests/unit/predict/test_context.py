"""Bytes outside torch's allocator, by card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.predict.memory.context import DEFAULT_BYTES, NAMED, SIZED, context_bytes
from launch.schema.machine import GIB, MIB, NOT_MEASURED, CardFigures
from tests.builders import gpu

FILE = Path(__file__).parents[2] / "data" / "gpu" / "measured.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))["outside_the_allocator_gib"]


def card(name: str, gib: float = 80.0):
    return replace(gpu(), name=name, total_bytes=int(gib * GIB))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['card']} {row['gib']}")
def test_each_measured_card_is_near_the_table(row):
    words, _, size = row["card"].rpartition(", ")
    gib = float((size or row["card"]).split()[0])
    name = "" if words.endswith("card") else f"NVIDIA {words}"
    predicted, source = context_bytes(card(name, gib), NOT_MEASURED)
    assert predicted / GIB == pytest.approx(row["gib"], abs=0.1)
    is_named = source != "assumed; doctor measures it"
    assert is_named == (gib != 79.25)  # of this card the message gives neither name nor class


def test_the_table_has_every_measured_row_once():
    figures = [figure for *_, figures in (*NAMED, *SIZED) for figure in figures]
    rows = [row["gib"] for row in MEASURED if row["card"] != "79.25 GiB"]
    assert sorted(figures) == sorted(rows)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 0.736),
        ("NVIDIA H200", 0.736),
        ("NVIDIA GH200 480GB", 0.736),
        ("NVIDIA A100-SXM4-80GB", 0.51),
        ("Tesla V100-SXM2-32GB", 0.37),
        ("NVIDIA A10G", 0.257),
        ("Tesla T4", 0.1275),
        ("NVIDIA GeForce RTX 5090", 0.487),
        ("NVIDIA RTX A1000", 0.5),  # no A100
        ("NVIDIA T400", 0.5),
        ("NVIDIA RTX A6000", 0.5),
    ],
)
def test_a_card_is_known_by_its_name(name, gib):
    assert context_bytes(card(name), NOT_MEASURED)[0] == int(gib * GIB)


def test_a_card_that_nobody_measured_has_the_default():
    amd = replace(gpu(), vendor="amd", name="AMD Radeon AI PRO R9700", total_bytes=12 * GIB)
    assert context_bytes(amd, NOT_MEASURED)[0] == DEFAULT_BYTES["amd"]


@pytest.mark.parametrize("verb", ["doctor", "selfcheck"])
def test_what_was_measured_of_this_card_comes_first(verb):
    measured = CardFigures("NVIDIA H200", 300 * MIB, verb)
    source = f"measured here by {verb}"
    assert context_bytes(card("NVIDIA H200"), measured) == (300 * MIB, source)
    assert context_bytes(card("NVIDIA A100-PCIE-40GB"), measured)[0] == int(0.51 * GIB)
