"""flash_attn's two functions in plain PyTorch, given to transformers where it looks for the
package's own.

There is no build of the package for CPUs. What it computes is in its interface's docstrings;
everything around it, from the collator to transformers' flash_attention_forward, is what runs on a
card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import modeling_flash_attention_utils as utils

calls: list[list[int]] = []  # the lengths of the documents of each call


# Its parameters are flash_attn's own, here and in training/trace/cuda_semantics.py: transformers
# passes them by name.
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """q (tokens, heads, width), k and v with fewer heads; each document attends to itself alone."""
    assert causal and not dropout_p
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() and cu_seqlens_q[-1] == len(q) == len(k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    calls.append(lengths)
    group = q.shape[1] // k.shape[1]
    found = []
    for one, keys, values in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", one, keys).float() * scale
        back = torch.arange(len(one))[:, None] - torch.arange(len(one))
        seen = (back >= 0) & (back <= window_size[0] if window_size[0] >= 0 else True)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(values.dtype)
        found.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(found)


@contextmanager
def there() -> Iterator[list[list[int]]]:
    """Within it models whose attention is flash_attention_2 run on the CPU. Gives the lengths of
    each call."""
    found = utils._lazy_imports, utils._loaded_implementation
    calls.clear()
    utils._lazy_imports = lambda *args, **kwargs: (None, flash_attn_varlen_func, None, None, None)
    utils._loaded_implementation = None
    try:
        yield calls
    finally:
        utils._lazy_imports, utils._loaded_implementation = found
