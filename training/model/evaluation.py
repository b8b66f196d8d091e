"""The loss of a batch of held-out rows, without gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from training.compat import transformers_private


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
