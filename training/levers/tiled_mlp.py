"""The MLP of each layer, a part of the tokens at a time. Backward computes a part again, and then
its gradients, before the next part. The result is the same, and of the tensors as wide as the MLP's
inner size, those of one part are there at any time.

Only the input is kept for backward, and it is kept before the MLP computes. A checkpoint around the
layer stops computing again as soon as it has all that was kept in the layer: where the MLP comes
last, this is before the MLP, which so computes twice in a step, not three times."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from launch.schema.levers import Levers

# the attribute of a layer that its MLP is in
NAMES = ("mlp", "DenseReluDense")
# parts of a mixture of experts, which routes tokens
_ROUTED = ("experts", "router")


def apply(trainer: Any, levers: Levers) -> None:
    if levers.tiled_mlp_num_shards > 1:
        tile(trainer.model, levers.tiled_mlp_num_shards)


def tile(network: torch.nn.Module, num_shards: int) -> None:
    """Let the MLPs of a network compute in so many parts."""
    modules = list(mlps(network))
    assert modules, "launch.schema.levers.TILED lists a type without such an MLP"
    for mlp in modules:
        mlp.forward = partial(_tiled_forward, mlp, mlp.forward, num_shards)


def mlps(network: torch.nn.Module) -> Iterator[Any]:
    """The modules that make a token's output of the token's input alone: MLPs of one input that
    are no mixtures of experts. tests/modes/compat/test_tiled_families.py has them by model."""
    for name, module in network.named_modules():
        if name.rpartition(".")[2] not in NAMES:
            continue
        of_peft = getattr(module, "original_module", module)  # lora.modules_to_save
        inputs = list(inspect.signature(type(of_peft).forward).parameters)[1:]
        if len(inputs) == 1 and not any(hasattr(of_peft, part) for part in _ROUTED):
            yield module


def _tiled_forward(
    mlp: torch.nn.Module,
    compute: Callable[[torch.Tensor], torch.Tensor],
    num_shards: int,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """The forward method of an MLP, `compute` before, in parts. hidden (..., features): the tokens
    of all rows follow one another."""
    tokens = hidden.reshape(1, -1, hidden.size(-1))
    size = math.ceil(tokens.size(1) / num_shards)
    if size == tokens.size(1):  # a single token, or none
        return compute(hidden)
    if torch.is_grad_enabled():
        saved: Any = _Saved.apply(tokens.new_empty(0, requires_grad=True), tokens)
        trained = [each for each in mlp.parameters() if each.requires_grad]
        tiles = _Tiles(compute, size, trained, mlp.training, saved)
        out: Any = _Tiled.apply(tiles, tokens, *trained)
    else:
        out = _joined(compute, tokens, size)
    return out.view(*hidden.shape[:-1], out.size(-1))


class _Tiles:
    """A call of an MLP, with all that backward needs to compute it again."""

    def __init__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        size: int,
        trained: Sequence[torch.nn.Parameter],
        draws: bool,
        saved: torch.Tensor,
    ) -> None:
        self.compute, self.size, self.trained = compute, size, trained
        self._saved: Any = saved  # not its grad_fn alone, which keeps nothing with torch 2.11
        self.draws = draws  # dropout may draw random numbers

    def before(self, tokens: torch.Tensor) -> None:
        """Note the random numbers and the precision of forward, before it computes."""
        kind = tokens.device.type
        self.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        self._on_host = torch.get_rng_state()
        self._devices, self._on_devices = get_device_states(tokens)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Random numbers and precision of forward."""
        kind = self.autocast["device_type"]
        with (
            torch.random.fork_rng(self._devices, self.draws, device_type=kind),
            torch.autocast(**self.autocast),
        ):
            if self.draws:
                torch.set_rng_state(self._on_host)
                set_device_states(self._devices, self._on_devices, device_type=kind)
            yield

    def input(self) -> torch.Tensor:
        """The tokens, which are kept no longer."""
        (tokens,) = self._saved.grad_fn.saved_tensors
        self._saved = None
        return tokens


class _Saved(torch.autograd.Function):
    """Keeps a tensor for a later part of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("no part of the loss")


class _Tiled(torch.autograd.Function):
    """An MLP in parts, and its gradients in the same parts. The gradient of a weight is complete
    when backward returns, so that what engines do with it is done once."""

    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, tokens: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.tiles = tiles
        tiles.before(tokens)
        return _joined(tiles.compute, tokens, tiles.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tiles: _Tiles = ctx.tiles
        tokens, (gradient,) = tiles.input(), gradients
        of_tokens = torch.empty_like(tokens) if ctx.needs_input_grad[1] else None
        totals: list[torch.Tensor | None] = [None] * len(tiles.trained)
        begin = 0
        with tiles.as_before():
            for part, of_out in zip(
                tokens.split(tiles.size, 1), gradient.split(tiles.size, 1), strict=True
            ):
                of_part, of_weights = _gradients(tiles, part, of_out, of_tokens is not None)
                if of_tokens is not None and of_part is not None:
                    of_tokens[:, begin : begin + part.size(1)] = of_part
                begin += part.size(1)
                for index, more in enumerate(of_weights):
                    if more is not None:
                        total = totals[index]
                        totals[index] = more if total is None else total.add_(more)
        return None, of_tokens, *totals


def _joined(
    compute: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, size: int
) -> torch.Tensor:
    return torch.cat([compute(part) for part in tokens.split(size, 1)], 1)


def _gradients(
    tiles: _Tiles, part: torch.Tensor, of_out: torch.Tensor, of_input: bool
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """The gradients of a part of the tokens, and of the weights from that part."""
    part = part.detach().requires_grad_(of_input)
    with torch.enable_grad():
        out = tiles.compute(part)
    inputs = [*([part] if of_input else []), *tiles.trained]
    gradients = torch.autograd.grad(out, inputs, of_out, allow_unused=True)
    return (gradients[0], gradients[1:]) if of_input else (None, gradients)
