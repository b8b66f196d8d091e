"""Sizes of the buffers that CUDA kernels allocate inside an operator, where no dispatch mode sees
them: read in sources, not measured on a card.

Sizes are those of the traced batch, but for sums, whose buffers are a function of their rows. Where
a kernel takes another path for few tokens, they are an upper bound. Three small buffers are left
out: the split keys of memory-efficient backward with few heads (at most 200 tiles), the fp32
partial sums of layer_norm's weights above 65,536 tokens (4 MiB each, layer_norm_kernel.cu), and the
splits of flash forward with few heads.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from training.trace.cuda_semantics import HALF, Target

_KIB, MIB = 1 << 10, 1 << 20
_FEW_INDICES = 3072  # Embedding.cu: up to this number, one kernel without a sort
_REDUCED_CHUNK = 65536  # ForeachReduceOp.cu: elements that a block reduces
_WIDE_WORKSPACE = (9, 10, 12)  # Hopper; Blackwell since 2.12 (pytorch/pytorch pull 175344)
# compute capabilities, in kernels/cutlassB.h
_LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0))
# the multiprocessors of the card that has most of them, by compute capability
MULTIPROCESSORS = {
    **{(7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142},
    **{(9, 0): 132, (10, 0): 148, (12, 0): 188},
}
# threads of a multiprocessor: CUDA C++ Programming Guide, technical specifications
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
MOST_THREADS = 2048


def workspace(
    target: Target, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> list[int]:
    """Sizes in bytes of buffers that live while this operator runs, beside its arguments and
    results."""
    inside = INSIDE.get(name)
    return [size for size in inside(target, *args, **kwargs) if size] if inside else []


def summed(target: Target, name: str, args: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """(rows, columns, multiprocessors, threads) of a sum or mean over all dimensions but the last,
    whose kernel may have a buffer of partial sums; None: another operator, or another card's
    kernel."""
    if (
        name not in ("aten::sum", "aten::mean")
        or target.capability not in MULTIPROCESSORS
        or len(args) < 2
    ):
        return None
    tensor, dims = args[:2]
    columns = tensor.shape[-1] if tensor.dim() > 1 else 0
    if (
        not columns
        or not tensor.is_contiguous()
        or {dim % tensor.dim() for dim in dims or ()} != set(range(tensor.dim() - 1))
    ):
        return None
    threads = THREADS.get(target.capability, MOST_THREADS)
    return tensor.numel() // columns, columns, MULTIPROCESSORS[target.capability], threads


def cublas_workspace_bytes(architecture: str) -> int:
    """Bytes of the workspace that a handle of cuBLAS takes from the allocator at its first product,
    and keeps. Forward's thread has a handle, and autograd's thread has one.

    Source: parseChosenWorkspaceSize in CublasHandlePool.cpp. On CUDA cuBLASLt shares it; on ROCm it
    has a workspace of its own."""
    names, own_bytes = ["CUBLAS_WORKSPACE_CONFIG"], 0
    if architecture.startswith("gfx"):
        size = 128 * MIB if architecture.startswith(("gfx94", "gfx95")) else 32 * MIB
        names += ["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"]
        own_bytes = 76 * MIB
    else:
        is_wide = int(architecture.partition(".")[0]) in _WIDE_WORKSPACE
        size = 32 * MIB if is_wide else 8 * MIB + 128 * _KIB
    configured = next((os.environ[name] for name in names if name in os.environ), "")
    if pairs := re.findall(r":(\d+):(\d+)", configured):
        size = sum(int(kib) * _KIB * int(count) for kib, count in pairs)
    return size + own_bytes


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copied(grad: torch.Tensor) -> int:
    """Bytes of a copy of a gradient (batch, heads, seq, width), which is made unless its memory
    order is (batch, seq, heads, width)."""
    return 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes


def _flash_backward(
    target: Target,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *arguments: Any,
    **_: Any,
) -> list[int]:
    """mha_bwd in flash_attn/flash_api.cpp: softmax_d, dq_accum, and key and value gradients of
    every query head.

    On ROCm (mha_bwd of flash_attn/aot) dq_accum is missing. The package flash_attn has 128 rows
    between documents (mha_varlen_bwd)."""
    batch, heads, seq, width = query.shape
    rows = batch * heads * (seq + 128 * target.documents if target.documents else _up(seq, 128))
    grouped = (
        2 * batch * heads * key.shape[2] * width * query.element_size()
        if key.shape[1] != heads
        else 0
    )
    if target.capability is None:
        return [_copied(grad), batch * heads * seq * 4, grouped]
    return [_copied(grad), rows * 4, rows * _up(width, 32 if width <= 128 else 64) * 4, grouped]


def _varlen_backward(
    target: Target,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    *arguments: Any,
    **_: Any,
) -> list[int]:
    """mha_varlen_bwd in flash_attn/flash_api.cpp: as _flash_backward, of a row of documents with
    128 rows between them."""
    tokens, heads, width = query.shape
    rows = heads * (tokens + 128 * (len(starts) - 1) * target.documents)
    grouped = 2 * tokens * heads * width * query.element_size() if key.shape[1] != heads else 0
    copied = 0 if grad.is_contiguous() else grad.nbytes
    return [copied, rows * 4, rows * _up(width, 32 if width <= 128 else 64) * 4, grouped]


def _cudnn_backward(
    target: Target,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    **_: Any,
) -> list[int]:
    """CompositeSDPABackwardNode of cudnn-frontend: softmax_sum, dQ_accum, key and value gradients
    of every query head.

    The workspace of cuDNN's own plan is unknown and left out."""
    batch, heads, seq, width = query.shape
    grouped = batch * heads * key.shape[2] * (width + value.shape[-1]) * query.element_size()
    return [
        batch * heads * seq * 4,
        batch * heads * seq * width * 4,
        grouped if key.shape[1] != heads else 0,
    ]


