"""The private names of torch (2.11 to 2.13) that training uses."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "op_implementations_dict",
    "tree_iter",
    "tree_map_only",
    "unset_fake_temporarily",
]

# lists in a scheduler's state with a value per parameter group
SCHEDULE_LISTS = ("base_lrs", "_last_lr", "lr_lambdas")
safe_softmax: Callable[[torch.Tensor, int], torch.Tensor] = torch._safe_softmax  # pyright: ignore


# ---- on ranks


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of tensors of one device and type, or NaN."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max()  # pyright: ignore


# the key-value store through which the ranks met
default_store: Callable[[], Any] = distributed_c10d._get_default_store


def read_sharded(folder: Path) -> dict[str, Any]:
    """The full content of a sharded checkpoint, as torch's dcp_to_torch_save reads it."""
    from torch.distributed.checkpoint import FileSystemReader, format_utils  # pyright: ignore

    content: dict[str, Any] = {}
    format_utils._load_state_dict(  # pyright: ignore
        content,
        storage_reader=FileSystemReader(folder),
        planner=format_utils._EmptyStateDictLoadPlanner(),  # pyright: ignore
        no_dist=True,
    )
    return content


def rebuilds_tensor(module: str, name: str) -> bool:
    """True for a pickle's callable that only makes a tensor from its parts."""
    return (module, name) == ("torch._tensor", "_rebuild_from_type_v2") or (
        module == "torch._utils" and name.startswith("_rebuild_")
    )


# ---- in a trace


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the storage, which tensors that share it have in common."""
    return storage._cdata


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def tensors_by_name(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, to be replaced in place."""
    return module._parameters, module._buffers


def schema(operator: Any) -> Any:
    return operator._schema


def packet(operator: Any) -> Any:
    """The operator of which this is one overload."""
    return operator._overloadpacket


# the number that autograd gives to its next node
next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore


def attention_kernel(*arguments: Any) -> SDPBackend:
    """The kernel that scaled_dot_product_attention chooses for these arguments, of which nothing is
    computed."""
    return SDPBackend(torch._fused_sdp_choice(*arguments))


def current_node_number() -> int | None:
    """The number of the autograd node that runs; None: no node runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def destroy(library: torch.library.Library) -> None:
    """Take back every kernel that the library has registered."""
    library._destroy()


# (operator, dispatch key)
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names


def without_autocast(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call the operator below the CPU's autocast."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        return operator(*args, **kwargs)


def foreach_on_cpu(types: list[type]) -> list[tuple[Any, str, Any]]:
    """(owner, name, value) with which optimizers and clipping use foreach kernels on the CPU for
    tensors of these types."""
    from torch.optim import optimizer  # pyright: ignore
    from torch.utils import _foreach_utils

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    return [
        (optimizer, "_foreach_supported_types", types),
        (_foreach_utils, "_foreach_supported_types", types),
        (optimizer, "_get_foreach_kernels_supported_devices", lambda: devices),
    ]
