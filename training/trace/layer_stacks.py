"""The stacks of like layers in a model, and the config of a model with few of them.

Layers are alike if their modules have the same classes, parameters and settings. Where kinds of
layers take turns (sliding and full attention), each `period` layers are alike: a unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from launch.schema.recorded_step import UNITS

SETTINGS = (bool, int, float, str, torch.dtype, tuple, type(None))  # types of values that count


@dataclass(frozen=True)
class _Shallow:
    """The config of a model with few layers, which stands for one with many."""

    config: dict[str, Any]
    layers: tuple[int, ...]  # number of layers in each stack of the deep model
    period: int  # layers of a unit


def stacks(network: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The lists of layers of a model, encoder first."""
    return [
        module
        for module in network.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) > 1
        and len({type(layer) for layer in module}) == 1
    ]


def shallow_layers(layers: int, period: int = 1) -> int:
    """The layers of the shallow stack that stands for so many; a unit has `period` of them."""
    return (UNITS - 1) * period + (layers % period or period)


def shallow(config: Mapping[str, Any], depth_keys: Sequence[str], period: int) -> _Shallow | None:
    """The shallow model of a config, whose units have a multiple of `period` layers; None: its
    layers are too few, or differ. `depth_keys` are of each stack."""
    if not depth_keys:
        return None
    deep = AutoConfig.for_model(**config)
    values = deep.to_dict()
    # other names of a key would win
    aliases = {name for name, key in deep.attribute_map.items() if key in depth_keys}
    config = {key: value for key, value in config.items() if key not in aliases}
    layers = [values[key] for key in depth_keys]
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list) and len(value) in layers
    }
    unit = period
    while all(shallow_layers(count, unit) < count for count in layers):
        if all(repeats(value, unit) for value in lists.values()):
            few = {
                key: shallow_layers(count, unit)
                for key, count in zip(depth_keys, layers, strict=True)
            }
            per_layer = {key: _few(config[key], unit) for key in lists.keys() & config.keys()}
            return _Shallow({**config, **few, **per_layer}, tuple(layers), unit)
        unit += period
    return None


def repeats(kinds: Sequence[Any], period: int) -> bool:
    """True if all units between the first and the last are alike."""
    last = len(kinds) - (len(kinds) % period or period)
    return all(kinds[index] == kinds[index - period] for index in range(2 * period, last))


def _few(kinds: Sequence[Any], period: int) -> list[Any]:
    """The values of the layers of the shallow stack."""
    num_last = len(kinds) % period or period
    return [*kinds[: (UNITS - 1) * period], *kinds[-num_last:]]


def layer_period(model: torch.nn.Module) -> int:
    """The layers of a unit of every stack; 0: layers differ in no period that is repeated."""
    kinds = [_kinds(stack) for stack in stacks(model)]
    most = max(map(len, kinds), default=0)
    alike = (period for period in range(1, most) if all(repeats(each, period) for each in kinds))
    period = next(alike, 0)
    is_repeated = period == 1 or (
        period and all(shallow_layers(len(each), period) < len(each) for each in kinds)
    )
    return period if is_repeated else 0


def stands_for(few: torch.nn.Module, model: torch.nn.Module, period: int) -> bool:
    """True if the layers of a shallow model are those that it stands for."""
    expected = [_few(_kinds(stack), period) for stack in stacks(model)]
    return [_kinds(stack) for stack in stacks(few)] == expected


def is_nested(model: torch.nn.Module) -> bool:
    """True if a stack is inside a layer of another."""
    inside = {id(part) for stack in stacks(model) for layer in stack for part in layer.modules()}
    return any(id(stack) in inside for stack in stacks(model))


def _kinds(stack: torch.nn.ModuleList) -> list[Any]:
    return [list(_parts(layer, index)) for index, layer in enumerate(stack)]


def _parts(layer: torch.nn.Module, index: int) -> Iterator[Any]:
    """Class, tensors and settings of each module of a layer, without the number of the layer."""
    for name, module in layer.named_modules():
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype)
            for key, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
        ]
        settings = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_")
            and isinstance(value, SETTINGS)
            and not (type(value) is int and value in (index, index + 1) and _names_layer(key))
        }
        yield name, type(module), tensors, settings


def _names_layer(key: str) -> bool:
    return any(word in key for word in ("idx", "index", "layer_id", "layer_number"))
