"""Compute the loss in chunks of positions: the logits of a chunk at a time, and again in backward.
The same sum needs less memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launch.data.rows import IGNORED
from training.compat.transformers_private import Network


class ChunkedHead:
    """Replaces a model's output projection: while it has labels, its output is the summed loss
    instead of logits.

    It is inside the model, where an engine's hooks and autocast apply. It needs a model that
    returns its output unchanged (launch.plan.candidates.CHUNKED)."""

    def __init__(self, network: Network, chunks: int, shift: bool) -> None:
        head = network.get_output_embeddings()
        self._project, self._chunks, self._shift = head.forward, chunks, shift
        self._labels: torch.Tensor | None = None
        head.forward = self._forward

    @contextmanager
    def summed_loss(self, labels: torch.Tensor) -> Iterator[None]:
        """Make the model's logits the summed loss of these targets, (batch, seq), in fp32."""
        self._labels = _next_tokens(labels) if self._shift else labels
        try:
            yield
        finally:
            self._labels = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._labels is None:
            return self._project(hidden)
        size = math.ceil(hidden.size(1) / self._chunks)
        parts = zip(hidden.split(size, dim=1), self._labels.split(size, dim=1), strict=True)
        if torch.is_grad_enabled():
            sums = [
                checkpoint(self._sum, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            ]
        else:
            sums = [self._sum(*part) for part in parts]
        return torch.stack(sums).sum()

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return target_loss_sum(self._project(hidden), labels)


def target_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, shift: bool = False
) -> torch.Tensor:
    """Summed cross-entropy over the targets, in fp32. logits (batch, seq, vocabulary), labels
    (batch, seq)."""
    if shift:
        labels = _next_tokens(labels)
    return functional.cross_entropy(
        logits.float().reshape(-1, logits.size(-1)),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The token that each position predicts, (batch, seq)."""
    following = labels.roll(-1, dims=1)
    following[:, -1] = IGNORED
    return following
