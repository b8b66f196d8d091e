"""Merge a LoRA adapter into its model. Weights that are tied get tensors of their own where the
adapter changes one of them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from transformers import PreTrainedTokenizerBase

from launch.base.errors import ExportError
from training.compat.transformers_private import Network

# ends of names: what peft puts an adapter, or a copy, around
_ADAPTED = (".base_layer", ".original_module")
ROW_TOKENS = 31  # tokens of a row whose logits are compared
# Largest difference of two logits, as a share of the largest logit: rounding alone. In 16 bits the
# sum of two products is rounded otherwise than one product; right merges of strong adapters were
# off by up to 5.3 %, and the wrong side of a tied pair by 36 % at least.
MOST_OFF, MOST_OFF_IN_16_BITS = 1e-4, 0.12


def merged(adapted: Network, merge: Callable[[], Network]) -> Network:
    """The ordinary model that `merge` makes of an adapted one. Where tied weights differ after it,
    its config says that they are not tied."""
    text_config = adapted.config.get_text_config()
    ties_embeddings = text_config.tie_word_embeddings
    _untie(adapted)
    model = merge()
    ties = model.all_tied_weights_keys
    pairs = [(model.get_parameter(name), model.get_parameter(of)) for name, of in ties.items()]
    are_tied = all(torch.equal(weight, source) for weight, source in pairs)
    text_config.tie_word_embeddings = ties_embeddings and are_tied
    is_stored = not are_tied and can_untie(adapted)
    for name, (weight, source) in zip(ties, pairs, strict=True):
        module_name, _, last_name = name.rpartition(".")
        if torch.equal(weight, source):
            same = Parameter(weight.detach().clone()) if is_stored else source
            setattr(model.get_submodule(module_name), last_name, same)
    if not are_tied:
        _scale_head(model)
    return model


def can_untie(network: Network) -> bool:
    """False for a T5, which ties what is not stored apart, whatever its config says."""
    kind = type(network.config.get_text_config())
    return not kind(tie_word_embeddings=False).tie_word_embeddings


def _untie(network: torch.nn.Module) -> None:
    """Give each place of a weight that an adapter changes, and that has several, its own tensor:
    peft adds to a weight in place."""
    places: dict[Parameter, list[tuple[str, torch.nn.Module, str]]] = defaultdict(list)
    for module_name, module in network.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module_name, module, name))
    for parameter, shared in places.items():
        if any(module_name.endswith(_ADAPTED) for module_name, _, _ in shared):
            for _, module, name in shared[1:]:
                setattr(module, name, Parameter(parameter.detach().clone(), requires_grad=False))


def _scale_head(model: Network) -> None:
    """Put the scale of a T5's last hidden states into its output head: a T5 whose config says that
    its head is not tied has no such scale."""
    if getattr(model.config, "scale_decoder_outputs", False):
        head: Any = model.get_output_embeddings()
        head.weight = Parameter(head.weight.detach() * model.config.d_model**-0.5)
        model.config.scale_decoder_outputs = False


def logits(model: Network, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The logits of a row of tokens from all of the vocabulary, with the last ones."""
    ids = sorted(tokenizer.get_vocab().values())
    row = torch.tensor([[*ids[:: -(-len(ids) // ROW_TOKENS)], ids[-1]]], device=model.device)
    pair = {"decoder_input_ids": row} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=row, **pair).logits


def check(measured: torch.Tensor, expected: torch.Tensor, folder: str) -> None:
    """Raise ExportError if the logits of a folder's model are not those of the trained model."""
    share = float((measured - expected).abs().max() / expected.abs().max())
    most = MOST_OFF if expected.dtype == torch.float32 else MOST_OFF_IN_16_BITS
    if not share <= most:
        raise ExportError(
            f"{folder}: the merged model is not the adapter on its base: its logits differ by"
            f" {share:.2%} of the largest one, expected at most {most:.2%}, so no folder is"
            " written; use the adapter beside its base (scripts/chat.py, peft)"
        )
