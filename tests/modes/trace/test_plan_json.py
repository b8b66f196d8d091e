"""`python -m launch plan --json` for scripts: every recipe on every described machine, read by the
dataclasses that write it and by the keys of docs/plan.schema.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from launch.base.files import to_json
from launch.schema.plan import Plan
from tests import builders

CONFIGS = builders.CODE / "configs"
RECIPES = sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yaml"))
MACHINES = sorted(path.stem for path in (CONFIGS / "machines").glob("*.yaml"))
SCHEMA = json.loads((builders.CODE / "docs" / "plan.schema.json").read_text(encoding="utf-8"))


def quickly(recipe: str, machine: str) -> bool:
    """True if a plan is in the quick set; the others trace for minutes."""
    return recipe == "sft_fast" or (recipe == "lora_sft" and machine == "a5000-16g")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [
        pytest.param(
            recipe, machine, marks=() if quickly(recipe, machine) else pytest.mark.campaign
        )
        for recipe in RECIPES
        for machine in MACHINES
    ],
)
def test_a_plan_in_json_follows_the_schema(recipe, machine, workspace):
    file = CONFIGS / "machines" / f"{machine}.yaml"
    words = ["plan", recipe, "--json", "--machine", str(file)]
    if recipe.startswith("pretrain"):  # whose files are the user's
        rows = workspace / "rows.jsonl"
        rows.write_text('{"text": "some words"}\n' * 64, encoding="utf-8")
        words += [f"--data.train_file={rows}", "--data.validation_file=null"]
    done = builders.launch(workspace, *words)
    if done.returncode != 0:
        assert (done.returncode, done.stdout) == (3, "")
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert "GiB" in line
        return
    document = json.loads(done.stdout)
    plan = TypeAdapter(Plan).validate_json(done.stdout, strict=True)
    assert document.keys() == set(SCHEMA["properties"]) == {*SCHEMA["required"], "facts"}
    facts = document.pop("facts")
    labels = [fact["label"] for fact in facts]
    assert labels[0] == "model"
    assert {"batch", "mode", "memory", "host RAM", "time"} <= set(labels)
    of_kernels = [fact["label"] for fact in facts if fact["group"] == "kernels"]
    assert of_kernels == [each["name"] for each in document["switches"]]
    assert json.loads(to_json(asdict(plan))) == document, "a key that the schema does not have"
    for key, name in (("phases", "DevicePhases"), ("host", "HostPhases")):
        assert document[key].keys() == set(SCHEMA["$defs"][name]["required"])
    _check_phases(plan)


def _check_phases(plan: Plan) -> None:
    """The parts of the run agree with each other and with the estimate, which is their highest."""
    phases, host, estimate = plan.phases, plan.host, plan.estimate
    assert phases.first_step
    assert phases.step
    assert phases.save
    assert plan.seconds_per_step
    assert phases.load
    assert (phases.evaluation is None) == (host.evaluation is None)
    parts = [part for name in asdict(phases) if (part := getattr(phases, name)) is not None]
    for part in parts:
        assert 0 < part.allocated_bytes <= part.reserved_bytes * 1.001
        assert part.device_bytes == part.reserved_bytes + estimate.outside_bytes
    assert max(part.device_bytes for part in parts) == (
        estimate.device_bytes - estimate.margin_bytes
    )
    # by tokens each part is that of the micro-batch that takes most in it
    if not plan.strategy.levers.batch_by_tokens:
        # after an evaluation blocks lie elsewhere, and other rests of segments belong to them
        again = phases.step.allocated_bytes
        assert phases.first_step.allocated_bytes <= again
        assert estimate.step_allocated_bytes <= again <= 1.002 * estimate.step_allocated_bytes
        assert max(part.allocated_bytes for part in parts) == estimate.allocated_bytes
    sums = [part.bytes for name in asdict(host) if (part := getattr(host, name)) is not None]
    assert max(sums) == estimate.host_bytes
    assert len(sums) == 5 + (host.evaluation is not None)
