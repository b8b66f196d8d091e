"""What a forked process has of its parent's weights and states."""

from __future__ import annotations

import subprocess
import sys

from tests import builders

MIB = 1 << 20
# Prints what a child holds alone after its parent has written to a tensor of 64 MiB.
FORKS = r"""
import os, re, sys
import torch
from training.loop import kept_from_workers

state, rows = (torch.ones(size << 20, dtype=torch.uint8) for size in (64, 2))
if sys.argv[1] == "kept":
    kept_from_workers.keep([state[1:], torch.ones(3)])
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


def held_by_child(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, how],
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_child_has_no_copy_of_what_is_kept_from_it():
    assert held_by_child("shared") > 64 * MIB
    assert held_by_child("kept") < 32 * MIB
