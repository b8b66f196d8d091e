"""Facts on the forward pass of a model that is built on the meta device: its MLPs, its attention,
and the way from its output head to its logits. They are found by its modules and by a pass without
its layers, not by the name of its type."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from launch.schema.plan import ForwardFacts, HeadResult
from training.compat import levers_private, torch_private, transformers_private
from training.compat.levers_private import replaced
from training.levers import norms, tiled_mlp
from training.trace import layer_stacks

# Two numbers that no model's width has, so that a dimension says what it counts
ROWS, LENGTH = 3, 5
# Operators that change no position and are not tagged as pointwise
COPIES = ("_to_copy", "clone", "alias", "detach", "contiguous", "lift_fresh")

# Arguments of attention that a kernel for rows of documents takes, or that say the same again
_OF_ROWS_OF_DOCUMENTS = (
    *("dropout", "scaling", "sliding_window", "position_ids", "is_causal"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
# Names by which transformers knows _Attention, which gets no mask, and _Masked
RECORDED, _MASKED = "recorded_arguments", "recorded_masks"


def read(model: PreTrainedModel) -> ForwardFacts:
    """The facts on a model's forward pass."""
    flattens, dropout = flattened_attention(model)
    return ForwardFacts(
        head_result(model),
        tiles_mlp(model),
        levers_private.supports(model, "sdpa"),
        flattens,
        any(norms.norms(model)),
        dropout,
    )


def tiles_mlp(model: PreTrainedModel) -> bool:
    """True if each layer has an MLP that makes a token's output of the token's input alone."""
    num_layers = sum(len(stack) for stack in layer_stacks.stacks(model))
    return 0 < num_layers <= len(list(tiled_mlp.mlps(model)))


def head_result(model: transformers_private.Network) -> HeadResult:
    """The logits that forward() returns, by the way from the output head to them."""
    # A forward pass of each type fails in its own way: such a type has no lever on its head
    with suppress(Exception):
        total = torch.zeros((), device="meta")  # a loss in place of logits
        with _Follower(total) as follower:
            returned = _logits(model, total)
        if returned is total and not follower.num_operators:
            return "unchanged"
    with suppress(Exception):
        vocabulary = model.get_output_embeddings().weight.shape[0]
        logits = torch.zeros(ROWS, LENGTH, vocabulary, device="meta")
        with _Follower(logits) as follower:
            returned = _logits(model, logits)
        if follower.has(returned):
            return "by position"
    return "other"


def flattened_attention(model: PreTrainedModel) -> tuple[bool, float]:
    """(True if attention computes a row of documents from their starts and positions alone, its
    dropout in training). Each layer then gives the starts to transformers' interface of attention,
    heads of one width, each window that its mask has, and nothing that kernels for such rows lack;
    no other module mixes positions."""
    if (
        model.config.is_encoder_decoder
        or not levers_private.supports(model, "flash_attn")
        or any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    ):
        return False, 0.0
    starts = torch.zeros(ROWS, dtype=torch.int32, device="meta")
    attention, masked = _Attention(starts), _Masked()
    # A forward pass of each type fails in its own way: such a type keeps its mask
    with suppress(Exception), _recording(model, attention, masked):
        row = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
        positions = torch.zeros_like(row)
        with _Follower(positions) as follower, torch.no_grad():
            model(
                input_ids=row,
                position_ids=positions,
                **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts),
                **dict.fromkeys(("max_length_q", "max_length_k"), LENGTH),
                use_cache=False,
            )
        num_layers = sum(len(stack) for stack in layer_stacks.stacks(model))
        if len(attention.fits) == num_layers and follower.num_operators:
            fits = all(attention.fits) and len(attention.widths) == 1
            transformers_private.set_attention(model, _MASKED)
            with torch.no_grad():
                model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
            return fits and all(masked.agree), attention.dropout
    return False, 0.0


class _Attention:
    """An implementation of attention that computes nothing, and notes what it is given."""

    def __init__(self, starts: torch.Tensor) -> None:
        self._starts = starts
        # result of each call: kernels for rows of documents can compute it
        self.fits: list[bool] = []
        self.widths: set[int] = set()  # numbers of a head
        self.dropout = 0.0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        more = {
            name
            for name, argument in options.items()
            if not isinstance(argument, bool | None) and name not in _OF_ROWS_OF_DOCUMENTS
        }
        is_causal = options.get("is_causal")
        self.fits.append(
            attention_mask is None
            and options.get("cu_seq_lens_q") is self._starts
            and options.get("max_length_q") == LENGTH
            and bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
            and query.shape[0] == 1
            and query.shape[-1] == value.shape[-1]
            and not more
        )
        self.widths.add(query.shape[-1])
        self.dropout = max(self.dropout, options.get("dropout") or 0.0)
        return _output(query, value), None


