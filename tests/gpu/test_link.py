"""The real collective over real NCCL, and the whole search where there are several cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launch.probe import link_ranks, link_test, machine
from tests import builders

COUNT = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(COUNT == 0, reason="no GPU that torch can use")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("world_size", range(1, max(1, COUNT) + 1))
def test_a_real_all_reduce_on_cards_is_correct_and_measured(tmp_path, backend, world_size):
    argv = [*link_test.COLLECTIVE, "--backend", backend, "--device", "cuda"]
    environment = {**os.environ, "PYTHONPATH": str(builders.CODE)}
    limits = link_ranks.Limits(total_s=120.0, start_s=90.0, try_s=30.0)
    deadline = time.monotonic() + limits.total_s
    ended = link_ranks.run(argv, environment, world_size, limits, deadline, Path("/dev/shm"))
    assert ended.how == "done", ended.output
    (result,) = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert (result["backend"], result["world_size"]) == (backend, world_size)
    assert result["flops_per_s"] > 1e12
    assert (result["bus_bytes_per_s"] > 1e8) is (world_size > 1)
    assert (result["nccl"] is not None) is (backend == "nccl")


@pytest.mark.skipif(COUNT < 2, reason="one card has no link")
def test_the_search_finds_a_link_between_the_cards_of_this_machine(tmp_path):
    found = link_test.link(machine.machine(), COUNT, tmp_path, os.environ)
    assert found.backend is not None, link_test.lines(found)
    assert (found.bytes_per_s or 0) > 1e8
    assert sum(attempt.seconds for attempt in found.tries) < 60


def test_doctor_ends_with_0_on_a_machine_that_trains(tmp_path):
    argv = [sys.executable, "-m", "launch", "doctor"]
    done = subprocess.run(
        argv, env=builders.environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "link: " in done.stdout
    assert ("not tested" in done.stdout) is (COUNT < 2)
