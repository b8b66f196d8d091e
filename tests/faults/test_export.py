"""A folder that is not the model that was trained ends the run, and the same line mends it."""

from __future__ import annotations

import json

import pytest

from launch.base.errors import ExportError
from tests import builders, stopping

# doubles a matrix in the exported file, as a fault of the disk or of a library could
DAMAGE = """
from safetensors.torch import load_file, save_file
file = args[0] / 'model.safetensors'
weights = load_file(file)
weights['model.layers.0.mlp.up_proj.weight'] *= 2
save_file(weights, file, {'format': 'pt'})
"""


@pytest.mark.fast_faults
def test_a_damaged_export_ends_with_its_code_and_the_same_line_writes_and_checks_it_again(tmp_path):
    recipe = builders.recipe(tmp_path, training={"max_steps": 2})
    place = {"module": "training.loop.export_check", "attribute": "check"}
    faults = stopping.injecting(tmp_path, damage={**place, "do": DAMAGE, "times": 1})
    done = builders.launch(tmp_path / "workspace", "run", str(recipe), **faults)
    assert done.returncode == ExportError.exit_code, done.stdout
    assert "its logits of a row differ from those of the trained model" in done.stdout
    assert "fix    do not use this folder; the same line again exports" in done.stdout
    said = json.loads((tmp_path / "model" / "lowmem.json").read_text())["check"]
    assert said.startswith("not checked: ") and "logits of a row" in said
    again = builders.launch(tmp_path / "workspace", "run", str(recipe), **faults)
    assert again.returncode == 0, again.stdout
    assert "all 2 steps had been trained" in again.stdout
    checked = json.loads((tmp_path / "model" / "lowmem.json").read_text())["check"]
    assert checked.startswith("ids of 45 rows, names and shapes of ")
    assert f"  checked    {checked}" in again.stdout
