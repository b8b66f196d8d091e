"""A plan's own choice to compile, on a driver for which Triton builds no kernel: it has no shared
memory."""

from __future__ import annotations

import json
from pathlib import Path

from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

STEPS = 100_000  # compiling pays, and the run is cut off


def test_what_a_plan_compiles_is_left_out_where_that_fails(tmp_path: Path):
    place = Workplace(tmp_path, Card(name="NVIDIA H200", capability="9.0"))
    training = {"bf16": True, "max_steps": STEPS, "dataloader_num_workers": 0}
    recipe = str(builders.recipe(tmp_path, "gpt2-small", training=training))
    done = place.launch("run", recipe, "--launch.time_limit_s=90")
    said = done.stdout
    assert "or a compiled kernel failed (InductorError" in said, said + done.stderr
    assert "planning again without the compiled kernels that the plan chose" in said
    (file_of_plan,) = tmp_path.glob("workspace/runs/*/*/plan.json")
    levers = json.loads(file_of_plan.read_text(encoding="utf-8"))["strategy"]["levers"]
    assert not levers["torch_compile"]
    assert "is kept" in said, said
