"""Compute the loss from the logits of the positions that have a target, all at once or in chunks: a
chunk's logits at a time, and again in backward. The same sum needs less memory. An evaluation adds
up the losses of a batch from them too."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launch.data.rows import IGNORED
from launch.schema.levers import Levers
from training.compat import transformers_private
from training.compat.transformers_private import Network
from training.data.batches import TARGET_IDS, TARGET_POSITIONS


@dataclass(frozen=True)
class Targets:
    """The targets of a micro-batch: (batch, seq), of every position, or (1, targets) and the
    places of their positions in the batch, counted over all rows."""

    ids: torch.Tensor
    positions: torch.Tensor | None = None
    smoothing: float = 0.0  # label smoothing, for target_loss_sum()


def apply(trainer: Any, levers: Levers) -> None:
    if levers.num_output_chunks > 1 or levers.logits_at_targets:
        trainer.head = LossHead(trainer.model, levers.num_output_chunks, trainer.shifts)


class LossHead:
    """Replaces a model's output projection: while it has targets, it makes the logits of their
    positions alone, (1, targets, vocabulary), and in several chunks their summed loss instead.

    It is inside the model, where an engine's hooks and autocast apply. It needs a model that
    returns its output unchanged (launch.schema.levers.CHUNKED)."""

    def __init__(self, network: Network, chunks: int, shift: bool) -> None:
        head = network.get_output_embeddings()
        self._project, self._chunks, self._shift = head.forward, chunks, shift
        self._targets: Targets | None = None
        head.forward = self._forward

    @contextmanager
    def for_loss(
        self,
        labels: torch.Tensor,
        named: Mapping[str, Any] | None = None,
        smoothing: float = 0.0,
    ) -> Iterator[None]:
        """Make the model's logits those of the targets alone. `named`: the collator's tensors;
        without them every position of `labels` (batch, seq) counts."""
        if named and TARGET_POSITIONS in named:
            self._targets = Targets(named[TARGET_IDS][None], named[TARGET_POSITIONS], smoothing)
        else:
            self._targets = Targets(
                _next_tokens(labels) if self._shift else labels, None, smoothing
            )
        try:
            yield
        finally:
            self._targets = None

    def loss_sum(self, logits: torch.Tensor) -> torch.Tensor:
        """The sum of the targets' losses, in fp32, from the logits that the model returned."""
        assert self._targets is not None
        if self._chunks > 1:
            return logits
        return target_loss_sum(logits, self._targets.ids, smoothing=self._targets.smoothing)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return self._project(hidden)
        if self._targets.positions is not None:
            rows = hidden.reshape(-1, hidden.size(-1))
            hidden = rows.index_select(0, self._targets.positions)[None]
        if self._chunks == 1:
            return self._project(hidden)
        size = math.ceil(hidden.size(1) / self._chunks)
        parts = zip(hidden.split(size, dim=1), self._targets.ids.split(size, dim=1), strict=True)
        # backward computes the sums again, when the targets are no longer there
        part_sum = partial(self.part_sum, self._targets.smoothing)
        if torch.is_grad_enabled():
            sums = [
                checkpoint(part_sum, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            ]
        else:
            sums = [part_sum(*part) for part in parts]
        return torch.stack(sums).sum()

    def part_sum(
        self, smoothing: float, hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The loss of a part of the positions; backward computes it again."""
        return target_loss_sum(self._project(hidden), labels, smoothing=smoothing)


def target_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, shift: bool = False, smoothing: float = 0.0
) -> torch.Tensor:
    """Summed cross-entropy over the targets, in fp32. logits (batch, seq, vocabulary), labels
    (batch, seq). `smoothing`: the share of a target that all tokens of the vocabulary have
    alike."""
    if shift:
        labels = _next_tokens(labels)
    return functional.cross_entropy(
        logits.float().reshape(-1, logits.size(-1)),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The token that each position predicts, (batch, seq)."""
    following = labels.roll(-1, dims=1)
    following[:, -1] = IGNORED
    return following


def known_masks(inputs: dict[str, Any]) -> AbstractContextManager[None]:
    """Tell transformers what the collator knows of the mask; a trace has no collator."""
    is_padded = inputs.pop("is_padded", None)
    return nullcontext() if is_padded is None else transformers_private.known_padding(is_padded)


@torch.no_grad()
def summed_loss(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    loss_sum: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of the targets' losses. The logits are freed before the next batch's are computed."""
    with known_masks(inputs):
        return loss_sum(model(**inputs).logits)
