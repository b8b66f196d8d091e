"""Buffers that kernels allocate inside an operator, beside their prediction: the host's part of a
kernel decides their sizes, so they are real without a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.predict.memory.partial_sums import partial_sums_bytes
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

SHAPES = [
    (rows, columns)
    for rows in (7, 200, 256, 777, 1024, 2000, 4096, 30000)
    for columns in (64, 100, 768, 770, 1023, 3072, 11008, 32000)
    if rows * columns < 1 << 29  # above 2 GiB PyTorch sums halves
]
PROGRAM = """
import json, sys, torch

def inside(rows, columns, dtype, operator):
    tensor = torch.empty(rows, columns, dtype=dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = operator(tensor, 0)
    after = torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated() - after

card = torch.cuda.get_device_properties(0)
of_card = [card.multi_processor_count, card.max_threads_per_multi_processor]
sizes = [
    [inside(*shape, dtype, operator) for shape in json.loads(sys.argv[1])]
    for dtype in (torch.float32, torch.bfloat16)
    for operator in (torch.sum, torch.mean)
]
print(json.dumps([of_card, sizes]))
"""


@pytest.mark.parametrize("multiprocessors", [16, 108])
def test_partial_sums_are_those_of_pytorch(tmp_path: Path, multiprocessors):
    place = Workplace(tmp_path, Card("NVIDIA A100-SXM4-80GB", 80, "8.0", multiprocessors))
    argv = [sys.executable, "-c", PROGRAM, json.dumps(SHAPES)]
    done = subprocess.run(argv, env=place.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_card, measured = json.loads(done.stdout.splitlines()[-1])
    assert of_card[0] == multiprocessors
    predicted = [partial_sums_bytes(*shape, *of_card) for shape in SHAPES]
    assert sum(size > 0 for size in predicted) > 10
    for of_operator in measured:
        assert [size > 0 for size in of_operator] == [size > 0 for size in predicted]
        # whole blocks, and beside them counters
        assert of_operator == pytest.approx(predicted, abs=2048)
