"""Rates of this machine's cores, measured and kept."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from launch.data.worker import WORKER, MeasureCores, WorkerEnded
from launch.predict.history import core_figures
from launch.predict.time import rates
from launch.schema.machine import CoreFigures

ONE, BOTH = (replace(each, call_s={}) for each in vars(rates.cores_of_rank((), 2, 1)).values())


def answering(monkeypatch: pytest.MonkeyPatch, *figures: CoreFigures) -> list[MeasureCores]:
    """The requests that the child with torch gets, which answers with these figures: how busy the
    machine is cannot be set. test_this_machine_is_measured_once has the real child."""
    requests: list[MeasureCores] = []

    def ask(request: MeasureCores, timeout_s: float) -> bytes:
        requests.append(request)
        return json.dumps([asdict(each) for each in figures]).encode()

    monkeypatch.setattr(WORKER, "ask", ask)
    return requests


def test_this_machine_is_measured_once(tmp_path):
    with WORKER:
        reply = WORKER.ask(MeasureCores((1, 2)))
        core_figures.measure(tmp_path, 2)
    one, both = TypeAdapter(list[CoreFigures]).validate_json(reply)
    assert (one.threads, both.threads) == (1, 2)
    for figures in (one, both):
        assert 1e9 < figures.flops_per_s["float32"] < 1e13
        assert {*figures.bytes_per_s} == {*ONE.bytes_per_s}
        assert 1e-7 < figures.view_s < figures.operator_s < 1e-3
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())["figures"]
    assert len(kept) in (2, 0)  # 0: other programs had the cores


def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    requests = answering(monkeypatch, ONE, BOTH)
    assert core_figures.kept_or_measured(tmp_path, 2) == (ONE, BOTH)
    assert core_figures.kept_or_measured(tmp_path, 2) == (ONE, BOTH)
    assert requests == [MeasureCores((1, 2))]
    assert core_figures.kept_or_measured(tmp_path, 4) and len(requests) == 2


def test_a_busy_machine_is_measured_again_later(tmp_path, monkeypatch):
    requests = answering(monkeypatch, ONE, replace(BOTH, core_share=0.85))
    assert core_figures.kept_or_measured(tmp_path, 2) == ()
    assert core_figures.kept_or_measured(tmp_path, 2) == () and len(requests) == 1
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    answering(monkeypatch, ONE, BOTH)
    assert core_figures.kept_or_measured(tmp_path, 2) == (ONE, BOTH)


def test_the_best_of_two_measurements_is_kept(tmp_path, monkeypatch):
    answering(monkeypatch, ONE, BOTH)
    core_figures.measure(tmp_path, 2)
    rates, calls = {**BOTH.flops_per_s}, {"bfloat16": 1e-5}
    faster = replace(BOTH, flops_per_s={**rates, "float32": 2 * rates["float32"]}, view_s=1e-9)
    answering(monkeypatch, ONE, replace(faster, operator_s=1.0, call_s=calls))
    _, both = core_figures.measure(tmp_path, 2)
    assert both == replace(faster, call_s=calls)
    answering(monkeypatch, ONE, replace(faster, operator_s=0.0, core_share=0.5))
    assert core_figures.measure(tmp_path, 2)[1] == both


def test_a_child_that_fails_leaves_the_assumed_figures(tmp_path, monkeypatch):
    def ask(request: MeasureCores, timeout_s: float) -> bytes:
        raise WorkerEnded("no torch")

    monkeypatch.setattr(WORKER, "ask", ask)
    assert core_figures.kept_or_measured(tmp_path / "traces", 2) == ()


def test_a_folder_that_keeps_nothing_costs_a_measurement_each_time(monkeypatch):
    requests = answering(monkeypatch, ONE, BOTH)
    for _ in range(2):
        assert core_figures.kept_or_measured(Path("/proc/1/nowhere"), 2) == (ONE, BOTH)
    assert len(requests) == 2