class _Masked:
    """An implementation of attention that computes nothing, and notes if the windows of masks are
    those that it is given."""

    def __init__(self) -> None:
        self._windows: list[tuple[torch.Tensor, int | None]] = []  # mask, window
        self.agree: list[bool] = []  # result of each call: its mask has the layer's window

    def mask(self, local_size: int | None = None, **_: Any) -> torch.Tensor:
        """A mask that holds nothing."""
        mask = torch.empty(1, 1, LENGTH, LENGTH, device="meta")
        self._windows.append((mask, local_size))
        return mask

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        window = next((window for mask, window in self._windows if mask is attention_mask), None)
        self.agree.append(window == options.get("sliding_window"))
        return _output(query, value), None


def _output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1])


@contextmanager
def _recording(model: Any, attention: _Attention, masked: _Masked) -> Iterator[None]:
    """Let a model in training compute attention by the first implementation, in 16 bits: some
    experts compute in no other type."""
    planned = transformers_private.attention(model)
    dtype, is_training = model.dtype, model.training
    AttentionInterface.register(RECORDED, attention)
    AttentionInterface.register(_MASKED, masked)
    AttentionMaskInterface.register(_MASKED, masked.mask)
    transformers_private.set_attention(model, RECORDED)
    model.to(torch.bfloat16).train()
    warning = "warn_if_padding_and_no_attention_mask"  # it would read the tokens
    try:
        with replaced((each, warning, lambda *_, **__: None) for each in _models(model)):
            yield
    finally:
        transformers_private.set_attention(model, planned)
        model.to(dtype).train(is_training)


def _logits(model: transformers_private.Network, result: torch.Tensor) -> Any:
    """The logits of a forward pass whose output head gives a result. Raises ValueError for a model
    whose head is not called once, with every position."""
    calls: list[tuple[int, ...]] = []

    def project(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(hidden.shape[:-1]))
        return result

    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with (
        replaced([(model.get_output_embeddings(), "forward", project)]),
        _without_layers(model),
        torch.no_grad(),
    ):
        logits = model(**inputs, use_cache=False).logits
    if calls != [(ROWS, LENGTH)]:
        raise ValueError(f"the head was called with {calls}")
    return logits


def _without_layers(model: transformers_private.Network) -> AbstractContextManager[None]:
    """Inside, the models inside a model give hidden states of the head's width without computing
    them."""
    head = model.get_output_embeddings()
    hidden = torch.zeros(ROWS, LENGTH, head.weight.shape[1], device="meta")
    # Some forward() calls a model inside its model
    inner = [module for module in _models(model) if head not in set(module.modules())]
    return replaced(
        (module, "forward", lambda *_, **__: _Hidden(last_hidden_state=hidden)) for module in inner
    )


def _models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model, and the models inside it."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


class _Hidden(BaseModelOutput):
    """Hidden states, and nothing of all else that a model may give beside them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Follower(torch_private.TorchDispatchMode):
    """Follows a tensor through operators that compute each of its positions alone."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__()
        self._followed = [first]  # held, so that no later tensor has the same id
        self.num_operators = 0  # operators that read or write a followed tensor

    def has(self, tensor: Any) -> bool:
        return any(tensor is each for each in self._followed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [
            each for each in torch_private.tree_iter((args, kwargs)) if torch.is_tensor(each)
        ]
        followed = [each for each in tensors if self.has(each)]
        self.num_operators += bool(followed)
        unfollowed = (each for each in tensors if not self.has(each))
        is_by_position = (
            followed
            and torch.is_tensor(out)
            and out.shape == followed[0].shape
            # a view of the same shape is all of it, in its order
            and (
                torch.Tag.pointwise in func.tags
                or func.is_view
                or func.overloadpacket.__name__ in COPIES
            )
            and all(set(each.shape[:-1]) <= {1} for each in unfollowed)
        )
        if is_by_position:
            self._followed.append(out)
        elif torch_private.schema(func).is_mutable:  # it may write to a part of a followed tensor
            self._followed.clear()
        return out
