"""With training.use_liger_kernel its kernels run, but for the loss, and the result is that of
transformers' modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch.predict.model_families import COMMITTED
from scripts import render_families

HERE = Path(__file__).parent
LAYERS, MICRO_STEPS, NORMS = 2, 4, 5  # of llama-tiny: two norms a layer and the last


pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux")


def test_the_committed_kernels_are_those_of_the_installed_version():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["liger_kernel"]
    assert committed[version("liger-kernel")] == render_families.liger_kernels()


def test_steps_with_its_kernels_are_those_without_and_the_loss_is_ours():
    done = subprocess.run(
        [sys.executable, str(HERE / "liger_on_cpu.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path]),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on"] == pytest.approx(found["off"], rel=1e-6)
    assert found["weights on"] == pytest.approx(found["weights off"], rel=1e-6)
    ran = found["kernels on"]
    assert found["kernels off"] == {}
    assert ran["_rms_norm_forward_kernel"] == NORMS * MICRO_STEPS
    assert ran["_swiglu_forward_kernel"] == LAYERS * MICRO_STEPS
    assert ran["_triton_rope"] == 2 * LAYERS * MICRO_STEPS  # and back
    assert not [name for name in ran if "entropy" in name]
