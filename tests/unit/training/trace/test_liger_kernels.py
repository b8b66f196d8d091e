"""A kernel of Liger's is recorded with what it moves and what it needs beside its arguments."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.predict.time.operators import TRITON, TRITON_OPERATORS, cost_of
from launch.predict.time.rates import UNKNOWN, HostPace
from launch.schema.recorded_step import BATCH, Log
from training.compat.torch_private import FakeTensorMode
from training.trace.cuda_semantics import Target
from training.trace.recorder import Recorder
from training.trace.stand_ins import liger_kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")

WIDTH, FLOAT = 64, 4


def recorded(function: str, *shapes: tuple[int, ...], more: tuple[Any, ...] = ()) -> Log:
    """The log of one of Liger's functions on an H100, forward and backward."""
    from liger_kernel import ops

    recorder = Recorder()
    with FakeTensorMode(), liger_kernels(recorder, Target("9.0")):
        inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
        with recorder:
            recorder.mark("forward:0")
            out = getattr(ops, function).apply(*inputs, *more)
            recorder.mark("backward:0")
            out.sum().backward()
    return recorder.settle()


def sample_rows(log: Log) -> dict[str, float]:
    """Rows of a sample that each kernel reads or writes."""
    kernels = [operator for operator in log.operators if operator.name.startswith(TRITON)]
    return {each.name.removeprefix(TRITON): each.bytes[1] // (WIDTH * FLOAT) for each in kernels}


def test_a_kernel_that_writes_what_it_has_read_counts_twice():
    shape = (BATCH, WIDTH)
    log = recorded("LigerSiLUMulFunction", shape, shape)
    # gate, up and their product; the gradient, and gate and up that become theirs
    assert sample_rows(log) == {"_swiglu_forward_kernel": 3, "_swiglu_backward_kernel": 5}


def test_the_sums_of_a_norms_weight_have_a_row_for_each_multiprocessor():
    log = recorded("LigerRMSNormFunction", (BATCH, WIDTH), (WIDTH,), more=(1e-6,))
    assert sample_rows(log) == {"_rms_norm_forward_kernel": 2, "_rms_norm_backward_kernel": 3}
    sums = [block for block in log.blocks if block.op == f"{TRITON}_rms_norm_backward_kernel"]
    assert [block.fixed_bytes for block in sums] == [131 * WIDTH * FLOAT]  # beside the traced row


def test_a_launch_takes_as_long_as_several_operators_of_the_host():
    pace = replace(UNKNOWN, host=HostPace(1e-5, 1e-5, 1e-6, 1e-6))
    log = recorded("LigerSiLUMulFunction", (BATCH, WIDTH), (BATCH, WIDTH))
    host_s = {each.name: cost_of(pace, 1, 0, 1.0)(each).host_s for each in log.operators}
    assert host_s["aten::empty_like"] == pytest.approx(1e-5)
    assert host_s[f"{TRITON}_swiglu_forward_kernel"] == pytest.approx(1e-5 * TRITON_OPERATORS)
