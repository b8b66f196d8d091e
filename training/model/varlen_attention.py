"""Attention by torch's varlen_attn: the flash kernels of PyTorch for a row of documents, each of
which attends to itself alone. There is no mask and no padding.

transformers calls it by the name varlen_attn, as it calls its own implementations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from training.compat import levers_private, transformers_private

NAME = "varlen_attn"


def register(attention: str) -> None:
    """Make the implementation known to transformers, if it is this one."""
    if attention == NAME:
        from torch.nn.attention import varlen  # noqa: F401  # pyright: ignore[reportUnusedImport]

        AttentionInterface.register(NAME, attend)


@contextmanager
def answering_with_masks(network: transformers_private.Network) -> Iterator[None]:
    """Inside, a network with this attention uses sdpa, which computes the same: prompts of a batch
    are padded."""
    attention = transformers_private.attention(network)
    if attention == NAME:
        transformers_private.set_attention(network, "sdpa")
    try:
        yield
    finally:
        transformers_private.set_attention(network, attention)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, heads, tokens, width) queries, as (1, tokens, heads, width). Keys and values
    may have fewer heads. The documents begin at `cu_seq_lens_q`, and the longest of them has
    `max_length_q` tokens: the collator knows both, so the device is not asked."""
    from torch.nn.attention.varlen import varlen_attn

    assert query.shape[0] == 1 and attention_mask is None, "rows are not flattened"
    assert cu_seq_lens_q is not None and max_length_q is not None, "no starts of documents"
    assert not dropout, f"varlen_attn has no dropout, asked for {dropout}"
    # products of a norm with float32 weights are float32 under autocast, which does not know
    # this operator
    dtype = levers_private.operand_dtype(value)
    query, key, value = (x.to(dtype).squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        # a token sees itself and the others of its window, none that follow
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # no logsumexp is asked for
    return out.unsqueeze(0), None
