"""Frozen weights of a folder stay views of its files on CPUs, on each of two ranks; beside weights
of 4 bits nothing is mapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stopping
from tests.modes.test_added_tokens import base_folder

# (bytes of frozen weights, those inside a mapped file, mapped files) of a rank in a step
LOOK = """
import json, re
maps = [
    (int(start, 16), int(end, 16), file)
    for start, end, file in re.findall(
        r"^(\\w+)-(\\w+) .* (\\S+\\.safetensors)$", open("/proc/self/maps").read(), re.MULTILINE
    )
]
frozen = [part for part in args[0].model.parameters() if not part.requires_grad]
mapped = [
    part.nbytes
    for part in frozen
    if any(start <= part.data_ptr() < end for start, end, _ in maps)
]
rank = os.environ.get("RANK", "0")
with open(os.path.join(os.environ["PYTHON_FAULT_MARKS"], f"seen-{rank}.json"), "w") as file:
    json.dump([sum(part.nbytes for part in frozen), sum(mapped), len(maps)], file)
"""
STEP = {"module": "training.loop.trainer", "attribute": "LowMemTrainer.training_step"}


def seen(folder: Path, **sections: Any) -> list[list[int]]:
    base = base_folder(folder / "base", tied=True)
    recipe = builders.recipe(
        folder,
        model={"shape": None, "path": str(base)},
        training={"max_steps": 2},
        lora={"r": 4},
        **sections,
    )
    faults = stopping.injecting(folder, look={**STEP, "do": LOOK})
    done = builders.launch(folder / "workspace", "run", str(recipe), **faults)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted((folder / "marks").glob("seen-*"))]


@pytest.mark.modes
def test_frozen_weights_are_views_of_the_file_in_both_ranks(tmp_path):
    ranks = seen(tmp_path, launch={"mode": "multi_cpu", "num_processes": 2})
    assert len(ranks) == 2
    for frozen, mapped, files in ranks:
        assert frozen == mapped > 0
        assert files > 0


def test_beside_weights_of_4_bits_no_file_stays_mapped(tmp_path):
    ((frozen, mapped, files),) = seen(
        tmp_path, launch={"mode": "cpu"}, quantization={"load_in_4bit": True}
    )
    assert frozen > 0
    assert (mapped, files) == (0, 0)
