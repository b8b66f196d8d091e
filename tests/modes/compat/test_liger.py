"""With training.use_liger_kernel its kernels run, but for the loss, and the result is that of
transformers' modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from launch.predict.models.model_families import COMMITTED
from scripts import render_families
from tests.builders import CODE

STEPS = 2
NORM, ROPE, SWIGLU, GEGLU = (
    "_rms_norm_forward_kernel",
    "_triton_rope",
    "_swiglu_forward_kernel",
    "_geglu_tanh_forward_kernel",
)
TYPES = {
    "llama": {NORM, ROPE, SWIGLU},
    "gemma2": {NORM, ROPE, GEGLU},
    "qwen3_moe": {NORM, ROPE},
    "glm4": {NORM, SWIGLU},
    "olmo2": {NORM, ROPE, SWIGLU},
    "phi3": {NORM, ROPE, SWIGLU},
}


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


def test_the_committed_kernels_are_those_of_the_installed_version():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["liger_kernel"]
    assert committed[version("liger-kernel")] == render_families.liger_kernels()


def test_steps_are_those_of_transformers_modules_and_their_record_has_all_that_they_take():
    """Longer: TRITON_INTERPRET=1 python -m tests.modes.compat.liger_on_cpu 50 llama gemma2 ..."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.modes.compat.liger_on_cpu", str(STEPS), *TYPES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=CODE,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {name: result for line in lines for name, result in line.items()}
    assert list(results) == list(TYPES)
    for name, result in results.items():
        without, with_liger = result["losses"]
        assert with_liger == pytest.approx(without, abs=1e-5)
        assert result["largest difference of weights"] < 1e-5
        assert TYPES[name] <= set(result["kernels"])
        recorded = {kernel: STEPS * n for kernel, n in result["recorded kernels"].items()}
        assert result["kernels"] == recorded
        assert result["saved"] == result["recorded saved"]
    assert results["llama"]["recorded peak"] == pytest.approx(results["llama"]["peak"], rel=1e-3)
