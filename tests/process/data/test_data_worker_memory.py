"""Memory of a forked process whose parent writes to its states."""

from __future__ import annotations

import subprocess
import sys

from tests import builders

MIB = 1 << 20
# Prints the private bytes of a child after its parent has written to a tensor of 64 MiB, and of
# another one for which the tensor is excluded.
FORKS = r"""
import os, re
import torch
from training.loop import rank_memory

for is_excluded in (False, True):
    state, rows = (torch.ones(size << 20, dtype=torch.uint8) for size in (64, 2))
    if is_excluded:
        rank_memory.exclude_from_forks([state[1:], torch.ones(3)])
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.read(reads, 1)
        assert bytes(rows.numpy()) == bytes([1]) * (2 << 20)
        (size,) = re.findall(r"Private_Dirty: +(\d+) kB", open("/proc/self/smaps_rollup").read())
        print(int(size) << 10, flush=True)
        os._exit(0)
    state.fill_(2)
    os.write(writes, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert int(state.sum()) == 2 * (64 << 20)
"""


def test_a_child_has_no_copy_of_excluded_tensors():
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shared, excluded = map(int, done.stdout.split())
    assert shared > 64 * MIB
    assert excluded < 32 * MIB
