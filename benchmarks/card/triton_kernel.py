"""Triton kernels that do next to nothing, for the host's seconds of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


# Triton compiles the source and finds the types of arguments, which are pointers and numbers
@triton.jit
def small(x, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) + 1)


@triton.jit
def wide(x, y, z, a, b, c, d, e, f, g, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # noqa: ANN001, ANN201
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(y + offsets) + tl.load(z + offsets) + a + b + c + d + e + f + g)


heuristic = triton.heuristics({"BLOCK": lambda arguments: 8})(small)


def small_launch(x: torch.Tensor) -> Callable[[Any], object]:
    return lambda _: small[(1,)](x, BLOCK=8)


def wide_launch(x: torch.Tensor) -> Callable[[Any], object]:
    return lambda _: wide[(1,)](x, x, x, 1, 2, 3, 4, 5, 6, 7, BLOCK=8, WIDE=True, num_warps=4)


def heuristic_launch(x: torch.Tensor) -> Callable[[Any], object]:
    return lambda _: heuristic[(1,)](x)