def _efficient_forward(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> list[int]:
    """kNeedsOutputAccumulatorBuffer in mem_eff_attention/kernel_forward.h: the output of wide heads
    in fp32."""
    batch, heads, seq, _ = query.shape
    needed = target.capability is not None and query.dtype in HALF and value.shape[-1] > 128
    return [batch * heads * seq * value.shape[-1] * 4] if needed else []


def _efficient_backward(
    target: Target,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *arguments: Any,
    **_: Any,
) -> list[int]:
    """_efficient_attention_backward in attention_backward.cu; workspace_size in
    mem_eff_attention/kernel_backward.h."""
    batch, heads, seq, width = query.shape
    delta = batch * heads * seq * 4
    if target.capability is None:
        return [_copied(grad), delta]
    half = query.dtype in HALF
    rows, columns, widest = _tile(target.capability, half, max(width, value.shape[-1]))
    in_registers = half and widest <= rows  # kOutputInRF
    per_head = 0
    if target.capability >= (7, 0) or half:  # kNeedsAccumGradQ: of fp32, a lock and a counter
        tiles = _up(seq, rows) // rows * (_up(width, columns) // columns)
        per_head += tiles * (rows * columns * 4 + 16)
    if half and not in_registers:  # kNeedsAccumGradK, kNeedsAccumGradV, with one split of the keys
        per_head += columns * (_up(width, rows) + _up(value.shape[-1], rows)) * 4
    kernel = [delta, batch * heads * _up(per_head, 16)]
    # kKernelComputesDelta
    if half and (in_registers or target.capability[0] >= 8 or target.capability == (7, 5)):
        return [_copied(grad), *kernel]
    wide = 4 * grad.numel()  # grad.float() * out.float(), before the kernel's own buffers
    product = [wide, wide, wide, delta] if half else [wide, delta]
    return [_copied(grad), *max(product, kernel, key=sum)]


def _tile(capability: tuple[int, int], half: bool, width: int) -> tuple[int, int, int]:
    """kBlockSizeI, kBlockSizeJ, kMaxK of the first kernel in kernels/cutlassB.h that takes heads of
    this width."""
    if width <= 64:
        return 64, 64, 32 if width <= 32 else 64
    if half and width <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, 96
    has_large_shared_memory = capability in _LARGE_SHARED_MEMORY
    rows = 128 if has_large_shared_memory else 64
    columns = 128 if half and has_large_shared_memory and width <= 128 else 64
    return rows, columns, 128 if width <= 128 else 1 << 16


def _embedding_backward(
    target: Target,
    grad: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    *arguments: Any,
    **_: Any,
) -> list[int]:
    """embedding_dense_backward_cuda in Embedding.cu, embedding_backward_cuda_kernel in
    EmbeddingBackwardKernel.cu.

    Sorted and original indices, four arrays of segments, and an fp32 row per index. The sort's own
    buffers are smaller and freed before."""
    count = indices.numel()
    if count <= _FEW_INDICES:
        return []
    copied = 0 if grad.is_contiguous() else grad.nbytes
    return [copied, *[count * indices.element_size()] * 6, count * grad.shape[-1] * 4]


def _safe_softmax(target: Target, scores: torch.Tensor, *arguments: Any, **_: Any) -> list[int]:
    """_safe_softmax in attention.cpp: the softmax and a mask of the scores that are -inf, beside
    the result."""
    return [scores.nbytes, scores.numel()]


def _foreach_norm(
    target: Target, tensors: Sequence[torch.Tensor], *arguments: Any, **_: Any
) -> list[int]:
    """foreach_tensor_norm_cuda in ForeachReduceOp.cu: an fp32 sum for every tensor and every chunk
    of the longest tensor."""
    return (
        [4 * len(tensors) * -(-max(tensor.numel() for tensor in tensors) // _REDUCED_CHUNK)]
        if tensors
        else []
    )


INSIDE: dict[str, Callable[..., list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_foreach_norm": _foreach_norm,
}
