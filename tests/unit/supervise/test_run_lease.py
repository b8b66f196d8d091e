"""The lease of a run follows what its ranks take."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from launch.plan.planner import Choice
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.schema.phases import DeviceMemory, DevicePhases
from launch.schema.result import SecondStep
from launch.supervise.run_lease import RunLease
from tests.builders import facts_of, gpu, machine, plan, recipe_of

pytestmark = pytest.mark.unit


def test_a_lease_is_the_plan_until_the_second_step_and_again_after_the_attempt(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path / "leases"))
    recipe, on = recipe_of(launch={"priority": 3}), machine(cards=(gpu(0, uuid="GPU-7"),))
    facts = facts_of(recipe, on)
    chosen = plan(recipe, on)
    save = DeviceMemory(1, 2, 3 << 20)
    estimate = replace(chosen.estimate, outside_bytes=1 << 18)
    chosen = replace(chosen, estimate=estimate, phases=DevicePhases(save=save))
    choice, run = Choice(facts, chosen), RunDir.create(tmp_path, "tiny", datetime.now())

    def record() -> dict[str, Any]:
        (file,) = (tmp_path / "leases").glob("*.lease")
        return json.loads(file.read_text())

    with ExitStack() as locks:
        lease = RunLease(tmp_path, print, locks)
        lease.hold_taken(choice, run, 5)  # without a lease nothing happens
        assert lease.take(choice, run, ()) == ""
        planned = record()
        assert (planned["state"], planned["cards"]) == ("granted", ["GPU-7"])
        assert planned["priority"] == 3
        assert planned["needs"]["card_bytes"] == chosen.estimate.device_bytes
        assert planned["needs"]["disk_bytes"] == 4 * chosen.checkpoint_bytes
        assert planned["taken"] == {"host_bytes": 0, "card_bytes": 0, "disk_bytes": 0}

        assert not lease.hold_taken(choice, run, 1 << 30)
        assert record()["taken"]["host_bytes"] == 1 << 30
        assert record()["needs"] == planned["needs"]

        lease.hold_measured(choice, SecondStep(1, 1 << 20, 2 << 30))
        assert record()["taken"]["card_bytes"] == (1 << 20) + (1 << 18)
        assert record()["needs"]["card_bytes"] == 3 << 20
        assert record()["taken"]["host_bytes"] == 2 << 30

        lease.hold_plan(choice, run)
        assert (record()["needs"], record()["taken"]) == (planned["needs"], planned["taken"])
    assert not list(Path(tmp_path / "leases").glob("*.lease"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_yields_when_its_user_asks_unless_other_machines_would_wait_for_it(
    tmp_path, monkeypatch, nodes
):
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path / "leases"))
    recipe, on = recipe_of(), machine()
    chosen, run = plan(recipe, on), RunDir.create(tmp_path, "tiny", datetime.now())
    launch = recipe.launch.model_copy(update={"nodes": nodes})
    facts = facts_of(recipe.model_copy(update={"launch": launch}), on)
    lines: list[str] = []
    with ExitStack() as locks:
        lease, choice = RunLease(tmp_path, lines.append, locks), Choice(facts, chosen)
        assert lease.take(choice, run, ()) == ""
        (file,) = (tmp_path / "leases").glob("*.lease")
        request = file.with_suffix(".asked")
        request.write_text('{"is_yielded": true}')
        assert lease.hold_taken(choice, run, 1 << 30) == (nodes == 1)
        assert leases.read_asked(file).is_yielded == (nodes == 1)  # else it is refused once
    assert lines == (
        [] if nodes == 1 else ["queue yield: a run of several machines cannot wait; it goes on"]
    )
