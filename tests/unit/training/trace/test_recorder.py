"""Operators as they are recorded: their work, and the way in which their tensors differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from launch.schema.recorded_step import Operator
from training.trace.recorder import Recorder

ROWS, COLUMNS = 64, 32


@pytest.fixture(autouse=True)
def on_fake_tensors() -> Iterator[None]:
    with FakeTensorMode():
        yield


def operators(run: Callable[[], Any]) -> list[Operator]:
    recorder = Recorder(batch=1)
    recorder.mark("forward:0")
    with recorder:
        run()
    return [recorder.log.operators[call.operator] for call in recorder.log.calls]


def form_of(run: Callable[[], Any]) -> str:
    return next(each.form for each in operators(run) if each.kind == "other")


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=dtype)


def test_a_kernel_says_how_its_tensors_differ():
    own, row, half = matrix(), torch.empty(COLUMNS), matrix(torch.bfloat16)
    turned = torch.empty(COLUMNS, ROWS).t()
    assert form_of(lambda: own + own) == form_of(lambda: own * 2) == ""
    assert form_of(lambda: own + row) == "broadcast"
    assert form_of(lambda: half.float()) == form_of(lambda: own + half) == "cast"
    assert form_of(lambda: own + turned) == "strided"
    assert form_of(lambda: turned + turned) == ""  # the same order in memory
    wide = torch.empty(ROWS, 2 * COLUMNS)
    assert form_of(lambda: wide[:, ::2] + wide[:, ::2]) == "strided"


def test_a_view_that_torch_calls_unsafe_is_a_view():
    own = matrix()
    (only,) = operators(lambda: torch.ops.aten._unsafe_view(own, (COLUMNS, ROWS)))
    assert (only.kind, only.launches) == ("view", 0)


def test_attention_that_looks_at_no_later_position_computes_half():
    heads = torch.empty(2, 4, 128, 64)

    def flops(**how: bool) -> float:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (only,) = operators(lambda: attend(heads, heads, heads, 0.0, **how))
        return sum(only.flops)

    assert flops(is_causal=False) == 2 * 2 * (2 * 4 * 128 * 128 * 64)
    assert flops(is_causal=True) == flops() / 2


def test_documents_that_follow_one_another_compute_half_too():
    rows, starts = torch.empty(256, 4, 64, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)

    def flops(window: tuple[int, int]) -> float:
        def attend() -> None:
            varlen.varlen_attn(rows, rows, rows, starts, starts, 128, 128, window_size=window)

        return sum(sum(each.flops) for each in operators(attend) if each.kind == "attention")

    assert flops((-1, 0)) == flops((-1, -1)) / 2 > 0
