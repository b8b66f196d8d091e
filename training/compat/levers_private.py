"""The private names of torch (2.11 to 2.13), transformers (5.0 to 5.23) and Accelerate (1.15) that
levers use, and those for loading weights of 4 bits and sharing them out."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import core_model_loading, modeling_utils
from transformers.integrations import sdpa_attention

from training.compat.transformers_private import Network

_groups_heads = sdpa_attention.use_gqa_in_sdpa


class Compiled(NamedTuple):
    """Counts of what this process has compiled so far."""

    graphs: int
    breaks: int  # places between two graphs where Python runs
    eager: int  # pieces of code that were not compiled: too many kinds of inputs, or no graph


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes another value inside: (owner, name, value) each."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def supports(network: Network, attention: str) -> bool:
    """True if transformers says that a model's class can compute attention by `sdpa`, or by
    `flash_attn`."""
    return bool(getattr(network, f"_supports_{attention}"))


def operand_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The type in which attention computes with this tensor."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def grouped_heads(has_flash: bool) -> tuple[Any, str, Any]:
    """The change (owner, name, value) with which sdpa repeats keys and values that queries share,
    but where the card's kernels take them as they are. Of PyTorch's kernels flash and cuDNN alone
    do, which compute in 16 bits; transformers asks without a look at card and type, and then each
    layer stores all scores.

    has_flash: this card has one of the two (from compute capability 8.0 on, and AMD)."""

    def use_gqa_in_sdpa(mask: Any, key: torch.Tensor, *rest: Any) -> bool:
        takes = has_flash and operand_dtype(key) in (torch.float16, torch.bfloat16)
        return takes and _groups_heads(mask, key, *rest)

    return (sdpa_attention, "use_gqa_in_sdpa", use_gqa_in_sdpa)


def is_view_of_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._base, torch.nn.Parameter)


def leave_out_frozen(network: torch.nn.Module) -> None:
    """Let DDP send no frozen weight of rank 0 to the others. Sent, weights that are views of a
    mapped file become memory of each rank's own, as does the copy by which they are sent."""
    frozen = [name for name, part in network.named_parameters() if not part.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, frozen)


def compiled() -> Compiled:
    """The counts of torch's compiler."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return Compiled(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        frames["total"] - frames["ok"],
    )


def each_packed(
    visit: Callable[[Network, str, Any], None],
    is_on_host: Callable[[str], bool] = lambda name: False,
) -> AbstractContextManager[None]:
    """Inside, from_pretrained() loads one parameter after another and calls `visit(model, name,
    weight)` once a weight of 4 bits is in its module, leaves those on the host whose names are said
    to be there, and reserves no block of the whole model's size on a card."""
    place, find_device = core_model_loading.set_param_for_module, core_model_loading.get_device
    materialize = core_model_loading.spawn_materialize

    def place_and_visit(model: Network, target_name: str, *args: Any, **kwargs: Any) -> None:
        place(model, target_name, *args, **kwargs)
        weight = model.get_parameter_or_buffer(target_name)
        if getattr(weight, "quant_state", None) is not None:
            visit(model, target_name, weight)

    def device_of(device_map: Any, param_name: str, **kwargs: Any) -> Any:
        return "cpu" if is_on_host(param_name) else find_device(device_map, param_name, **kwargs)

    def materialize_later(thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
        # threads would bring packed weights to the card before they are asked for
        return materialize(None, *args, **kwargs)

    return replaced(
        [
            (core_model_loading, "set_param_for_module", place_and_visit),
            (core_model_loading, "get_device", device_of),
            (core_model_loading, "spawn_materialize", materialize_later),
            (modeling_utils, "caching_allocator_warmup", lambda *args, **kwargs: None),
        ]
    )


def around_division(
    divided_by: accelerator.Accelerator,
    divide: Callable[[Callable[[Network], Network], Network], Network],
) -> None:
    """Have `divide(library, network)` share out this accelerator's model, where `library` is
    Accelerate's own way to do it."""
    library = accelerator.fsdp2_prepare_model

    def prepare(asked_by: accelerator.Accelerator, network: Network) -> Network:
        if asked_by is not divided_by:
            return library(asked_by, network)
        return divide(partial(library, asked_by), network)

    accelerator.fsdp2_prepare_model = prepare
