"""Products of the experts of a mixture, torch's grouped_mm, on fake tensors.

Torch's own shapes of them take bfloat16 only. Its kernels take float32 and float16 too, group by
group, into one output. Source: create_grouped_gemm_output_tensor in ATen/native/GroupedMMUtils.h.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from training.compat.torch_private import FakeTensorMode, op_implementations_dict

aten = torch.ops.aten
_GROUPED_MM = aten._grouped_mm.default
_ALIGNMENT_BYTES = 16  # alignment of the rows that a kernel of CUDA writes


@contextmanager
def grouped_products(on_nvidia: bool) -> Iterator[None]:
    """Inside, experts of any type of weights can be traced."""

    def grouped_mm(
        fake_mode: FakeTensorMode,
        operator: Any,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dtype = out_dtype or mat_a.dtype
        *rows, width = _output_sides(mat_a, mat_b, offs)
        aligned = _ALIGNMENT_BYTES // dtype.itemsize if on_nvidia else 1
        padded = -(-width // aligned) * aligned
        strides = (rows[-1] * padded, padded, 1) if len(rows) == 2 else (padded, 1)
        with fake_mode:
            return torch.empty_strided((*rows, width), strides, dtype=dtype, device=mat_a.device)

    op_implementations_dict[_GROUPED_MM] = grouped_mm
    try:
        yield
    finally:
        del op_implementations_dict[_GROUPED_MM]


def _output_sides(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None
) -> tuple[int, ...]:
    """(rows, columns), or, with a matrix for each group, (groups, rows, columns)."""
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        return offs.shape[0], mat_a.shape[0], mat_b.shape[1]
    if mat_a.dim() == mat_b.dim():
        return mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]
    return mat_a.shape[-2], mat_b.shape[-1]
