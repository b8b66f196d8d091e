"""torch's varlen_attn on a CPU: kernels of its two operators in plain PyTorch, registered with
PyTorch's own dispatcher.

There is none for CPUs. What they compute is in torch/nn/attention/varlen.py; everything around
them, from the collator to torch's autograd of the operator, is what runs on a card. Importing this
module registers them, also in a process that a test starts: python -c "import tests.varlen_on_cpu;
..."."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.attention import varlen

calls: list[list[int]] = []  # the lengths of the documents of each call
Window = list[int] | None


class Document(NamedTuple):
    """Its query (heads, tokens, width), its keys and values, one for each head of the query, and
    the weights of its values (heads, tokens, tokens); at least float32."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    logsumexp: torch.Tensor  # (heads, tokens)


def documents(
    operands: tuple[torch.Tensor, ...],
    lengths: list[int],
    is_causal: bool,
    scale: float,
    window: Window,
) -> Iterator[Document]:
    """Each document of query, key and value (tokens, heads, width), which attends to itself."""
    left, right = window or [-1, -1]
    right = 0 if is_causal else right
    group = operands[0].shape[1] // operands[1].shape[1]
    for parts in zip(*(tensor.split(lengths) for tensor in operands), strict=True):
        query, keys, values = (wide(part).transpose(0, 1) for part in parts)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query @ keys.transpose(1, 2) * scale
        tokens = torch.arange(query.shape[1])
        back = tokens[:, None] - tokens
        seen = torch.ones_like(back, dtype=torch.bool)
        if right >= 0:
            seen &= back >= -right
        if left >= 0:
            seen &= back <= left
        scores = scores.masked_fill(~seen, -torch.inf)
        yield Document(query, keys, values, scores.softmax(-1), scores.logsumexp(-1))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def lengths_of(query: torch.Tensor, starts: torch.Tensor, longest: int) -> list[int]:
    """The lengths of the documents, which the kernels on a card believe."""
    assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(query)
    lengths = starts.diff().tolist()
    assert max(lengths) == longest
    return lengths


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Window = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert cu_seq_k is not None and cu_seq_q.tolist() == cu_seq_k.tolist() and max_q == max_k
    lengths = lengths_of(query, cu_seq_q, max_q)
    calls.append(lengths)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = [*documents((query, key, value), lengths, is_causal, scale, window_size)]
    out = torch.cat([(one.weights @ one.values).transpose(0, 1) for one in found])
    sums = torch.cat([one.logsumexp for one in found], 1).float()
    return out.to(query.dtype).contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: Window = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 4 of arXiv 2205.14135, without its tiles."""
    lengths = lengths_of(query, cu_seq_q, max_q)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads: list[tuple[torch.Tensor, ...]] = []
    found = documents((query, key, value), lengths, is_causal, scale, window_size)
    for one, grad, result in zip(found, grad_out.split(lengths), out.split(lengths), strict=True):
        grad, result = wide(grad).transpose(0, 1), wide(result).transpose(0, 1)
        of_weights = grad @ one.values.transpose(1, 2)
        of_scores = one.weights * (of_weights - (grad * result).sum(-1, keepdim=True)) * scale
        parts = (
            of_scores @ one.keys,
            of_scores.transpose(1, 2) @ one.query,
            one.weights.transpose(1, 2) @ grad,
        )
        grads.append(tuple(part.transpose(0, 1) for part in parts))
    of_query, of_key, of_value = (torch.cat(parts) for parts in zip(*grads, strict=True))
    shared = (len(query), key.shape[1], -1, query.shape[-1])
    return (
        of_query.to(query.dtype).contiguous(),
        of_key.reshape(shared).sum(2).to(key.dtype),
        of_value.reshape(shared).sum(2).to(value.dtype),
    )


varlen._varlen_attn.register_kernel("cpu", forward)
varlen._varlen_attn_backward.register_kernel("cpu", backward)


@contextmanager
def counted() -> Iterator[list[list[int]]]:
    """Gives the lengths of each call within it."""
    calls.clear()
    yield calls
