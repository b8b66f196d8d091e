"""torch.distributed over two hosts of the harness: what works here by hand must work under our launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests import hosts

RANK = """
import torch
from torch import distributed

distributed.init_process_group("gloo")  # a TCPStore at MASTER_ADDR
total = torch.tensor([distributed.get_rank() + 1.0])
distributed.all_reduce(total)
print(total.item(), flush=True)
distributed.destroy_process_group()
"""


def test_gloo_sums_over_the_cable():
    if why := hosts.missing():
        pytest.skip(why)
    began = time.monotonic()
    with hosts.pair() as pair:
        ranks = []
        for rank, host in enumerate(pair):
            world = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": pair[0].address, "MASTER_PORT": "29500"}
            ranks.append(
                host.popen(
                    [sys.executable, "-c", RANK],
                    env={**os.environ, **world, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [rank.communicate(timeout=60)[0].splitlines()[-1] for rank in ranks]
    assert said == ["3.0", "3.0"]
    assert time.monotonic() - began < 60
