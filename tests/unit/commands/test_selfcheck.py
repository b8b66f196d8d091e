"""The figures that a self-check keeps for later plans, and its page."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.base.errors import ResourceError
from launch.base.files import write_json
from launch.commands.selfcheck import checks, verb
from launch.commands.selfcheck.bench import Bench, outside
from launch.commands.selfcheck.verb import Finding, Results, html, lines
from launch.probe import import_memory
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import MIB, CardFigures
from launch.schema.plan import PAGED, Peak
from tests.builders import machine, plan, recipe_of

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


@pytest.mark.parametrize(
    ("on", "parts"), [(machine(1), {PAGED: 1 << 20}), (machine(2), {"weights": 1 << 20})]
)
def test_paged_states_and_communicators_are_no_part_of_a_context(tmp_path: Path, on, parts):
    planned = plan(on=on)
    estimate = replace(planned.estimate, peak=Peak("optimizer", "adam", parts))
    run = RunDir.create(tmp_path, "tiny", datetime(2026, 1, 1))
    run.write_plan(recipe_of(), replace(planned, estimate=estimate))
    assert outside(run) is None


def test_a_run_has_begun_once_the_plan_of_its_attempt_is_there(tmp_path: Path):
    run = RunDir.create(tmp_path, "tiny", datetime(2026, 1, 1))
    attempt = run.new_attempt()
    looks: list[int] = []

    def attempts() -> list[AttemptDir]:
        looks.append(1)
        if len(looks) == 3:
            write_json(attempt.plan_file, asdict(plan()))
        return run.attempts()

    child = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), attempts=attempts)
    bench = Bench(tmp_path, tmp_path, deadline=math.inf)
    assert checks.begun(bench, child).read_plan() == plan()
    assert len(looks) == 3


def test_the_figures_of_imports_stay_when_a_card_is_kept(tmp_path: Path):
    before = import_memory.measured_or_assumed(tmp_path, "cuda")
    import_memory.keep_card(tmp_path, CardFigures(CARD, 300 * MIB))
    after = import_memory.measured_or_assumed(tmp_path, "cuda")
    assert (after.rank_bytes, after.reason) == (before.rank_bytes, before.reason)
    # a run on CPUs has no card
    assert import_memory.measured_or_assumed(tmp_path, "cpu").card == CardFigures()


def test_the_page_and_the_text_compare_the_context_the_whole_card_host_ram_and_seconds():
    figures = {"context_bytes": [200 << 20, 300 << 20], "device_bytes": [4 << 30, 5 << 30]}
    figures |= {"host_peak_bytes": [2 << 30, 3 << 30], "seconds_per_step": [0.02, 0.0383]}
    finding = Finding("card", 1, 3.0, 0.0, figures)
    assert lines(finding)[1:] == [
        "  second step whole card predicted 4.00 GiB, measured 5.00 GiB (+25.0%)",
        "  whole run   host RAM   predicted 2.00 GiB, measured 3.00 GiB (+50.0%)",
        "  a product   context    predicted 0.20 GiB, measured 0.29 GiB (+50.0%)",
        "  seconds a step: predicted 0.0200, measured 0.0383",
    ]
    text = html(Results({"card": CARD}, (finding,)))
    for figure in ("whole card", "context", "host RAM"):
        assert f"<td>{figure}</td>" in text


def test_the_page_and_the_text_have_the_rates():
    found = Finding("card", 1, 3.0, 0.0, {"rates": {"copies to the card, GB/s": 12.345}})
    assert lines(found) == ["card: ok (3 s)", "  copies to the card, GB/s: 12.35"]
    text = html(Results({"card": CARD}, (found,)))
    assert "<td>copies to the card, GB/s</td><td>12.35</td>" in text


def test_a_check_that_cannot_run_here_has_a_reason_and_is_no_failure():
    lacking = [
        replace(checks.Check("flash", 3, 60, dict), package="no_such_package"),
        replace(checks.Check("link", 2, 60, dict), cards=2),
    ]
    reasons = ["the package no_such_package is not installed", "it needs 2 cards, and there is 1"]
    assert [verb.lacks(check, machine(1)) for check in lacking] == reasons
    assert verb.lacks(lacking[1], machine(2)) == ""

    finding = Finding("flash", 3, 0.1, 0.0, not_available=reasons[0])
    assert lines(finding) == [f"flash: not available: {reasons[0]}"]
    results = Results({}, (finding, Finding("40 steps", 2, 9.0, 0.0)))
    assert results.names() == {"40 steps"}  # it is tried again
    assert f"not available: {reasons[0]}" in html(results)
    assert 'class="bad"' not in html(results)


def test_a_folder_that_no_selfcheck_wrote_is_left_alone(tmp_path: Path):
    folder, cache = tmp_path / "selfcheck", tmp_path / ".cache"
    theirs = folder / "runs" / "mine" / "1" / "checkpoints" / "a.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(ResourceError, match="holds files that no selfcheck wrote; move it away"):
        Bench(folder, cache, deadline=math.inf).prepare()
    assert theirs.read_text() == "mine"
    folder.rename(tmp_path / "moved")
    for _ in range(2):
        Bench(folder, cache, deadline=math.inf).prepare()
    assert (folder / "rows.jsonl").is_file()
