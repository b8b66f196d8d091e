"""The private names of torch (2.11 to 2.13) with which a trace finds the shapes that an operator
gives in torch's cache of them. Torch's own key and result take most of a trace's time: they allow
for symbolic sizes, sparse tensors and several devices, which a trace does not have."""

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_Bypass: Any = fake_tensor._BypassDispatchCache  # pyright: ignore[reportPrivateUsage]
_NOT_PLAIN = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_ATTRIBUTES: dict[torch.device, dict[str, Any]] = {}


def short_cache() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) with which the cache has short keys. Shapes that were cached with
    torch's keys are not found, and none of them is taken for another."""
    return [
        (FakeTensorMode, "_cache_key", _cache_key),
        (FakeTensorMode, "_get_output_tensor_from_cache_entry", _cached),
    ]


def _cache_key(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The operator, and all of its arguments that decide its result. Raises torch's Bypass for
    arguments whose results are not cached."""
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    _append(key, mode, args)
    for name, value in kwargs.items():
        key.append(name)
        _append(key, mode, (value,))
    return tuple(key)


def _append(key: list[Any], mode: Any, values: Any) -> None:
    for value in values:
        kind = type(value)
        key.append(kind)  # 1 and 1.0 are equal, and give results of different types
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode is not mode:
                raise _Bypass("a constant, or a tensor of another mode")
            key += (
                value.dtype,
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.layout,
                value.fake_device,
                value.requires_grad,
                value.is_conj(),
                value.is_neg(),
            )
        elif isinstance(value, list | tuple):
            key.append(len(value))
            _append(key, mode, value)
        elif isinstance(value, _NOT_PLAIN):
            raise _Bypass("no plain fake tensor")
        else:
            key.append(value)


def _cached(mode: Any, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
    """The result that a cache entry describes: an argument, a number, or a new tensor."""
    if entry.inplace_idx is not None:
        return args[entry.inplace_idx]
    new = entry.metadata
    if new is None:
        return entry.constant_value
    with torch._C._DisableTorchDispatch():  # pyright: ignore[reportPrivateUsage]
        empty = torch.empty_strided(
            new.shape,
            new.stride,
            dtype=new.dtype,
            layout=new.layout,
            device="meta",
            requires_grad=new.requires_grad,
        )
        if entry.view_idx is not None:
            storage = args[entry.view_idx].untyped_storage()
            empty.set_(storage, new.storage_offset, new.shape, new.stride)
        return _fake(mode, empty, new.device)


def _fake(mode: Any, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
    """A fake tensor with the attributes that torch gives the first of this device."""
    attributes = _ATTRIBUTES.get(device)
    if attributes is None:
        first = FakeTensor(mode, tensor, device)
        _ATTRIBUTES[device] = {
            name: vars(first)[name] for name in vars(first).keys() - {"fake_mode"}
        }
        return first
    fake = torch.Tensor._make_subclass(  # pyright: ignore
        FakeTensor,
        tensor,
        tensor.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=device,
    )
    if mode._allow_unsafe_data_ptr_access:  # a kernel of bitsandbytes is given addresses
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # pyright: ignore
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)  # pyright: ignore
    vars(fake).update(attributes, fake_mode=mode)
    return fake
