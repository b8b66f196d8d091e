"""Two of the plans of `make fit-levers`, as far as an uninterrupted run shows them: bytes, and
logits that plain transformers and peft compute."""

from __future__ import annotations

import pytest

from benchmarks import fit_levers
from tests import builders

pytestmark = pytest.mark.modes


@pytest.mark.parametrize(("plan", "ranks"), [("70b, 2 x RTX 3090", 2), ("32,768 tokens", 1)])
def test_a_plan_that_is_scaled_down_holds_what_is_predicted_and_exports(
    tmp_path, monkeypatch, plan, ranks
):
    (row,) = (row for row in fit_levers.ROWS if plan in row.name)
    for name in ("LOWMEM_ROOT", *fit_levers.ONE_THREAD, *builders.TRACES):
        monkeypatch.setenv(name, "")  # on_cpu() sets them
    found = fit_levers.on_cpu(row, ranks, tmp_path / "run", is_killed=False)
    assert found["logits_off"] <= fit_levers.MOST_LOGITS_OFF
