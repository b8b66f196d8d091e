"""Private names of transformers and torch by which the forward pass of a model is read."""

from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

__all__ = ["supports", "tree_leaves"]


def supports(model: PreTrainedModel, attention: str) -> bool:
    """True if transformers says that a model's class can compute attention by `sdpa`, or by
    `flash_attn`."""
    return bool(getattr(model, f"_supports_{attention}"))
