"""Rates of a card: rows that are kept whatever fails, and the table that they become."""

from __future__ import annotations

import time

import pytest

from benchmarks.card import report
from benchmarks.card.rows import Group, Rows, attempted, read
from benchmarks.card_rates import chosen_groups, measure

pytestmark = pytest.mark.unit

ROWS = [
    {
        **{"group": "circumstances", "case": "host", "date": "2026-11-27", "processor": "a CPU"},
        **{"cores": 16, "ram_bytes": 128 << 30, "python": "3.12.3", "torch": "2.11.0+cu130"},
        **{"cuda": "13.0", "versions": {"torch": "2.11.0", "triton": "3.6.0"}},
    },
    {"group": "circumstances", "case": "card", "name": "NVIDIA H200", "cudnn": 91900},
    {"group": "circumstances", "case": "nvidia-smi name", "driver_version": "580.1"},
    *(
        {
            **{"group": "products", "case": f"bfloat16 4096x896x{outer} forward", "s": 1e-5},
            **{"dtype": "bfloat16", "kind": "layers", "tflops": tflops},
        }
        for outer, tflops in ((896, 500.0), (4864, 700.0), (128, 90.0))
    ),
    {
        **{"group": "elementwise", "case": "add bf16 bf16 16384x4096", "kind": "plain"},
        **{"bytes": 402653184, "gb_s": 4200.0, "s": 9.6e-5},
    },
    {"group": "calls", "case": "add", "s": 4.2e-6, "processor_s": 4.1e-6},
    {"group": "attention", "case": "cudnn causal", "error": "RuntimeError: no kernel"},
    {"group": "products", "case": "clocks and power", "sm_mhz": [1200.0, 1755.0, 1980.0]},
]


def one(case: str):
    yield {"case": case, "s": 1 / 3}


def failing():
    yield {"case": "first", "s": 1.0}
    raise RuntimeError("the card\nis lost")


def endless():
    while True:
        yield {"case": "again", "s": 0.0}
        time.sleep(0.01)


def test_a_group_that_fails_leaves_an_error_and_the_others_go_on(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", is_rehearsal=False)
    groups = [Group("bad", 5, failing), Group("good", 5, lambda: one("only"))]
    measure(groups, rows, 70)
    written = read(rows.path)
    assert [(row["group"], row["case"]) for row in written] == [
        *(("bad", "first"), ("bad", "after first"), ("bad", "group")),
        *(("good", "only"), ("good", "group")),
    ]
    assert written[1]["error"] == "RuntimeError: the card is lost"
    assert "test_card_rates.py" in written[1]["where"]
    assert not written[2]["complete"] and written[4]["complete"]
    assert written[3]["s"] == 0.333333
    assert rows.num_errors == 1


def test_a_group_is_cut_off_at_its_share_of_the_seconds_and_a_late_one_is_named(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", is_rehearsal=True)
    measure([Group("long", 700, endless), Group("late", 5, lambda: one("only"))], rows, 0.1)
    *again, group, late = read(rows.path)
    assert {row["case"] for row in again} == {"again"}
    assert not group["complete"] and group["last"] == "again"
    assert (late["group"], late["error"]) == ("late", "no time was left")
    assert late["rehearsal"]


def test_a_case_that_fails_keeps_its_fields():
    row = attempted({"case": "x", "sizes": [1]}, lambda: {"s": 1 / 0})
    assert row["sizes"] == [1] and row["error"] == "ZeroDivisionError: division by zero"


def test_rows_become_a_result_with_the_circumstances_of_the_card_s_machine():
    written = []
    name = report.record(ROWS, lambda *parts, **more: written.append((parts, more)))
    ((parts, more),) = written
    assert name == parts[0] == "card_rates_h200"
    assert parts[1] == {"rows": ROWS}
    lines = parts[2].splitlines()
    assert "| products | bfloat16 layers | 3 | 500 | 90 | 700 | TFLOP/s |" in lines
    assert "| elementwise | plain, large | 1 | 4200 | 4200 | 4200 | GB/s |" in lines
    assert "| add | 4.2 | 4.1 |" in lines
    assert "| attention | cudnn causal | RuntimeError: no kernel |" in lines
    assert "| products | 1200/1755/1980 |  |  |  |" in lines
    about = more["about"]
    assert about["machine"] == "a CPU, 16 cores, 128.0 GiB RAM, NVIDIA H200"
    assert about["versions"]["torch"] == "2.11.0+cu130" and about["versions"]["driver"] == "580.1"


def test_rows_of_a_rehearsal_are_no_result():
    with pytest.raises(SystemExit, match="rehearsal"):
        report.record([*ROWS, {"group": "calls", "case": "add", "rehearsal": True}])


def test_an_unknown_group_is_refused_with_the_names_of_all():
    with pytest.raises(SystemExit, match=r"no group rates; there are process, circumstances, "):
        chosen_groups("products,rates")
    assert [group.name for group in chosen_groups("products,floor")] == ["floor", "products"]
